"""Checks of the run directory; a file system that hangs does not stop them."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from hpctrain.cluster import commands
from hpctrain.tools.doctor.report import Finding, finding

T = TypeVar("T")
_GIB = 2**30
_SECONDS = 5.0  # for one file, or a program
_DIRECTORY_SECONDS = 10.0
_FREE_BYTES = 10 * _GIB
_TRIAL_BYTES = 1 << 16
_PREFIX = ".hpctrain-doctor-"


def check_directory(path: Path) -> str | Finding:
    """Check whether a training can write to its run directory and has enough space."""
    answer = within(_DIRECTORY_SECONDS, lambda: _try(path))
    if answer is None:
        return finding("run directory.hangs", path=path, seconds=_DIRECTORY_SECONDS)
    return about_directory(path, *answer)


def _try(path: Path) -> tuple[str, int, str]:
    """Return the kind of the file system, its free bytes, and the error of a test write."""
    folder = _nearest(path)
    try:
        kind = commands.run(["stat", "-fc", "%T", str(folder)], _SECONDS).stdout.strip()
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_PREFIX) as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return kind, shutil.disk_usage(folder).free, ""
    except (OSError, commands.NoAnswerError) as error:
        return "", 0, getattr(error, "strerror", None) or str(error)


def about_directory(path: Path, kind: str, free: int, error: str) -> str | Finding:
    """Return what is wrong with a run directory, else its kind and free space.

    Args:
        path: path of the directory, which may not exist yet.
        kind: type of the file system, such as "tmpfs", "nfs", "lustre".
        free: free bytes.
        error: error of a test write; empty if it succeeded.
    """
    if error:
        return finding("run directory.not-writable", path=path, error=error)
    if kind in ("tmpfs", "ramfs"):
        return finding("run directory.in-memory", path=path, kind=kind)
    if free < _FREE_BYTES:
        return finding("run directory.full", path=path, free=free / _GIB)
    return f"{path} ({kind or 'unknown file system'}): writable, {free / _GIB:.1f} GiB free"


def marker(path: Path, undo: ExitStack) -> str:
    """Create an empty file in the run directory; return its name, or "" where that fails.

    Rank 0 sends the name to the other ranks, which check whether they find the file. A run
    directory that does not exist is not created: the file is then in the nearest directory above
    it. `undo` removes the file.
    """
    create = tempfile.NamedTemporaryFile
    file = within(_SECONDS, lambda: create(dir=_nearest(path), prefix=_PREFIX))
    if file is None:
        return ""
    undo.callback(within, _SECONDS, file.close)
    return os.path.basename(file.name)


def finds(path: Path, name: str) -> bool:
    """Return whether rank 0's file is in this rank's run directory, which may have another path."""
    return bool(within(_SECONDS, lambda: os.path.exists(_nearest(path) / name)))


def _nearest(path: Path) -> Path:
    """Return the path itself, or the nearest existing one above it."""
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Call a function; return its result, or None where it takes longer or raises an OSError.

    A function that takes longer, such as one that waits for a dead file server, continues in a
    daemon thread, which does not keep the process alive.
    """
    answers: list[T] = []

    def call() -> None:
        with suppress(OSError):
            answers.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
