"""Horovod: gradients averaged by its DistributedOptimizer, over gloo, MPI or NCCL.

The only folder that names Horovod's Python package. `installed` imports it, `placement` sets the
variables for this process, `rendezvous` serves the values that its ranks need to find each other,
`gradients` averages, `group` combines these.
"""

from hpctrain.backends.horovod.horovod_backend import Horovod

__all__ = ["Horovod"]
