"""Variables that Python, torch and their libraries read once, at the start or at the import.

In a forked rank they were read before its script: a later change has no effect.
"""

import re
from collections.abc import Mapping

__all__ = ["READ_ONCE", "changed"]

READ_ONCE = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|MALLOC|LD|NUMEXPR)_\w+|PYTHON[A-Z]\w*|GLIBC_TUNABLES"
    r"|TORCH_(LOGS|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES|DEVICE_BACKEND_AUTOLOAD)"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF"
)

# Environment with which a forked rank began, see `launch.forked_rank`; None in other processes.
at_fork: Mapping[str, str] | None = None


def changed(env: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that were changed since this rank was forked."""
    if at_fork is None:
        return []
    names = filter(READ_ONCE.fullmatch, at_fork.keys() | env.keys())
    return sorted(name for name in names if at_fork.get(name) != env.get(name))
