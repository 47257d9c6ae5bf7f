"""The launcher torchrun: an agent on each host starts the ranks there.

Source: the section "Environment Variables" of torch.distributed.run's documentation.
"""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import (
    MPI,
    SCHEDULERS,
    Environ,
    Launcher,
    LauncherStore,
    port_in,
)
from hpctrain.cluster.world import World

__all__ = ["Torchrun"]


class Torchrun(Launcher):
    """The variables that an agent of torch.distributed.elastic sets."""

    name = "torchrun"
    reason = "before all others: they start agents, and the agents start the ranks"
    # Only an agent sets a run id.
    marks = ("TORCHELASTIC_RUN_ID",)
    inside = SCHEDULERS | MPI
    variables = {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
        "num_nodes": ("GROUP_WORLD_SIZE",),
    }
    # The run id alone is not enough: it is "none" for every static rendezvous.
    starts = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    knows_rank_0 = True

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return MASTER_ADDR, the host of rank 0, without MASTER_PORT, which the agent uses."""
        del world
        return env.get("MASTER_ADDR") or None, None

    def store(self, env: Environ) -> LauncherStore | None:
        """Return the store of the first agent if the ranks may use it, else None."""
        port = port_in(env, "MASTER_PORT")
        if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not env.get("MASTER_ADDR"):
            return None
        return LauncherStore(self.name, env["MASTER_ADDR"], port) if port else None

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return the variables that an agent sets; derive the run id from `start`."""
        return {
            **super().environ(world, tasks_per_node, start),
            "TORCHELASTIC_RUN_ID": f"hpctrain-{start}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # There is no agent with a store, so rank 0 has to serve one.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(world.rank),
            "ROLE_WORLD_SIZE": str(world.world_size),
            "MASTER_ADDR": world.hosts[0] if world.hosts else "127.0.0.1",
            "MASTER_PORT": str(20000 + start % 12000),
        }
