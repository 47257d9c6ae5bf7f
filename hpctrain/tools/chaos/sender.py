"""Program that sends a signal to one of the ranks of its job on its host, and prints which.

python -m hpctrain.tools.chaos.sender SIGNAL SEED

With `step` in place of the signal, it prints the number of the rank's step alone.
"""

import contextlib
import os
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster import env_vars, proc

__all__ = ["main", "ranks"]

# Not the rank: those that have waited can get another number.
_RANK = "HPCTRAIN_LOCAL_RANK"
_JOB, _STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"


def main() -> None:
    """Send the signal; print nothing if there is no rank."""
    found = ranks(os.environ)
    if found:
        rank, pid = random.Random(int(sys.argv[2])).choice(sorted(found.items()))
        if sys.argv[1] == "step":
            sys.stdout.write((proc.environment(pid) or {}).get(_STEP, ""))
            return
        os.kill(pid, signal.Signals[sys.argv[1]])
        sys.stdout.write(f"local rank {rank}, process {pid}\n")


def ranks(env: Mapping[str, str]) -> dict[int, int]:
    """Return the processes of the ranks that train in a job on this host, by local rank.

    Those of the next attempt, which wait, are left out, and the child processes of ranks.

    Args:
        env: environment of a task of the job on this host.
    """
    found: dict[int, dict[str, str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        environ = proc.environment(int(path.name)) or {}
        if environ.get(_JOB) == env.get(_JOB) and environ.get(_RANK, "").isdecimal():
            found[int(path.name)] = environ
    attempts = {pid: environ.get(env_vars.START, "") for pid, environ in found.items()}
    first = min(attempts.values(), key=_number, default="")
    processes = {}
    for pid, environ in found.items():
        with contextlib.suppress(OSError):  # it has just ended
            if attempts[pid] == first and proc.stat(pid).parent not in found:
                processes[int(environ[_RANK])] = pid
    return processes


def _number(start: str) -> int:
    """Return the number of an attempt from its name."""
    number = start.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


if __name__ == "__main__":
    main()
