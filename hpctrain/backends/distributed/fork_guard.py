"""Forks beside gloo, on CPython 3.11.

A thread of gloo ends each collective. Where it has the last reference of C++ code to a tensor that
Python code has made, it takes the GIL to release the Python object (`decref_pyobject` in
c10/core/TensorImpl, torch 2.14), and makes a thread state for that. A process that is forked at
this moment never leaves `os.fork()` on CPython 3.11: in the child, `PyOS_AfterFork_Child`
(Modules/posixmodule.c) first takes the lock of the thread states, which that thread held, and only
then renews it. Since 3.12 it renews the lock first. Loaders fork their workers where an evaluation
or an epoch begins, which is also where ranks exchange something.

So a fork first waits for the asynchronous sums, and then gives the GIL to threads that want it,
which takes them microseconds. Another rank begins each sum without this one, as all begin it at the
same step; the wait has a limit because that rank may be lost.
"""

import os
import sys
import time
from collections import deque
from typing import Any

__all__ = ["expect"]

_MOST_SECONDS = 5.0
_PAUSE_SECONDS, _PAUSES = 0.001, 5
_STARTED: deque[Any] = deque(maxlen=4)


def expect(work: Any) -> None:
    """Let forks wait for an asynchronous collective.

    Args:
        work: handle of torch.distributed.
    """
    _STARTED.append(work)


def _before_fork() -> None:
    if not _STARTED:
        return
    end = time.monotonic() + _MOST_SECONDS
    for work in tuple(_STARTED):
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
    for _ in range(_PAUSES):
        time.sleep(_PAUSE_SECONDS)


if sys.version_info < (3, 12):
    os.register_at_fork(before=_before_fork)
