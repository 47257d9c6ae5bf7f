"""Cache of the wheels: one folder for each combination of versions."""

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
from hpctrain.tools.horovod_build.build_commands import PrintLine

__all__ = ["find", "folder", "locked", "store"]

_WHEELS = "horovod-*.whl"
_UNFINISHED = ".unfinished-"
_SECONDS_BETWEEN_TRIES = 0.5


def folder(key: str, env: Mapping[str, str]) -> Path:
    """Return the folder for the wheel of a key, below $HPCTRAIN_CACHE or ~/.cache/hpctrain."""
    cache = env.get(env_vars.CACHE) or os.path.expanduser("~/.cache/hpctrain")
    return Path(cache).absolute() / "horovod" / key


def find(place: Path) -> Path | None:
    """Return the wheel in a folder if a test of all its content succeeds; else None."""
    for wheel in sorted(place.glob(_WHEELS)):
        broken = (OSError, zipfile.BadZipFile, zlib.error, EOFError)
        with contextlib.suppress(*broken), zipfile.ZipFile(wheel) as archive:
            if archive.testzip() is None:
                return wheel
    return None


@contextlib.contextmanager
def locked(place: Path, print_line: PrintLine) -> Iterator[None]:
    """Hold the lock of a folder, so that only one process at a time builds its wheel.

    The kernel releases the lock of a killed process. On a file system without locks, two builds may
    do the same work, and the later one replaces the wheel.

    Raises:
        HpctrainError: the folder cannot be written.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = open(place / ".lock", "wb")  # noqa: SIM115  closed below
    except OSError as error:
        raise _unwritable(place, error) from None
    with lock:
        has_lock = _wait(lock.fileno(), place, print_line)
        if has_lock:
            for file in place.glob(f"{_UNFINISHED}*"):
                file.unlink(missing_ok=True)
        yield


def _wait(lock: int, place: Path, print_line: PrintLine) -> bool:
    """Wait for the lock; return False if the file system has no locks."""
    printed = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not printed:
                print_line(f"another process builds this wheel in {place}: waiting for it")
                printed = True
            time.sleep(_SECONDS_BETWEEN_TRIES)
        except OSError:
            return False
        else:
            return True


def store(wheel: Path, place: Path) -> Path:
    """Copy a wheel into its folder, completely or not at all, and return its path there.

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
        raise _unwritable(place, error, f"take the wheel from {wheel}") from None
    return place / wheel.name


def _unwritable(place: Path, error: OSError, *fixes: str) -> HpctrainError:
    return HpctrainError(
        "HT916",
        f"cannot write {place}: {error.strerror or error}",
        "room in the cache, $HPCTRAIN_CACHE or ~/.cache/hpctrain, for a wheel of Horovod",
        "export HPCTRAIN_CACHE=FOLDER",
        *fixes,
    )
