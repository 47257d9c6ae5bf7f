"""Checks of the run directory, and calls of programs and file systems that may hang."""

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from hpctrain.cluster import commands, env_vars
from hpctrain.cluster.texts import printable
from hpctrain.tools.doctor.report import Finding, problem, warning

__all__ = ["ask", "check_directory", "finds", "marker", "run_directory"]

T = TypeVar("T")
_GIB = 2**30
_SECONDS = 5.0  # for a program or a file; then it counts as one without an answer
_KILLED_SECONDS = 1.0
_DIRECTORY_SECONDS = 10.0
_FREE_BYTES = 10 * _GIB
_TRIAL_BYTES = 1 << 16


def run_directory(option: str | None, env: Mapping[str, str]) -> Path:
    """Return the run directory: the option, else $HPCTRAIN_RUN_DIR, else the default `runs`."""
    return Path(option or env.get(env_vars.RUN_DIR) or "runs").absolute()


def check_directory(path: Path) -> str | Finding:
    """Check whether a training can write to its run directory and has enough space."""
    answer = within(_DIRECTORY_SECONDS, lambda: _read(path))
    if answer is not None:
        return about_directory(path, *answer)
    found = f"{printable(path)}: no answer within {_DIRECTORY_SECONDS:.0f} s"
    fix = f"ls {printable(path)}, which hangs as well: the file server is down or overloaded"
    return problem("run directory", found, "a file system that responds", fix)


def _read(path: Path) -> tuple[str, int, str]:
    """Return the kind of the file system, its free bytes, and the error of a test write."""
    folder = _nearest(path)
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


def about_directory(path: Path, kind: str, free: int, error: str) -> str | Finding:
    """Return what is wrong with a run directory, else its kind and free space.

    Args:
        path: path of the directory, which may not exist yet.
        kind: type of the file system, such as "tmpfs", "nfs", "lustre".
        free: free bytes.
        error: error of a test write; empty if it succeeded.
    """
    subject, found = "run directory", printable(path)
    if error:
        fix = "--run-dir DIR, a directory that you may write to"
        found += f": cannot be written: {error}"
        return problem(subject, found, "a directory that can be written", fix)
    found += f" ({printable(kind) or 'unknown file system'}): writable, {free / _GIB:.1f} GiB free"
    if kind in ("tmpfs", "ramfs"):
        expected = "a disk, which keeps files after the job"
        return warning(subject, found, expected, "--run-dir DIR on a disk")
    if free < _FREE_BYTES:
        return warning(subject, found, "10 GiB for checkpoints", "--run-dir DIR on another disk")
    return found


@contextmanager
def marker(path: Path) -> Iterator[str]:
    """Create an empty file in the run directory, and remove it at the end.

    Rank 0 sends its name to the other ranks, which check whether they find it. A run directory
    that does not exist is not created: the file is then in the nearest directory above it.

    Yields:
        The name of the file; empty where it could not be created, which another finding reports.
    """
    name = f".hpctrain-doctor-{secrets.token_hex(8)}"

    def create() -> Path:
        file = _nearest(path) / name
        file.touch(exist_ok=False)
        return file

    file = within(_SECONDS, create)
    try:
        yield name if file else ""
    finally:
        if file:
            within(_SECONDS, lambda: file.unlink(missing_ok=True))


def finds(path: Path, name: str) -> bool:
    """Return whether rank 0's file is in this rank's run directory, which may have another path."""
    return bool(within(_SECONDS, lambda: os.path.exists(_nearest(path) / name)))


def _nearest(path: Path) -> Path:
    """Return the directory itself, or the nearest existing directory above it."""
    return next((folder for folder in (path, *path.parents) if os.path.isdir(folder)), Path("/"))


def ask(command: Sequence[str], seconds: float = _SECONDS) -> tuple[int, str] | None:
    """Run a program and return its exit code and output.

    Args:
        command: program and its arguments.
        seconds: time limit in seconds, after which the program is killed.

    Returns:
        Exit code and standard output, or standard error where standard output is empty, without
        white space around it. A negative code is a signal. None where the program does not start,
        or does not end in time.
    """
    # With a launcher's variables, the program could take itself for one of the ranks.
    env = {**env_vars.scrubbed(os.environ), "LC_ALL": "C"}
    # A program that waits for a dead file server cannot be killed, so limit the wait as well.
    done = within(seconds + _KILLED_SECONDS, lambda: commands.run(command, seconds, env))
    if done is None:
        return None
    return done.returncode, (done.stdout.strip() or done.stderr).strip()


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Call a function; return its result, or None where it takes longer or raises an error.

    A function that takes longer, such as one that waits for a dead file server, continues in a
    daemon thread, which does not keep the process alive.
    """
    answers: list[T] = []

    def call() -> None:
        with suppress(OSError, commands.NoAnswerError):
            answers.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
