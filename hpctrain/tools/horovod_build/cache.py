"""Wheels that were built before: one folder for each combination of versions."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build.commands import Say

__all__ = ["find", "folder", "locked", "store"]

_WHEELS = "horovod-*.whl"
_UNFINISHED = ".unfinished-"
_SECONDS_BETWEEN_TRIES = 0.5


def folder(key: str, env: Mapping[str, str]) -> Path:
    """Where the wheel of a key is kept, below $HPCTRAIN_CACHE, else ~/.cache/hpctrain."""
    cache = env.get(env_vars.CACHE) or os.path.expanduser("~/.cache/hpctrain")
    return Path(cache).absolute() / "horovod" / key


def find(place: Path) -> Path | None:
    """The wheel in a folder, if it is whole: all of it is read and checked."""
    for wheel in sorted(place.glob(_WHEELS)):
        broken = (OSError, zipfile.BadZipFile, zlib.error, EOFError)
        with contextlib.suppress(*broken), zipfile.ZipFile(wheel) as archive:
            if archive.testzip() is None:
                return wheel
    return None


@contextlib.contextmanager
def locked(place: Path, say: Say) -> Iterator[None]:
    """Only one process at a time makes the wheel of a folder; the others wait for it.

    The kernel opens the lock of a process that was killed. Where the file system has no locks two
    builds do the same work, and the later one replaces the wheel.

    Raises:
        HpctrainError: the folder cannot be written.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = open(place / ".lock", "wb")  # noqa: SIM115  closed below
    except OSError as error:
        raise _unwritable(place, error) from None
    with lock:
        alone = _wait(lock.fileno(), place, say)
        if alone:
            for left in place.glob(f"{_UNFINISHED}*"):
                left.unlink(missing_ok=True)
        yield


def _wait(lock: int, place: Path, say: Say) -> bool:
    """Wait for the lock; False where the file system has none."""
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                say(f"another process builds this wheel in {place}: waiting for it")
                told = True
            time.sleep(_SECONDS_BETWEEN_TRIES)
        except OSError:
            return False
        else:
            return True


def store(wheel: Path, place: Path) -> Path:
    """Put a wheel into its folder, whole or not at all; its path there.

    Raises:
        HpctrainError: the folder cannot be written, or its file system is full.
    """
    unfinished = None
    try:
        number, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=place)
        with os.fdopen(number, "wb") as file, wheel.open("rb") as built:
            shutil.copyfileobj(built, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, place / wheel.name)
    except OSError as error:
        if unfinished:
            Path(unfinished).unlink(missing_ok=True)
        raise _unwritable(place, error, f"; or take the wheel from {wheel}") from None
    return place / wheel.name


def _unwritable(place: Path, error: OSError, fix: str = "") -> HpctrainError:
    return HpctrainError(
        f"cannot write {place}: {error.strerror or error}",
        "room in the cache, $HPCTRAIN_CACHE or ~/.cache/hpctrain, for a wheel of Horovod",
        f"export HPCTRAIN_CACHE=FOLDER{fix}",
    )
