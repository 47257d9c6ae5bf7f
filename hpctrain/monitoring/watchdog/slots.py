"""Shared memory of a host's ranks: a folder with a slot for each rank.

    /dev/shm/hpctrain-watch-UID-START-NODE-NAMESPACE/    accessible to this user only
        settings        settings of the helper
        bell            a FIFO; a byte in it wakes the helper
        rank-3          step, phase and time of the last heartbeat; from byte 64 on facts of rank 3
        rank-3.stack    stacks of rank 3, written on a signal of the helper

When all ranks of the host have a slot, the helper removes the folder. Open files stay usable, and
no file is left if a process is killed. Ranks in containers that do not share /dev/shm or the pid
namespace have separate folders. The rank that creates a folder starts its helper.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.cluster import proc
from hpctrain.process.phases import CLOSED, IDLE

__all__ = ["PLACE", "Facts", "Slot", "name", "paths", "read", "read_settings", "take"]

PLACE = struct.Struct("@qqq")  # step, phase, time.monotonic_ns() of the last heartbeat
_TEXT = 64  # offset of the facts; the part before it is mapped
_PREFIX = "hpctrain-watch"
_TRIES = 10
# A folder is created shortly before its first slot.
_SECONDS_TO_FILL = 60.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Identity of a rank and its process.

    Attributes:
        rank: number of the rank.
        pid: process id of the rank.
        started: `Stat.started` of the process.
        exit_status_file: absolute path of the exit status file, on rank 0 only; None elsewhere.
    """

    rank: int
    pid: int
    started: int
    exit_status_file: str | None


def name(key: str, node_rank: int) -> str:
    """Return the name of the folder for the ranks of one host.

    Args:
        key: unique name of the start.
        node_rank: number of the host; several simulated hosts may share a machine.
    """
    start = hashlib.sha256(key.encode()).hexdigest()[:16]
    return f"{_PREFIX}-{os.getuid()}-{start}-{node_rank}-{proc.namespace()}"


def _bases() -> list[Path]:
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108


def take(folder_name: str, facts: Facts, settings: dict[str, Any]) -> tuple["Slot", bool]:
    """Create a slot for this rank.

    Args:
        folder_name: folder name from `name`.
        facts: identity of this rank.
        settings: settings of the helper, written into a new folder.

    Returns:
        Slot, and whether its folder is new.

    Raises:
        OSError: no folder for shared memory can be used.
    """
    problem = OSError("no place for shared memory")
    for base in _bases():
        for _ in range(_TRIES):
            try:
                new = _make(base / folder_name, settings)
                return Slot(base / folder_name, facts), new
            except FileNotFoundError as error:  # the folder was removed as its ranks have left
                problem = error
            except OSError as error:
                problem = error
                break
    raise problem


def _make(folder: Path, settings: dict[str, Any]) -> bool:
    """Create the folder with its files atomically; return whether it is new."""
    if folder.exists():
        _check(folder)
        return False
    fresh = folder.with_name(f"{folder.name}-{os.getpid()}")
    fresh.mkdir(0o700)
    try:
        os.mkfifo(fresh / "bell", 0o600)
        (fresh / "settings").write_text(json.dumps(settings))
        fresh.rename(folder)
        return True
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        _check(folder)  # another rank was faster
        return False


def _check(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user")


class Slot:
    """Slot of one rank, in which it writes its heartbeats and stacks.

    Args:
        folder: shared folder of the host.
        facts: identity of the rank.

    Raises:
        OSError: the slot cannot be written.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder = folder
        path = folder / f"rank-{facts.rank}"
        self._bell = os.open(folder / "bell", os.O_RDWR | os.O_NONBLOCK)
        now = time.monotonic_ns()
        text = json.dumps(asdict(facts)).encode()
        # The file is locked while the process lives, so that `remove_stale` does not remove it.
        self._file = open(folder / f".rank-{facts.rank}", "w+b", buffering=0)  # noqa: SIM115
        try:
            # Write before mapping: a full /dev/shm must cause an error and no SIGBUS.
            self._file.write(PLACE.pack(0, IDLE, now).ljust(_TEXT, b"\0") + text)
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self.memory = mmap.mmap(self._file.fileno(), _TEXT)
            self.stack: BinaryIO = path.with_suffix(".stack").open("wb", buffering=0)
            os.replace(self._file.name, path)
        except BaseException:
            self._file.close()
            raise

    def leave(self) -> None:
        """Write that this rank has left, and wake the helper."""
        step = PLACE.unpack_from(self.memory)[0]
        PLACE.pack_into(self.memory, 0, step, CLOSED, time.monotonic_ns())
        with contextlib.suppress(BlockingIOError):  # the FIFO is full
            os.write(self._bell, b"!")

    def close(self) -> None:
        """Close the memory and the files."""
        self.stack.close()
        self.memory.close()
        self._file.close()
        os.close(self._bell)


def read(path: Path) -> tuple[Facts, int, int]:
    """Return the facts of a slot, and descriptors to read its `PLACE` and its stacks.

    Raises:
        OSError: the slot does not exist.
    """
    slot = os.open(path, os.O_RDONLY)
    stack = os.open(path.with_suffix(".stack"), os.O_RDONLY)
    return Facts(**json.loads(os.pread(slot, 1 << 16, _TEXT))), slot, stack


def paths(folder: Path) -> list[Path]:
    """Return the paths of the slots in a folder, in order of rank."""
    return sorted(
        (path for path in folder.glob("rank-*") if not path.suffix),
        key=lambda path: int(path.name.partition("-")[2]),
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that `take` wrote."""
    settings: dict[str, Any] = json.loads((folder / "settings").read_text())
    return settings


def remove_stale() -> None:
    """Remove this user's folders whose ranks died before all slots existed."""
    for base in _bases():
        for folder in base.glob(f"{_PREFIX}-{os.getuid()}-*"):
            # Another helper may do the same.
            with contextlib.suppress(OSError):
                old = time.time() - folder.stat().st_mtime > _SECONDS_TO_FILL
                if old and not any(_is_locked(path) for path in paths(folder)):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
