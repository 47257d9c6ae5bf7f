"""Whether this rank waits for the others, and for how long.

Horovod's own stall inspector looks at that over MPI. Over gloo it never finds anybody missing, as
its list of ranks stays empty: horovod/common/gloo/gloo_controller.cc, Horovod 0.28.1, reserves room
for `global_ranks_` and never gives it a size.
"""

import threading
import time
from collections.abc import Callable

__all__ = ["Watch"]

_LOOK_PART, _LOOK_SECONDS = 0.1, 5.0  # how often it looks: a part of the limit, at most


class Watch:
    """Around every wait of the main thread: `with watch("gradients"): …`.

    Args:
        limit: seconds that a wait may take.
        expire: called once, in a thread of its own, when one takes longer.
    """

    def __init__(self, limit: float, expire: Callable[[], None]) -> None:
        self._limit, self._expire = limit, expire
        self._since: float | None = None
        self._what = ""
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="horovod watch", daemon=True).start()

    def waiting(self) -> str:
        """What the main thread waits for now; empty where it does not."""
        return self._what if self._since is not None else ""

    def __call__(self, what: str) -> "Watch":
        """Say what the wait is for."""
        self._what = what
        return self

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._since = None

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def _look(self) -> None:
        pause = min(self._limit * _LOOK_PART, _LOOK_SECONDS)
        while not self._closed.wait(pause):
            since = self._since
            if since is not None and time.monotonic() - since > self._limit:
                self._expire()
                return
