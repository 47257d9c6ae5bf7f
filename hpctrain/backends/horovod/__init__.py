"""Horovod: gradients averaged by its DistributedOptimizer, over gloo, MPI or NCCL.

The only folder that names Horovod's Python package. `installed` finds it, `placement` tells it who
this process is, `rendezvous` serves what its ranks need to find each other, `gradients` averages,
`group` puts these together.
"""

from hpctrain.backends.horovod.group import Horovod

__all__ = ["Horovod"]
