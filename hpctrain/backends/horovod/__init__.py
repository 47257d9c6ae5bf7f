"""Horovod: gradients averaged by its DistributedOptimizer, over gloo, MPI or NCCL.

The only folder that names Horovod's Python package. `horovod_import` imports and checks it,
`placement` sets the variables for this process, `liveness` finds lost ranks, and serves the values
by which Horovod's ranks find each other, `gradients` averages, `horovod_backend` combines these.
"""

from hpctrain.backends.horovod.horovod_backend import Horovod

__all__ = ["Horovod"]
