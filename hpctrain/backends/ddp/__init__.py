"""DistributedDataParallel, over the process group of torch.distributed."""

from hpctrain.backends.ddp.ddp_backend import DDP, TransparentDDP

__all__ = ["DDP", "TransparentDDP"]
