"""The limit on open files and connections of this process."""

import resource
from collections.abc import Callable

from hpctrain.errors import UsageError

__all__ = ["make_room"]

# Open files for each rank (connections of gloo; on rank 0 clients of the rendezvous and of the
# store), and for everything else: libraries, loader workers, files.
_BESIDES = 512
_CONNECTIONS = 2


def make_room(world_size: int) -> Callable[[], None]:
    """Raise the limit on open files if the ranks need more; return a function that restores it.

    Raises:
        UsageError: the system's hard limit is too low for one connection to each rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _CONNECTIONS * world_size + _BESIDES
    if world_size == 1 or soft == resource.RLIM_INFINITY or soft >= needed:
        return lambda: None
    if hard != resource.RLIM_INFINITY and hard < needed:
        if soft < world_size + _BESIDES // 8 and hard < world_size + _BESIDES // 8:
            raise UsageError(
                "HT117.open-files-limit", limit=hard, world_size=world_size, needed=needed
            )
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
