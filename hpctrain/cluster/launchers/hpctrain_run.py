"""The launchers of hpctrain itself: `hpctrain run` and `hpctrain.spawn`."""

from collections.abc import Sequence

from hpctrain.cluster.env_vars import START
from hpctrain.cluster.launchers.base import Claim, Claims, Environ, Launcher
from hpctrain.cluster.world import World

__all__ = ["HpctrainRun"]


class HpctrainRun(Launcher):
    """The variables that `hpctrain run` and `hpctrain.spawn` set."""

    name = "hpctrain"
    reason = "first: it removes the variables of other launchers, so it is the closest to the ranks"
    marks = ("HPCTRAIN_RANK", "HPCTRAIN_WORLD_SIZE")
    # The variables of the Slurm job and its step id stay in the environment.
    inside = frozenset({"slurm"})
    starts = (START,)
    variables = {
        "rank": ("HPCTRAIN_RANK",),
        "world_size": ("HPCTRAIN_WORLD_SIZE",),
        "local_rank": ("HPCTRAIN_LOCAL_RANK",),
        "local_world_size": ("HPCTRAIN_LOCAL_WORLD_SIZE",),
        "node_rank": ("HPCTRAIN_NODE_RANK",),
        "num_nodes": ("HPCTRAIN_NUM_NODES",),
    }

    composed = {"hosts": "HPCTRAIN_HOSTS"}

    def main(self, env: Environ, world: World) -> tuple[str | None, int | None]:
        """Return nothing: MASTER_PORT is that of a store for programs without a session."""
        del env, world
        return None, None

    def claims(self, env: Environ) -> Claims:
        """Return the values of the variables, and the hosts if they are set."""
        claims = super().claims(env)
        hosts = env.get("HPCTRAIN_HOSTS")
        if hosts:
            claims["hosts"] = Claim(tuple(hosts.split(",")), "HPCTRAIN_HOSTS")
        return claims

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Return variables for all fields of World; the hosts only if they are known."""
        hosts = {"HPCTRAIN_HOSTS": ",".join(world.hosts)} if world.hosts else {}
        return super().environ(world, tasks_per_node, start) | hosts
