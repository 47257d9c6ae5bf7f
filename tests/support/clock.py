"""A clock that tests move, for the `clock` argument of objects with a time-out."""


class Clock:
    """Stand still, or run as another clock does, until a test moves it.

    Args:
        source: the clock that it runs with; None for one that stands still.
    """

    def __init__(self, source=None):
        self._source = source or (lambda: 1000.0)
        self._moved = 0.0

    def __call__(self):
        return self._source() + self._moved

    def move(self, seconds):
        """Move the clock by some seconds."""
        self._moved += seconds
