"""The lock file: its content, its reader, its writer, and turns of the processes that use it."""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpctrain.cluster import env_vars, system
from hpctrain.cluster.job import Allocation
from hpctrain.cluster.texts import user_name
from hpctrain.process.logging import logger
from hpctrain.rundir import create, replace

__all__ = ["CAREFULLY", "Owner", "Seen", "look", "myself", "put", "turn"]

_MOST_BYTES = 1 << 16
_LONGEST = 200
# Open without waiting on a pipe and without following a link.
CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Seconds to wait for other processes; normally they need far less than a second.
_TURN = 60.0
_POLL = 0.05


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of a run directory, as in the lock file; an unknown text is an empty string.

    Attributes:
        token: random text that identifies this start.
        cluster, job, job_id, restart, step: values from the scheduler; `job` is the label for
            messages.
        launch: id of one `hpctrain run`, the same for all its attempts.
        host, boot, namespace, pid, started: process of rank 0. `boot` is the random boot id of the
            kernel; `started` is in clock ticks since the boot.
        user, since: user name and start time, for messages.
    """

    token: str
    cluster: str
    job: str
    job_id: str
    restart: int
    step: str
    launch: str
    host: str
    boot: str
    namespace: int
    pid: int
    started: int
    user: str
    since: str

    def __str__(self) -> str:
        job = f"job {self.job} (restart {self.restart}), " if self.job else ""
        return f"{job}process {self.pid} of {self.user} on {self.host}, since {self.since}"


@dataclass(frozen=True, slots=True)
class Seen:
    """An existing lock file, as found.

    Attributes:
        owner: content of the file; None if it is no lock file of hpctrain.
        foreign: reason why `owner` is None, for messages.
        mark: value that changes when the file is replaced.
        renewed: modification time, by the file system's clock.
    """

    owner: Owner | None
    foreign: str
    mark: object
    renewed: float


def look(path: Path) -> Seen | None:
    """Read the lock file; return None if there is none. Another file of this name is no error.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return None
    owner, foreign = None, "no file"
    mark: object = (facts.st_ino, facts.st_mtime_ns)
    if stat.S_ISREG(facts.st_mode):
        try:
            with open(os.open(path, os.O_RDONLY | CAREFULLY), "rb") as file:
                owner = _parse(file.read(_MOST_BYTES))
            foreign = "incomplete, or not written by hpctrain"
        except FileNotFoundError:
            return None
        except PermissionError as error:
            foreign = f"not readable ({error.strerror})"
    return Seen(owner, foreign, owner.token if owner else mark, facts.st_mtime)


def _parse(content: bytes) -> Owner | None:
    """Parse the content of a lock file; return None if it is not valid."""
    try:
        entries = json.loads(content)
        values: dict[str, Any] = {field.name: entries[field.name] for field in fields(Owner)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    for field in fields(Owner):
        value = values[field.name]
        if type(value) is not field.type:
            return None
        # Messages show these texts on terminals.
        if isinstance(value, str) and not (value.isprintable() and len(value) <= _LONGEST):
            return None
    return Owner(**values)


def put(path: Path, found: Seen | None, text: str, this_start: Owner) -> bool:
    """Write the lock file in place of the found one; return whether this start owns it.

    Args:
        path: path of the lock file.
        found: lock file as found; None if there was none.
        text: content to write.
        this_start: this start.
    """
    if found is None:
        try:
            create(path, text)
        except FileExistsError:
            return False
    else:
        if path.is_dir() and not path.is_symlink():
            path.rename(path.with_name(f".lock.{this_start.token}"))
        replace(path, text)
    # Without flock on the file system, another start may have written at the same time.
    current = look(path)
    return bool(current and current.owner and current.owner.token == this_start.token)


@contextlib.contextmanager
def turn(path: Path, clock: Callable[[], float]) -> Iterator[None]:
    """Let only one process at a time read and change the lock file.

    This uses flock(2) on a file beside the lock file. On file systems without flock (some NFS,
    Lustre by default) two starts may act at the same time; the token then decides which of them may
    commit.

    Args:
        path: path of the lock file.
        clock: function that returns seconds, for the time-out; tests replace it.

    Raises:
        OSError: raised by the body of the `with` statement.
    """
    try:
        # Never removed: otherwise waiting and new processes could lock different files.
        file = os.open(path.with_name(".lock.turn"), os.O_RDWR | os.O_CREAT | CAREFULLY, 0o666)
    except OSError:
        yield
        return
    try:
        _wait(file, path, clock)
        yield
    finally:
        # Closing is not enough: a child that was forked meanwhile also has the file open.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _wait(file: int, path: Path, clock: Callable[[], float]) -> None:
    end = clock() + _TURN
    while clock() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_POLL)
        except OSError:
            return  # ENOLCK, ENOTSUP, ENOSYS: no flock on this file system
    # Some file systems keep the flock of a host that died.
    logger.warning("%s: another process has had its turn for %.0f s; not waiting", path, _TURN)


def myself(job: Allocation | None, env: Mapping[str, str]) -> Owner:
    """Return the record of this start, with a new token.

    Args:
        job: allocation of the scheduler; None without one.
        env: environment with the variables of Slurm and `hpctrain run`.
    """
    launch = env.get(env_vars.START, "")
    return Owner(
        token=secrets.token_hex(16),
        cluster=env.get("SLURM_CLUSTER_NAME", ""),
        job=job.label if job else "",
        job_id=job.job_id if job else "",
        restart=job.restart_count if job else 0,
        step=env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID", ""),
        # All attempts of one launcher; it begins the next one when the last one has ended.
        launch=launch.partition("/")[0],
        host=socket.gethostname(),
        boot=system.boot(),
        namespace=system.namespace(),
        pid=os.getpid(),
        started=system.started(os.getpid()) or 0,
        user=user_name(),
        since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )
