"""The lock file: what it says, and of which start."""

import getpass
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpctrain.cluster import env_vars
from hpctrain.cluster.job import Allocation
from hpctrain.rundir import create, replace

__all__ = ["CAREFULLY", "Owner", "Seen", "look", "myself", "put", "started", "text_of"]

_MOST_BYTES = 1 << 16
_LONGEST = 200
# Opened without waiting for a pipe's other end, and not by way of somebody's link.
CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Owner:
    """What the lock file says; empty strings where something is not known.

    Attributes:
        token: random; tells this start from every other.
        cluster, job, job_id, restart, step: the scheduler's; `job` is the label for people.
        launch: of `hpctrain run --elastic`, the same for all its starts.
        host, boot, namespace, pid, started: rank 0's process. `boot` is a random number that the
            kernel draws when it boots; `started` is in clock ticks since then.
        user, since: for people.
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
    namespace: str
    pid: int
    started: int
    user: str
    since: str

    def __str__(self) -> str:
        job = f"job {self.job} (restart {self.restart}), " if self.job else ""
        return f"{job}process {self.pid} of {self.user} on {self.host}, since {self.since}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A lock file that is there.

    Attributes:
        owner: what it says; None where it is nothing that hpctrain wrote, as `foreign` says.
        mark: changes when it is replaced.
        renewed: its time of modification, by the file system's clock.
    """

    owner: Owner | None
    foreign: str
    mark: object
    renewed: float


def look(path: Path) -> Seen | None:
    """The lock file; None where there is none. Whatever else has its name is no error.

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
            foreign = "not whole, or not written by hpctrain"
        except FileNotFoundError:
            return None
        except PermissionError as error:
            foreign = f"not readable ({error.strerror})"
    return Seen(owner, foreign, owner.token if owner else mark, facts.st_mtime)


def _parse(content: bytes) -> Owner | None:
    """What a lock file says; None where it is not one."""
    try:
        said = json.loads(content)
        values: dict[str, Any] = {field.name: said[field.name] for field in fields(Owner)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    for field in fields(Owner):
        value = values[field.name]
        if type(value) is not field.type:
            return None
        # It is shown to people, on terminals.
        if isinstance(value, str) and not (value.isprintable() and len(value) <= _LONGEST):
            return None
    return Owner(**values)


def put(path: Path, seen: Seen | None, text: str, mine: Owner) -> bool:
    """Write the lock file where it is still as seen; whether it is this start's then."""
    if seen is None:
        try:
            create(path, text)
        except FileExistsError:
            return False
    else:
        if path.is_dir() and not path.is_symlink():
            path.rename(path.with_name(f".lock.{mine.token}"))
        replace(path, text)
    # Where the file system gives no turns, another start may have been there at the same moment.
    now = look(path)
    return bool(now and now.owner and now.owner.token == mine.token)


def myself(job: Allocation | None, env: Mapping[str, str]) -> Owner:
    """This start, with a token of its own.

    Args:
        job: the scheduler's.
        env: for the names that it has from Slurm and from `hpctrain run --elastic`.
    """
    launch = env.get(env_vars.START, "")
    return Owner(
        token=secrets.token_hex(16),
        cluster=env.get("SLURM_CLUSTER_NAME", ""),
        job=job.label if job else "",
        job_id=job.job_id if job else "",
        restart=job.restart_count if job else 0,
        step=env.get("SLURM_STEP_ID", ""),
        # Without --elastic it is an address, which another start may have later.
        launch="" if ":" in launch else launch,
        host=socket.gethostname(),
        boot=text_of("/proc/sys/kernel/random/boot_id"),
        namespace=_namespace(),
        pid=os.getpid(),
        started=started(os.getpid()) or 0,
        user=_user(),
        since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def text_of(path: str) -> str:
    """The content of a file of /proc; empty where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    """In which processes are counted: a container may have numbers of its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a container without this user's name


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; 0 for one that is dead already.

    None where /proc does not tell. Source: /proc/PID/stat of proc(5), fields 3 and 22.
    """
    # The name, in parentheses, may hold spaces and parentheses.
    words = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(words) < 20:
        return None
    return 0 if words[0] in ("Z", "X") else int(words[19])
