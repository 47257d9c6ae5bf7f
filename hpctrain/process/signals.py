"""The signals that stop a run, and helper processes that must not react to them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.cluster import system

__all__ = ["STOP", "blocked", "obey_parent"]

# Signals that come before a kill: from Slurm's --signal, from preemption, or from the user.
STOP = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

_SECONDS_BETWEEN_CHECKS = 5.0
_ALL = {*STOP, signal.SIGINT}


@contextmanager
def blocked() -> Iterator[None]:
    """Block the stop signals and SIGINT for processes that are started in this context.

    A scheduler sends its signals to every process of a step, and a terminal to every process of a
    group. A helper process of a rank, such as a loader worker, has to run until the rank has
    saved. Processes inherit the signal mask through fork and exec. This process receives pending
    signals at the end of the context.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent(master: int) -> None:
    """Exit on a SIGTERM from the master process alone, in a process started within `blocked`.

    So `multiprocessing` can still end a worker that hangs. The process also exits when its master
    is gone, which a process of a fork server would not notice. The exit code is 0 after the
    master's SIGTERM, so that torch does not report a worker as failed that torch itself has ended.
    It is 143 if the master is gone.

    Args:
        master: id of the master process.
    """

    def wait_for_signals() -> None:
        while True:
            sender = system.wait_for_signal(signal.SIGTERM, _SECONDS_BETWEEN_CHECKS)
            if sender in (master, -1):
                os._exit(0)
            if not system.started(master):
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait_for_signals, daemon=True).start()
