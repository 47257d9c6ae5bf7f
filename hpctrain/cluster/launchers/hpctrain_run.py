"""`hpctrain run` and `hpctrain.spawn`: ranks started on this machine by this project."""

from collections.abc import Sequence

from hpctrain.cluster.env_vars import START
from hpctrain.cluster.launchers.base import Claim, Claims, Environ, Launcher
from hpctrain.cluster.world import World

__all__ = ["HpctrainRun"]


class HpctrainRun(Launcher):
    """The variables that `hpctrain run` and `hpctrain.spawn` set."""

    name = "hpctrain"
    reason = "first: it scrubs what others set before it starts a rank, so it is the nearest"
    marks = ("HPCTRAIN_RANK", "HPCTRAIN_WORLD_SIZE")
    # The variables of the job stay, and its step's number.
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

    def only_port(self, env: Environ) -> bool:
        """Of hosts by hand, which share nothing but rank 0's address and port."""
        return ":" in env.get(START, "")

    def claims(self, env: Environ) -> Claims:
        """The numbers, and the hosts where they are named."""
        claims = super().claims(env)
        hosts = env.get("HPCTRAIN_HOSTS")
        if hosts:
            claims["hosts"] = Claim(tuple(hosts.split(",")), "HPCTRAIN_HOSTS")
        return claims

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """All of World; the hosts only where they are known."""
        return {
            START: str(start),
            "HPCTRAIN_RANK": str(world.rank),
            "HPCTRAIN_WORLD_SIZE": str(world.world_size),
            "HPCTRAIN_LOCAL_RANK": str(world.local_rank),
            "HPCTRAIN_LOCAL_WORLD_SIZE": str(tasks_per_node[world.node_rank or 0]),
            "HPCTRAIN_NODE_RANK": str(world.node_rank),
            "HPCTRAIN_NUM_NODES": str(world.num_nodes),
            **({"HPCTRAIN_HOSTS": ",".join(world.hosts)} if world.hosts else {}),
        }
