"""Mutual exclusion of processes that read and change the lock file."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.process.logging import logger
from hpctrain.rundir.lock.record import CAREFULLY

__all__ = ["turn"]

# Seconds to wait for other processes; normally they need far less than a second.
_TURN = 60.0
_POLL = 0.05


@contextlib.contextmanager
def turn(path: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Let only one process at a time read and change the lock file.

    This uses flock(2) on a file beside the lock file. On file systems without flock (some NFS,
    Lustre by default) two starts may act at the same time; the token then decides which of them may
    commit.

    Args:
        path: path of the lock file.
        clock: function that returns seconds, for the time-out; tests replace it.

    Raises:
        OSError: raised by the body of the `with` statement.
    """
    try:
        # Never removed: otherwise waiting and new processes could lock different files.
        file = os.open(path.with_name(".lock.turn"), os.O_RDWR | os.O_CREAT | CAREFULLY, 0o666)
    except OSError:
        yield
        return
    try:
        _wait(file, path, clock)
        yield
    finally:
        # Closing is not enough: a child that was forked meanwhile also has the file open.
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
            return  # ENOLCK, ENOTSUP, ENOSYS: no flock on this file system
    # Some file systems keep the flock of a host that died.
    logger.warning("%s: another process has had its turn for %.0f s; not waiting", path, _TURN)
