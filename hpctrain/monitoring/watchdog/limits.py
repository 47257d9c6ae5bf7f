"""Learnt time-outs: how long a rank may be silent in a phase, from its silence so far."""

from collections import defaultdict, deque

__all__ = ["FACTOR", "LEAST", "Limits"]

FACTOR = 10  # times the slowest
LEAST = 60  # seconds
_FIRST = 5  # times of a phase that teach nothing: they compile, start workers, fill caches
_RECENT = 600  # looks at a phase, which are a second apart or more


class Limits:
    """Limits for the ranks of a host.

    Args:
        timeout: longest limit in seconds; that of a phase that was not seen often enough.
        least: shortest limit in seconds.
    """

    def __init__(self, timeout: float, least: float) -> None:
        self.timeout, self.least = timeout, least
        self._silences: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))

    def learn(self, phase: int, count: int, silence: float) -> None:
        """Add the silence of a phase that has ended.

        Args:
            phase: the phase.
            count: how often the rank had begun it.
            silence: its seconds, or more.
        """
        if count > _FIRST:
            self._silences[phase].append(silence)

    def of(self, phase: int, count: int) -> tuple[float, float | None]:
        """Return the limit in seconds, and the longest silence of late, or None for the time-out.

        Args:
            phase: the phase.
            count: how often the rank has begun it.
        """
        if count <= _FIRST + 1:
            return self.timeout, None
        slowest = max(self._silences[phase], default=0.0)
        limit = max(self.least, FACTOR * slowest)
        return (limit, slowest) if limit < self.timeout else (self.timeout, None)
