"""A timer for the waits of this rank for the others.

Horovod's own stall inspector checks them over MPI. Over gloo it never finds a missing rank, as its
list of ranks stays empty: horovod/common/gloo/gloo_controller.cc, Horovod 0.28.1, reserves room for
`global_ranks_` and never gives it a size.
"""

import threading
import time
from collections.abc import Callable

__all__ = ["StallTimer"]

_CHECK_PART, _CHECK_SECONDS = 0.1, 5.0  # interval of the checks: a part of the limit, at most 5 s


class StallTimer:
    """A timer around every wait of the main thread: `with stall_timer("gradients"): …`.

    Args:
        limit: seconds that a wait may take.
        expire: function called once, in the timer's thread, when a wait takes longer.
    """

    def __init__(self, limit: float, expire: Callable[[], None]) -> None:
        self._limit, self._expire = limit, expire
        self._since: float | None = None
        self._what = ""
        self._closed = threading.Event()
        threading.Thread(target=self._check, name="horovod watch", daemon=True).start()

    def waiting(self) -> str:
        """Return what the main thread waits for now; empty if it does not wait."""
        return self._what if self._since is not None else ""

    def __call__(self, what: str) -> "StallTimer":
        """Set what the next wait is for."""
        self._what = what
        return self

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._since = None

    def close(self) -> None:
        """Stop the timer."""
        self._closed.set()

    def _check(self) -> None:
        pause = min(self._limit * _CHECK_PART, _CHECK_SECONDS)
        while not self._closed.wait(pause):
            since = self._since
            if since is not None and time.monotonic() - since > self._limit:
                self._expire()
                return
