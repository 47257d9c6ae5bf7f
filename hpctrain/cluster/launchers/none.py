"""Nobody started this process with others: a laptop, a notebook, one GPU."""

from collections.abc import Sequence

from hpctrain.cluster.launchers.base import Claim, Claims, Environ, Launcher
from hpctrain.cluster.world import World

__all__ = ["NoLauncher"]


class NoLauncher(Launcher):
    """One process that trains alone."""

    name = "none"
    reason = "last: it recognises everything"
    variables = {}

    def matches(self, env: Environ) -> bool:
        """Always."""
        del env
        return True

    @property
    def recognised_by(self) -> str:
        """Nothing."""
        return "nothing of the others"

    def claims(self, env: Environ) -> Claims:
        """Rank 0 of 1, as nothing says otherwise."""
        del env
        alone = {
            "rank": 0,
            "world_size": 1,
            "local_rank": 0,
            "local_world_size": 1,
            "node_rank": 0,
            "num_nodes": 1,
        }
        return {field: Claim(value, "no launcher") for field, value in alone.items()}

    def world(self, env: Environ) -> World:
        """Rank 0 of 1."""
        return World(**{field: claim.value for field, claim in self.claims(env).items()})

    def environ(self, world: World, tasks_per_node: Sequence[int], start: int) -> dict[str, str]:
        """Nothing."""
        del world, tasks_per_node, start
        return {}
