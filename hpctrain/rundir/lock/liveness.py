"""Check whether the start that owns a run directory is alive."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster import slurm, system
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir.lock.record import Owner, Seen

__all__ = ["refuse_if_alive"]

_SILENCE = 300.0


def refuse_if_alive(found: Seen, this_start: Owner, path: Path, env: Mapping[str, str]) -> None:
    """Raise an error if the owner of the directory may be alive; otherwise log the takeover.

    Args:
        found: lock file as found.
        this_start: this start.
        path: path of the lock file.
        env: environment for the commands that query Slurm.

    Raises:
        UsageError: the owner is alive, or may be alive.
    """
    age = abs(_now(path.parent) - found.renewed)  # a time in the future is no heartbeat either
    owner = found.owner
    alive, why = _standing(owner, this_start, age, env) if owner else (None, "")
    if alive is None:
        alive = age < _SILENCE
        why = f"last heartbeat {age:.0f} s ago"
    if owner is None:
        if alive:
            raise UsageError("HT703.foreign-lock", path=path, lock=found, age=age)
        logger.warning("%s is %s, %.0f s old, and is replaced", path, found.foreign, age)
    elif alive:
        stop = f"scancel {owner.job}" if owner.job else f"kill {owner.pid} on {owner.host}"
        raise UsageError("HT703.in-use", path=path, owner=owner, why=why, stop_command=stop)
    else:
        logger.info("takes over %s from %s: %s", path.parent, owner, why)


def _standing(
    owner: Owner, this_start: Owner, age: float, env: Mapping[str, str]
) -> tuple[bool | None, str]:
    """Return whether a start is alive, and why; None if only the age of its heartbeat can decide.

    Args:
        owner: start that owns the directory.
        this_start: this start.
        age: seconds since the owner's last heartbeat.
        env: environment for the commands that query Slurm.
    """
    if owner.launch and owner.launch == this_start.launch:
        return False, "an earlier attempt of the same hpctrain run"
    this_job = this_start.cluster, this_start.job
    same_job = bool(this_start.job) and (owner.cluster, owner.job) == this_job
    if same_job and owner.restart != this_start.restart:
        if owner.restart < this_start.restart:
            return False, "the job was requeued since"
        return True, f"the job was requeued since, and this is its restart {this_start.restart}"
    if owner.job and not same_job:
        alive, why = _job_is_alive(owner, this_start, env)
        if alive is not None:
            return alive, why
    alive, why = _process_is_alive(owner, this_start, age)
    if alive is None and same_job and owner.step != this_start.step:
        alive = slurm.step_is_active(owner.job_id, owner.step, env)
        why = f"Slurm reports that step {owner.step} {'runs' if alive else 'has ended'}"
    return alive, why


def _job_is_alive(
    owner: Owner, this_start: Owner, env: Mapping[str, str]
) -> tuple[bool | None, str]:
    """Return whether another job is alive according to Slurm, and why; None if unknown."""
    if this_start.cluster and owner.cluster != this_start.cluster:
        return None, ""  # another Slurm cluster uses the same numbers for other jobs
    state = slurm.job_state(owner.job, env)
    # If jobs are private, Slurm does not show those of other users.
    if state is None or not (state.known or owner.user == this_start.user):
        return None, ""
    return state.active, f"Slurm reports that job {owner.job} is {state.name}"


def _process_is_alive(owner: Owner, this_start: Owner, age: float) -> tuple[bool | None, str]:
    """Return whether a process of this host is alive; None for other hosts and containers."""
    if owner.host != this_start.host or not (owner.boot and this_start.boot):
        return None, ""
    if owner.boot != this_start.boot:
        # A heartbeat since this host's boot came from another host of the same name.
        before_boot = age > system.uptime()
        return (False, f"{owner.host} has been rebooted since") if before_boot else (None, "")
    this_process = this_start.namespace, this_start.pid, this_start.started
    if (owner.namespace, owner.pid, owner.started) == this_process:
        return False, "an earlier run of this process"
    alive = _alive(owner.pid, owner.started) if owner.namespace == this_start.namespace else None
    return alive, "its process runs" if alive else "its process has ended"


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
    now = system.started(pid)
    return None if now is None else now == since  # Linux may hide processes of other users


def _now(folder: Path) -> float:
    """Return the time by the clock of a folder's file system."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".lock.") as file:
        file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime
