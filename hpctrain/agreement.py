"""What the ranks have to know of each other, without stopping for it."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hpctrain.backends.base import Backend, Later
from hpctrain.errors import HpctrainError, repeated

__all__ = ["Agreement", "by_rank_0"]

T = TypeVar("T")

_SECONDS_BETWEEN_SUMS = 1.0
_MOST_STEPS = 256  # so that steps which become slow do not make the next sum late


class Agreement:
    """Sums of a few numbers over the ranks, about once a second.

    A sum is begun at the same step on all ranks and read where the next one begins, again at the
    same step: no step waits for it, and what follows from it, every rank does at one place.

    Args:
        backend: over whose ranks to sum.
        say: what this rank has to say, by name; the same names in the same order on all ranks.
            Called where a sum begins, so what it says once is heard once.
    """

    def __init__(self, backend: Backend, say: Callable[[], Mapping[str, float]]) -> None:
        self._backend, self._say = backend, say
        self._steps = 1  # from one sum to the next
        self._left = 1  # steps until then
        self._sum: tuple[list[str], Later] | None = None  # under way
        self._begun = time.monotonic()

    def step(self) -> Mapping[str, float] | None:
        """Called by all ranks after each step: what was said, where a sum is due."""
        self._left -= 1
        if self._left:
            return None
        heard = self._read()
        self._begin()
        # Who is alone need not hear it where others do; a GPU may still have to sum it.
        if heard is None and self._backend.world_size == 1 and self._sum and self._sum[1].ready():
            heard = self._read()
        self._left = self._steps
        return heard

    def now(self) -> Mapping[str, float]:
        """What is said at this moment, with what was not heard yet; waits for all ranks."""
        before = self._read() or {}
        self._begin()
        heard = self._read() or {}
        self._left = self._steps
        return {name: value + before.get(name, 0.0) for name, value in heard.items()}

    def _begin(self) -> None:
        now = time.monotonic()
        said = self._say()
        sums = self._backend.sum_later([*said.values(), now - self._begun])
        self._sum, self._begun = (list(said), sums), now

    def _read(self) -> dict[str, float] | None:
        if self._sum is None:
            return None
        names, sums = self._sum
        self._sum = None
        *values, seconds = sums.values()
        a_step = seconds / self._backend.world_size / self._steps
        wanted = int(_SECONDS_BETWEEN_SUMS / a_step) if a_step > 0 else _MOST_STEPS
        self._steps = max(1, min(wanted, 2 * self._steps, _MOST_STEPS))
        return dict(zip(names, values, strict=True))


def by_rank_0(backend: Backend, act: Callable[[], T]) -> T:
    """What rank 0 does for all: its result, or its error, on every rank.

    Args:
        backend: to share it.
        act: called at rank 0; what it returns is picklable.

    Raises:
        HpctrainError: rank 0's; there in full, at the others as its repetition.
    """
    result: Any = None
    mistake: HpctrainError | None = None
    if backend.rank == 0:
        try:
            result = act()
        except HpctrainError as error:
            mistake = error
    told: tuple[str, str, str, str] | None = None
    if mistake is not None:
        told = (type(mistake).__name__, mistake.found, mistake.expected, mistake.fix)
    told, result = backend.share((told, result))
    if mistake is not None:
        raise mistake
    if told is not None:
        raise repeated(*told)
    shared: T = result
    return shared
