"""How many files and connections may this process have open?"""

import resource
from collections.abc import Callable

from hpctrain.errors import UsageError

__all__ = ["make_room"]

# A connection to each other rank (gloo's pairs, rank 0's callers and its store's clients), and
# what a process has open besides: libraries, loader workers, files.
_BESIDES = 512
_CONNECTIONS = 2


def make_room(world_size: int) -> Callable[[], None]:
    """Raise the limit on open files where the ranks need more; what puts it back.

    Raises:
        UsageError: the system's own limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _CONNECTIONS * world_size + _BESIDES
    if world_size == 1 or soft == resource.RLIM_INFINITY or soft >= needed:
        return lambda: None
    if hard != resource.RLIM_INFINITY and hard < needed:
        if soft < world_size + _BESIDES // 8 and hard < world_size + _BESIDES // 8:
            raise UsageError(
                f"at most {hard} open files in a process (ulimit -Hn), and {world_size} ranks",
                f"at least {needed}: a rank is connected to each of the others",
                "ask for a higher limit (LimitNOFILE of slurmd, /etc/security/limits.conf)",
            )
        needed = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
