"""The shared memory of a host's ranks: a folder, and in it a slot for each of them.

    /dev/shm/hpctrain-watch-UID-START-NODE-NAMESPACE/    for this user alone
        settings        what the helper has to know
        bell            a FIFO; a byte in it wakes the helper
        rank-3          step, phase and time of the last beat; from byte 64 on who the rank is
        rank-3.stack    where its stacks come when the helper asks for them

When all ranks of the host have come, the helper removes the folder: what is open stays open, and
nothing is left whoever is killed. Ranks in containers that share no /dev/shm or no pid namespace
get a folder each. Whoever makes a folder starts its helper.
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

from hpctrain.monitoring.watchdog.phases import CLOSED, IDLE
from hpctrain.monitoring.watchdog.processes import namespace

__all__ = ["PLACE", "Facts", "Slot", "name", "paths", "read", "read_settings", "take"]

PLACE = struct.Struct("@qqq")  # step, phase, time.monotonic_ns() of the last beat
_TEXT = 64  # where the facts begin; the part before is mapped
_PREFIX = "hpctrain-watch"
_TRIES = 10
# A folder is made a moment before its first slot.
_SECONDS_TO_FILL = 60.0


@dataclass(frozen=True, slots=True)
class Facts:
    """Who a rank is.

    Attributes:
        rank: its number.
        pid: of its process.
        started: the `processes.start_time` of its process.
        verdict: the file in which it would say how the run ended, absolute; rank 0 alone has one.
    """

    rank: int
    pid: int
    started: int
    verdict: str | None


def name(key: str, node_rank: int) -> str:
    """The name of the folder for the ranks of one host.

    Args:
        key: names the start.
        node_rank: of the host; several pretended ones share a machine.
    """
    start = hashlib.sha256(key.encode()).hexdigest()[:16]
    return f"{_PREFIX}-{os.getuid()}-{start}-{node_rank}-{namespace()}"


def _bases() -> list[Path]:
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108


def take(folder_name: str, facts: Facts, settings: dict[str, Any]) -> tuple["Slot", bool]:
    """Make a slot for this rank.

    Args:
        folder_name: of `name`.
        facts: who it is.
        settings: what the helper has to know, left in a new folder.

    Returns:
        The slot, and whether its folder is new.

    Raises:
        OSError: there is room for it nowhere.
    """
    problem = OSError("no place for shared memory")
    for base in _bases():
        for _ in range(_TRIES):
            try:
                new = _make(base / folder_name, settings)
                return Slot(base / folder_name, facts), new
            except FileNotFoundError as error:  # ranks that have left took the folder with them
                problem = error
            except OSError as error:
                problem = error
                break
    raise problem


def _make(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder is new; it appears with all that belongs into it."""
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
        raise PermissionError(f"{folder} belongs to somebody else")


class Slot:
    """What one rank writes.

    Args:
        folder: of its host.
        facts: who it is.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder = folder
        path = folder / f"rank-{facts.rank}"
        self._bell = os.open(folder / "bell", os.O_RDWR | os.O_NONBLOCK)
        now = time.monotonic_ns()
        text = json.dumps(asdict(facts)).encode()
        # For as long as the process lives the file is locked, so that nobody takes it for stale.
        self._file = open(folder / f".rank-{facts.rank}", "w+b", buffering=0)  # noqa: SIM115
        try:
            # Written and not only mapped: a full /dev/shm has to be an error and not a SIGBUS.
            self._file.write(PLACE.pack(0, IDLE, now).ljust(_TEXT, b"\0") + text)
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self.memory = mmap.mmap(self._file.fileno(), _TEXT)
            self.stack: BinaryIO = path.with_suffix(".stack").open("wb", buffering=0)
            os.replace(self._file.name, path)
        except BaseException:
            self._file.close()
            raise

    def leave(self) -> None:
        """Tell the helper that this rank has left."""
        step = PLACE.unpack_from(self.memory)[0]
        PLACE.pack_into(self.memory, 0, step, CLOSED, time.monotonic_ns())
        with contextlib.suppress(BlockingIOError):  # nobody listens
            os.write(self._bell, b"!")

    def close(self) -> None:
        """Let go of the memory."""
        self.stack.close()
        self.memory.close()
        self._file.close()
        os.close(self._bell)


def read(path: Path) -> tuple[Facts, int, int]:
    """Who a slot belongs to, and descriptors to read its `PLACE` and its stacks from.

    Raises:
        OSError: it is not there.
    """
    slot = os.open(path, os.O_RDONLY)
    stack = os.open(path.with_suffix(".stack"), os.O_RDONLY)
    return Facts(**json.loads(os.pread(slot, 1 << 16, _TEXT))), slot, stack


def paths(folder: Path) -> list[Path]:
    """The slots in a folder, by rank."""
    return sorted(
        (path for path in folder.glob("rank-*") if not path.suffix),
        key=lambda path: int(path.name.partition("-")[2]),
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """What `take` left."""
    settings: dict[str, Any] = json.loads((folder / "settings").read_text())
    return settings


def remove_stale() -> None:
    """Remove the folders of this user whose ranks died before they were complete."""
    for base in _bases():
        for folder in base.glob(f"{_PREFIX}-{os.getuid()}-*"):
            # Another helper may do the same.
            with contextlib.suppress(OSError):
                old = time.time() - folder.stat().st_mtime > _SECONDS_TO_FILL
                if old and not any(_held(path) for path in paths(folder)):
                    shutil.rmtree(folder, ignore_errors=True)


def _held(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
