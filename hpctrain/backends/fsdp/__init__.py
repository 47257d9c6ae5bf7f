"""Fully sharded data parallelism, over the process group of torch.distributed."""

from hpctrain.backends.fsdp.fsdp_backend import FSDP

__all__ = ["FSDP"]
