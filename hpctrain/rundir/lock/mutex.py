"""Let one process at a time look at a lock file and act upon it."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.process.logging import logger
from hpctrain.rundir.lock.record import CAREFULLY

__all__ = ["turn"]

# Seconds for others to end what they do with the lock; they need moments.
_TURN = 60.0
_POLL = 0.05


@contextlib.contextmanager
def turn(path: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Let one process at a time look at the lock file and act upon it.

    By flock(2) of a file beside it. File systems without it (some of NFS, Lustre by default) leave
    a moment in which two starts may act at once; the token then decides who may commit.

    Args:
        path: of the lock file.
        clock: for the time-out; a test moves one of its own.

    Raises:
        OSError: from what is done meanwhile.
    """
    try:
        # Never removed: those who wait would hold another file than those who come.
        file = os.open(path.with_name(".lock.turn"), os.O_RDWR | os.O_CREAT | CAREFULLY, 0o666)
    except OSError:
        yield
        return
    try:
        _wait(file, path, clock)
        yield
    finally:
        # Closing is not enough: a child that was forked meanwhile has the file open as well.
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
            return  # ENOLCK, ENOTSUP, ENOSYS: no such thing here
    # A host that died in its turn: some file systems keep its flock.
    logger.warning("%s: another process has had its turn for %.0f s; not waiting", path, _TURN)
