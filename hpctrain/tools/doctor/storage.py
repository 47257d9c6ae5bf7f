"""Checks of the run directory: a test write, space, and whether all hosts share it."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.cluster.texts import printable
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.subprocesses import SECONDS, ask, within

__all__ = ["examine", "finds", "judge", "marker", "nearest", "run"]

_GIB = 2**30
_LITTLE_BYTES = 10 * _GIB
_TRIAL_BYTES = 1 << 16
_HANGS_SECONDS = 10.0
_SUBJECT = "run directory"


def run(given: str | None, env: Mapping[str, str]) -> Path:
    """Return the run directory: the given one, else $HPCTRAIN_RUN_DIR, else the default `runs`."""
    return Path(given or env.get(env_vars.RUN_DIR) or "runs").absolute()


def nearest(path: Path) -> Path:
    """Return the directory itself, or the nearest existing directory above it."""
    return next((folder for folder in (path, *path.parents) if os.path.isdir(folder)), Path("/"))


def examine(path: Path) -> Finding:
    """Check the run directory; a file system that does not respond is a finding as well."""
    facts = within(_HANGS_SECONDS, lambda: _read(path))
    if facts is None:
        return Finding(
            _SUBJECT,
            PROBLEM,
            f"{printable(path)}: no answer within {_HANGS_SECONDS:.0f} s",
            "a file system that responds",
            (f"ls {printable(path)}, which hangs as well: the file server is down or overloaded",),
        )
    return judge(path, *facts)


def _read(path: Path) -> tuple[str, int, str]:
    """Return the kind of the file system, its free bytes, and the error of a test write."""
    folder = nearest(path)
    kind = ask(["stat", "--file-system", "--format=%T", str(folder)])
    try:
        free = shutil.disk_usage(folder).free
        if os.path.exists(path) and folder != path:
            return "", free, "it is not a directory"
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hpctrain-doctor-") as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return "", 0, error.strerror or str(error)
    return kind[1] if kind else "", free, ""


def judge(path: Path, kind: str, free: int, error: str) -> Finding:
    """Return a finding on whether a training can write to its run directory and has enough space.

    Args:
        path: path of the directory, which may not exist yet.
        kind: type of the file system, such as "tmpfs", "nfs", "lustre".
        free: free bytes.
        error: error of a test write; empty if it succeeded.
    """
    found = f"{printable(path)} ({printable(kind) or 'unknown file system'})"
    if error:
        fixes = ("--run-dir DIR, a directory that you may write to",)
        found = f"{printable(path)}: cannot be written: {error}"
        return Finding(_SUBJECT, PROBLEM, found, "a directory that can be written", fixes)
    found = f"{found}: writable, {free / _GIB:.1f} GiB free"
    if kind in ("tmpfs", "ramfs"):
        fixes = ("--run-dir DIR on a disk",)
        return Finding(_SUBJECT, WARNING, found, "a disk, which keeps files after the job", fixes)
    if free < _LITTLE_BYTES:
        fixes = ("--run-dir DIR on another file system",)
        return Finding(_SUBJECT, WARNING, found, "10 GiB for checkpoints", fixes)
    return Finding(_SUBJECT, OK, found)


@contextmanager
def marker(path: Path) -> Iterator[str]:
    """Create an empty file in the run directory, and remove it at the end.

    Rank 0 sends its name to the other ranks, which check whether they find it. A run directory
    that does not exist is not created: the file is then in the nearest directory above it.

    Yields:
        The name of the file; empty where it could not be created.
    """
    name = f".hpctrain-doctor-{secrets.token_hex(8)}"
    file = within(SECONDS, lambda: _create(path, name))
    try:
        yield name if file else ""
    finally:
        if file:
            within(SECONDS, lambda: file.unlink(missing_ok=True))


def _create(path: Path, name: str) -> Path | None:
    """Create a file; None on an error, which the finding about the run directory reports."""
    try:
        (nearest(path) / name).touch(exist_ok=False)
    except OSError:
        return None
    return nearest(path) / name


def finds(path: Path, name: str) -> bool:
    """Return whether rank 0's file is in this rank's run directory, which may have another path."""
    return bool(within(SECONDS, lambda: os.path.exists(nearest(path) / name)))
