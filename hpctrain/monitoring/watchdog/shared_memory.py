"""Shared memory of a host's ranks: one sparse file, with a part for each rank.

    /dev/shm/hpctrain-watch-UID-START-NODE-NAMESPACE    accessible to this user only

It begins with the settings of the helper. The part of each rank has step, phase and time of its
last heartbeat, and how often this phase has begun; from byte 64 on facts about the rank; and from
byte 65536 on the stacks that it writes on a signal of the helper.

The rank that creates the file starts the helper. Each rank keeps the file locked (flock) while it
uses it, and the helper removes it when all ranks of the host have their parts, or when nobody has
it locked. Open files stay usable, and no file is left if a process is killed. Ranks in containers
that do not share that folder or the pid namespace have separate files.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster import system
from hpctrain.process.phases import CLOSED, IDLE

__all__ = [
    "FOLDER",
    "PLACE",
    "Facts",
    "Part",
    "is_unused",
    "name",
    "read_facts",
    "read_settings",
    "remove_stale",
    "text_at",
    "views",
]

# Step, phase, time.monotonic() of the last heartbeat; how often this phase has begun.
PLACE = struct.Struct("@qqdq")
PART = 1 << 24  # bytes from one part to the next; more than the longest stacks
FACTS, STACK = 64, 1 << 16  # offsets in a part
FOLDER = Path(system.shared_folder())
_PREFIX = "hpctrain-watch"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Facts:
    """Identity of a rank and its process.

    Attributes:
        rank: number of the rank.
        pid: process id of the rank.
        started: `Stat.started` of the process.
        exit_status_file: absolute path of the exit status file, on rank 0 only; None elsewhere.
        dump_request: FIFO by which torch is asked for a dump of NCCL's collectives; or None.
        dump: file with that dump; or None.
    """

    rank: int
    pid: int
    started: int
    exit_status_file: str | None = None
    dump_request: str | None = None
    dump: str | None = None


def name(key: str, node_rank: int) -> str:
    """Return the name of the file for the ranks of one host.

    Args:
        key: unique name of the start.
        node_rank: number of the host; several simulated hosts may share a machine.
    """
    start = hashlib.sha256(key.encode()).hexdigest()[:16]
    return f"{_PREFIX}-{os.getuid()}-{start}-{node_rank}-{system.namespace()}"


def views(memory: Any) -> "tuple[memoryview[int], memoryview[float]]":
    """Return a place in a writable buffer as whole numbers, and the same bytes as floats."""
    return memoryview(memory).cast("q"), memoryview(memory).cast("d")


class Part:
    """Part of one rank, in which it writes its heartbeats and stacks.

    Args:
        file_name: name of the file of the host, from `name`.
        local_rank: number of the rank on its host.
        facts: identity of the rank.
        settings: settings of the helper, for a new file.

    Attributes:
        path: file of the host.
        new: whether this rank has created the file, and so has to start the helper.
        views: memory for the heartbeats, as `views` returns it.
        stack: descriptor for the stacks.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, file_name: str, local_rank: int, facts: Facts, settings: dict[str, Any]
    ) -> None:
        self.path, start = FOLDER / file_name, (local_rank + 1) * PART
        self._file, self.new = _open_locked(self.path)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._file)
            if self.new:
                os.pwrite(self._file, json.dumps(settings).encode(), 0)
            self.stack = os.open(self.path, os.O_WRONLY)
            undo.callback(os.close, self.stack)
            os.lseek(self.stack, start + STACK, os.SEEK_SET)
            place = PLACE.pack(0, IDLE, time.monotonic(), 0).ljust(FACTS, b"\0")
            # Write before mapping: a full file system must cause an error and no SIGBUS.
            os.pwrite(self._file, place + json.dumps(asdict(facts)).encode() + b"\n", start)
            memory = undo.enter_context(mmap.mmap(self._file, FACTS, offset=start))
            self.views = views(memory)
            for view in self.views:
                undo.enter_context(view)  # the memory stays open as long as a view is
            self._open = undo.pop_all()

    def leave(self) -> None:
        """Write that this rank has left."""
        numbers, times = self.views
        numbers[1], times[2], numbers[3] = CLOSED, 0.0, 0

    def close(self) -> None:
        """Close the memory and the files."""
        # Closing does not unlock: loader workers were forked with the file open.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._open.close()


def _open_locked(path: Path) -> tuple[int, bool]:
    """Create the file of a host or open it, and lock it; return its descriptor, and if it is new.

    Raises:
        PermissionError: another user could have made the file, or can read it.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW
    while True:
        try:
            file, new = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            try:
                file, new = os.open(path, flags), False
            except FileNotFoundError:
                continue  # a helper has just removed it
        found = os.fstat(file)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            os.close(file)
            raise PermissionError(f"{path} belongs to another user")
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink:
            return file, new
        os.close(file)  # a helper has removed it meanwhile


def text_at(file: int, offset: int) -> bytes:
    """Return the text at an offset of the file; empty where nothing was written."""
    return os.pread(file, _MOST_BYTES, offset).partition(b"\0")[0]


def read_settings(file: int) -> dict[str, Any]:
    """Return the settings of the helper."""
    settings: dict[str, Any] = json.loads(text_at(file, 0))
    return settings


def read_facts(file: int, local_rank: int) -> Facts | None:
    """Return the facts about a rank; None if it has not written them yet."""
    line, end, _ = text_at(file, (local_rank + 1) * PART + FACTS).partition(b"\n")
    return Facts(**json.loads(line)) if end else None


def is_unused(file: int) -> bool:
    """Lock the file for this process alone; return whether no rank has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_stale() -> None:
    """Remove this user's files of ranks that were killed together with their helper."""
    for path in FOLDER.glob(f"{_PREFIX}-{os.getuid()}-*"):
        # Another helper may do the same.
        with contextlib.suppress(OSError), path.open("rb") as file:
            if is_unused(file.fileno()):
                path.unlink()
