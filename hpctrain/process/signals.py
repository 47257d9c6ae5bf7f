"""The signals that ask a run to stop, and processes that must not hear them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STOP", "blocked", "obey_parent"]

# What schedulers send before they kill: Slurm's --signal and preemption, and people's own choice.
STOP = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

_SECONDS_BETWEEN_LOOKS = 5.0
_ALL = {*STOP, signal.SIGINT}


@contextmanager
def blocked() -> Iterator[None]:
    """Within it, processes are started that do not hear them.

    A scheduler sends its signals to every process of a step, and a terminal to all of a group. A
    process that serves a rank, such as a loader worker, has to live until the rank has saved. The
    mask is what is inherited by fork and exec alike; this process hears afterwards what came.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent(master: int) -> None:
    """In a process that was started `unheard`: end by a SIGTERM of its master, and of no other.

    So `multiprocessing` can still end a worker that hangs. It also ends when its master is gone:
    one that a fork server has started would not notice. The exit code is 0 where the master has
    asked, so that torch does not call a worker failed that it has ended itself, and 143 where the
    master is gone.

    Args:
        master: the id of the process that it works for.
    """

    def listen() -> None:
        while True:
            heard = signal.sigtimedwait({signal.SIGTERM}, _SECONDS_BETWEEN_LOOKS)
            if heard is not None and heard.si_pid == master:
                os._exit(0)
            if not _lives(master):
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
