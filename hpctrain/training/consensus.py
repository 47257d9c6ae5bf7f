"""What the ranks have to know of each other, without stopping for it."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hpctrain.backends.base import Backend, Work
from hpctrain.errors import HpctrainError, UsageError, repeated

__all__ = ["Consensus", "meet", "on_rank_zero"]

T = TypeVar("T")

_SECONDS_BETWEEN_SUMS = 1.0
_MOST_STEPS = 256  # so that steps which become slow do not make the next sum late
_SHOWN = 8  # ranks that do the same


class Consensus:
    """Sums of a few numbers over the ranks, about once a second.

    A sum is begun at the same step on all ranks and read where the next one begins, again at the
    same step: no step waits for it, and what follows from it, every rank does at one place.

    With each goes a number that stands for what the rank is doing. By Cauchy and Schwarz N numbers
    are equal where N times the sum of their squares is the square of their sum.

    Args:
        backend: over whose ranks to sum.
        say: what this rank has to say, by name; the same names in the same order on all ranks.
            Called where a sum begins, so what it says once is heard once.
        doing: what this rank does, for people; the same on all ranks, unless they differ.

    Attributes:
        heard: how many sums the last call of `step` or `now` has read.
    """

    def __init__(
        self,
        backend: Backend,
        say: Callable[[], Mapping[str, float]],
        doing: Callable[[], str],
    ) -> None:
        self._backend, self._say, self._doing = backend, say, doing
        self._steps = 1  # from one sum to the next
        self._left = 1  # steps until then
        self._sum: tuple[list[str], str, Work] | None = None  # under way
        self._begun = time.monotonic()
        self.heard = 0

    def step(self) -> Mapping[str, float] | None:
        """Called by all ranks after each step: what was said, where a sum is due."""
        self._left -= 1
        if self._left:
            return None
        self.heard = 0
        heard = self._read()
        self._begin()
        # Who is alone need not hear it where others do; a GPU may still have to sum it.
        if heard is None and self._backend.world_size == 1 and self._sum and self._sum[2].ready():
            heard = self._read()
        self._left = self._steps
        return heard

    def now(self, what: str) -> Mapping[str, float]:
        """What is said at this moment, with what was not heard yet; waits for all ranks.

        Args:
            what: this is for, such as "a checkpoint".
        """
        meet(self._backend, f"{what}, {self._doing()}")
        self.heard = 0
        before = self._read() or {}
        self._begin()
        heard = self._read() or {}
        self._left = self._steps
        return {name: value + before.get(name, 0.0) for name, value in heard.items()}

    def _begin(self) -> None:
        now = time.monotonic()
        said, doing = self._say(), self._doing()
        number = int.from_bytes(hashlib.blake2b(doing.encode(), digest_size=2).digest(), "big")
        numbers = [*said.values(), number, number * number, now - self._begun]
        self._sum, self._begun = (list(said), doing, self._backend.sum_async(numbers)), now

    def _read(self) -> dict[str, float] | None:
        if self._sum is None:
            return None
        names, doing, sums = self._sum
        self._sum = None
        self.heard += 1
        *values, total, squares, seconds = sums.values()
        if total * total != squares * self._backend.world_size:
            compare(self._backend, doing)
        a_step = seconds / self._backend.world_size / self._steps
        wanted = int(_SECONDS_BETWEEN_SUMS / a_step) if a_step > 0 else _MOST_STEPS
        self._steps = max(1, min(wanted, 2 * self._steps, _MOST_STEPS))
        return dict(zip(names, values, strict=True))


def meet(backend: Backend, doing: str) -> None:
    """Wait for all ranks where they exchange something, and hold what they do to each other.

    Args:
        backend: over which they are about to.
        doing: what this rank does, for people.

    Raises:
        UsageError: the ranks do not do the same.
    """
    if backend.world_size > 1:
        said = [one.split("\t") for one in backend.meet(f"{doing}\t{_place()}")]
        if any(one[0] != said[0][0] for one in said):
            _refuse_unlike([f"{doing} ({place})" for doing, place in said])


def compare(backend: Backend, doing: str) -> None:
    """The same where it is known already that they differ, and all ranks are at one place."""
    seen = backend.gather_object(doing)
    on_rank_zero(backend, lambda: _refuse_unlike(seen))


def _refuse_unlike(seen: Sequence[str]) -> None:
    """Raise where the ranks do not do the same.

    Args:
        seen: what each rank does.
    """
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(seen):
        ranks.setdefault(one, []).append(rank)
    if len(ranks) > 1:
        raise UsageError(
            "the ranks do not do the same: "
            + "; ".join(f"{_ranks(those)}: {doing}" for doing, those in ranks.items()),
            "the same calls in the same order on every rank",
            "call run.log(), run.save(), session.sum() and the like on all ranks, not under `if "
            "session.is_main`; give all of them as many batches; and break or continue on all",
        )


def _place() -> str:
    """The line of the script that has led here."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}"


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def _ranks(those: Sequence[int]) -> str:
    shown = ", ".join(map(str, those[:_SHOWN])) + (", …" if len(those) > _SHOWN else "")
    return f"rank{'s' if len(those) > 1 else ''} {shown}"


def on_rank_zero(backend: Backend, act: Callable[[], T]) -> T:
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
    told, result = backend.broadcast_object((told, result))
    if mistake is not None:
        raise mistake
    if told is not None:
        raise repeated(*told)
    shared: T = result
    return shared
