"""Check whether the start that owns a run directory is alive."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster import slurm
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir.lock.record import Owner, Seen, started, text_of

__all__ = ["refuse_living"]

_SILENCE = 300.0


def refuse_living(seen: Seen, mine: Owner, path: Path, env: Mapping[str, str]) -> None:
    """Raise an error if the owner of the directory may be alive; otherwise log the takeover.

    Args:
        seen: lock file as found.
        mine: this start.
        path: path of the lock file.
        env: environment for the commands that query Slurm.

    Raises:
        UsageError: the owner is alive, or may be alive.
    """
    age = abs(_now(path.parent) - seen.renewed)  # a time in the future is no heartbeat either
    owner = seen.owner
    lives, why = _standing(owner, mine, age, env) if owner else (None, "")
    if lives is None:
        lives = age < _SILENCE
        why = f"{why + ', ' if why else ''}last heard of {age:.0f} s ago"
    if owner is None:
        if lives:
            raise UsageError(
                "HT703",
                f"{path} is {seen.foreign}, {age:.0f} s old",
                "a lock file that hpctrain wrote, or none",
                f"rm -r {path} (where no other start has the directory)",
                "--run-dir DIR",
            )
        logger.warning("%s is %s, %.0f s old, and is replaced", path, seen.foreign, age)
    elif lives:
        end = f"scancel {owner.job}" if owner.job else f"kill {owner.pid} on {owner.host}"
        raise UsageError(
            "HT703",
            f"{path.parent} is taken: {owner} ({why})",
            "a run directory that no other start has",
            "--run-dir DIR for another",
            f"{end} (to end that start)",
            f"rm {path} (where it is surely dead)",
        )
    else:
        logger.info("takes over %s from %s: %s", path.parent, owner, why)


def _standing(
    owner: Owner, mine: Owner, age: float, env: Mapping[str, str]
) -> tuple[bool | None, str]:
    """Return whether a start is alive, and why; None if only the age of its heartbeat can decide.

    Args:
        owner: start that owns the directory.
        mine: this start.
        age: seconds since the owner's last heartbeat.
        env: environment for the commands that query Slurm.
    """
    if owner.launch and owner.launch == mine.launch:
        return False, "an earlier start of the same hpctrain run --elastic"
    same = bool(mine.job) and (owner.cluster, owner.job) == (mine.cluster, mine.job)
    if same and owner.restart != mine.restart:
        if owner.restart < mine.restart:
            return False, "the job was requeued since"
        return True, f"the job was requeued since, and this is its start {mine.restart}"
    if owner.job and not same:
        lives, why = _job_lives(owner, mine, env)
        if lives is not None:
            return lives, why
    lives, why = _process_lives(owner, mine, age)
    if lives is None and same and owner.step != mine.step:
        lives = slurm.step_lives(owner.job_id, owner.step, env)
        why = f"Slurm says that step {owner.step} {'runs' if lives else 'has ended'}"
    return lives, why if lives is not None else ""


def _job_lives(owner: Owner, mine: Owner, env: Mapping[str, str]) -> tuple[bool | None, str]:
    """Return whether another job is alive according to Slurm, and why; None if unknown."""
    if mine.cluster and owner.cluster != mine.cluster:
        return None, ""  # another Slurm cluster uses the same numbers for other jobs
    state = slurm.job_state(owner.job, env)
    # If jobs are private, Slurm does not show those of other users.
    if state is None or not (state.known or owner.user == mine.user):
        return None, ""
    return state.lives, f"Slurm says that job {owner.job} is {state.word}"


def _process_lives(owner: Owner, mine: Owner, age: float) -> tuple[bool | None, str]:
    """Return whether a process of this host is alive; None for other hosts and containers."""
    if owner.host != mine.host or not (owner.boot and mine.boot):
        return None, ""
    if owner.boot != mine.boot:
        # A heartbeat since this host's boot came from another host of the same name.
        gone = age > _uptime()
        return (False, f"{owner.host} has been rebooted since") if gone else (None, "")
    if (owner.namespace, owner.pid, owner.started) == (mine.namespace, mine.pid, mine.started):
        return False, "an earlier run of this process"
    lives = _alive(owner.pid, owner.started) if owner.namespace == mine.namespace else None
    return lives, "its process runs" if lives else "its process is gone"


def _alive(pid: int, since: int) -> bool | None:
    """Return whether the process with this id and start time runs; None if it is unknown."""
    if pid <= 0:
        return None  # for kill(2) these are process groups
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # a process of another user, which is alive
    now = started(pid)
    return None if now is None else now == since  # /proc may hide processes of other users


def _uptime() -> float:
    """Return the seconds since this host booted."""
    return float(text_of("/proc/uptime").split()[0])


def _now(folder: Path) -> float:
    """Return the time by the clock of a folder's file system."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".lock.") as file:
        file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime
