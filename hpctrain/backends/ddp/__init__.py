"""torch.distributed: DistributedDataParallel over NCCL on GPUs and gloo on CPUs.

The only folder that uses torch.distributed.
"""

from hpctrain.backends.ddp.ddp_backend import DDP, TransparentDDP
from hpctrain.backends.ddp.store import AgentStore

__all__ = ["DDP", "AgentStore", "TransparentDDP"]
