"""A process that no launcher started: on a laptop, in a notebook, or with one GPU."""

from hpctrain.cluster.launchers.base import Claim, Claims, Environ, Launcher
from hpctrain.cluster.world import World

__all__ = ["NoLauncher"]


class NoLauncher(Launcher):
    """A single process that trains alone."""

    name = "none"
    recognised_by = "other launcher"
    reason = "last: it matches every environment"

    def matches(self, env: Environ) -> bool:
        """Return True for every environment."""
        del env
        return True

    def claims(self, env: Environ) -> Claims:
        """Return the values of rank 0 in a world of size 1."""
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
        """Return rank 0 in a world of size 1."""
        return World(**{field: claim.value for field, claim in self.claims(env).items()})
