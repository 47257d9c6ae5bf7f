"""torch.distributed: its default process group, over NCCL on GPUs and gloo on CPUs."""

from hpctrain.backends.distributed.process_group import ProcessGroup, transport_of
from hpctrain.backends.distributed.store import AgentStore

__all__ = ["AgentStore", "ProcessGroup", "transport_of"]
