"""The env:// variables of torch.distributed, set by hand or by an older launcher.

Source: the section "Environment variable initialization" of torch.distributed's documentation.
"""

from collections.abc import Sequence

from hpctrain.launchers.base import Environ, Launcher
from hpctrain.world import World

__all__ = ["ByHand"]


class ByHand(Launcher):
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""

    name = "env"
    reason = "after the launchers that say more: scripts export these on top of them"
    variables = {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
    }

    def matches(self, env: Environ) -> bool:
        """A rank or a size is set; one without the other is refused when it is read."""
        return bool(env.get("RANK") or env.get("WORLD_SIZE"))

    def key(self, env: Environ) -> str:
        """Address, port and size: there is nothing else that all ranks share."""
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
        return "/".join(["env", *(env.get(name, "") for name in names)])

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """The five variables; the port follows from `start`."""
        return {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(tasks_per_node[world.node_rank or 0]),
            "MASTER_ADDR": world.hosts[0] if world.hosts else "127.0.0.1",
            "MASTER_PORT": str(20000 + start % 12000),
        }
