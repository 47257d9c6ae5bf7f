"""torchrun: an agent on each host that starts the ranks there.

Source: the section "Environment Variables" of torch.distributed.run's documentation.
"""

from collections.abc import Sequence

from hpctrain.launchers.base import Environ, Launcher
from hpctrain.world import World

__all__ = ["Torchrun"]


class Torchrun(Launcher):
    """The variables that an agent of torch.distributed.elastic sets."""

    name = "torchrun"
    reason = "before Slurm: `srun torchrun` starts agents, and the agents start the ranks"
    inside = frozenset({"slurm"})
    variables = {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
        "num_nodes": ("GROUP_WORLD_SIZE",),
    }

    def matches(self, env: Environ) -> bool:
        """Only an agent sets a run id."""
        return bool(env.get("TORCHELASTIC_RUN_ID"))

    def key(self, env: Environ) -> str:
        """Run id and store; the id alone is "none" for every static rendezvous."""
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
        return "/".join(["torchrun", *(env.get(name, "") for name in names)])

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """MASTER_ADDR is where the first agent and so rank 0 is; its port is the agent's own."""
        del world
        return env.get("MASTER_ADDR") or None, None

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """What an agent sets; the run id follows from `start`."""
        return {
            "TORCHELASTIC_RUN_ID": f"hpctrain-{start}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(tasks_per_node[world.node_rank or 0]),
            "GROUP_RANK": str(world.node_rank),
            "GROUP_WORLD_SIZE": str(world.num_nodes),
            "MASTER_ADDR": world.hosts[0] if world.hosts else "127.0.0.1",
            "MASTER_PORT": str(20000 + start % 12000),
        }
