"""Consensus of the ranks: small exchanges of values, most of them without a wait."""

import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpctrain.backends.base import Backend, Work
from hpctrain.cluster.texts import ranks_text
from hpctrain.errors import HpctrainError, UsageError, repeated
from hpctrain.process.events import Events
from hpctrain.process.phases import IDLE, WAITING

__all__ = [
    "Answer",
    "Consensus",
    "ask",
    "first_error",
    "meet",
    "on_all_ranks",
    "on_rank_zero",
    "refuse_unlike_answers",
]

T = TypeVar("T")

_SECONDS_BETWEEN_SUMS = 1.0
_MOST_STEPS = 256  # limit, so that the next sum is not late if steps become slow


class Consensus:
    """The one asynchronous sum of a run: values that the ranks decide by, and rows of metrics.

    A sum begins at the same step on all ranks, about once a second, and is read where the next one
    begins, again at the same step. So no step waits for it, and all ranks act on it at the same
    step.

    Each sum includes a number that stands for what the rank is doing. By Cauchy and Schwarz, N
    numbers are equal if N times the sum of their squares is the square of their sum. Totals whose
    number depends on what a rank has done join only the sum after the one that has confirmed it.

    Args:
        backend: backend of the ranks that take part.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._steps = 1  # steps from one sum to the next
        self._passed = 0  # steps since the last sum began
        # Names, text and number of steps of the sum under way.
        self._sum: tuple[list[str], str, int, Work] | None = None
        self._begun = time.monotonic()

    def due(self, early: bool) -> bool:
        """Count a step, and return whether a sum is due now; called by all ranks.

        Args:
            early: whether it is due in any case; the same on all ranks.
        """
        self._passed += 1
        return early or self._passed >= self._steps

    def begin(self, values: Mapping[str, Any], doing: str, totals: Sequence[Any] = ()) -> None:
        """Begin a sum; the one before it has been read.

        Args:
            values: values of this rank by name, as `Backend.sum_async` takes them; the same names
                in the same order on all ranks.
            doing: what this rank does, for error messages; the same text on all ranks, unless they
                do different things.
            totals: further values, as many as on the other ranks.
        """
        now = time.monotonic()
        number = int.from_bytes(hashlib.blake2b(doing.encode(), digest_size=2).digest(), "big")
        numbers = [number, number * number, now - self._begun, *values.values(), *totals]
        work = self._backend.sum_async(numbers)
        self._sum, self._begun = (list(values), doing, max(1, self._passed), work), now
        self._passed = 0

    @property
    def ready(self) -> bool:
        """Whether there is a sum that `read` returns without a wait."""
        return self._sum is not None and self._sum[-1].ready()

    def read(self) -> tuple[dict[str, float], list[float]] | None:
        """Return the values and totals of the sum under way, or None; wait for it if necessary.

        Raises:
            UsageError: the ranks do different things.
        """
        if self._sum is None:
            return None
        names, doing, steps, work = self._sum
        self._sum = None
        total, squares, seconds, *values = work.values()
        if total * total != squares * self._backend.world_size:
            refuse_unlike_answers(ask(self._backend, doing))
        a_step = seconds / self._backend.world_size / steps
        wanted = int(_SECONDS_BETWEEN_SUMS / a_step) if a_step > 0 else _MOST_STEPS
        self._steps = max(1, min(wanted, 2 * self._steps, _MOST_STEPS))
        return dict(zip(names, values, strict=False)), values[len(names) :]


def meet(backend: Backend, doing: str, events: Events | None = None, after: int = IDLE) -> None:
    """Wait for all ranks before an exchange, and check that all of them do the same.

    Args:
        backend: backend of the exchange.
        doing: what this rank does, for the error message.
        events: receives the phases of the wait and after it.
        after: phase after the wait.

    Raises:
        UsageError: the ranks do not do the same.
    """
    events = events or Events()
    events.heartbeat.enter(WAITING)
    if backend.world_size > 1:
        refuse_unlike_answers(ask(backend, doing))
    events.heartbeat.enter(after)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank does before an exchange.

    Attributes:
        doing: description, the same on all ranks that do the same.
        place: line of the script.
        note: more text for the other ranks, which may differ.
    """

    doing: str
    place: str
    note: str


def ask(backend: Backend, doing: str, note: str = "") -> list[Answer]:
    """Wait for all ranks, and return what each of them does, in the order of ranks.

    Args:
        backend: backend of the exchange.
        doing, note: as for `Answer`, of this rank.
    """
    texts = backend.all_gather_text(f"{doing}\t{_place()}\t{note}")
    return [Answer(*text.rsplit("\t", 2)) for text in texts]  # a description may have tabs


def refuse_unlike_answers(answers: Sequence[Answer]) -> None:
    """Raise the error of `meet`, if the ranks do not do the same.

    Args:
        answers: result of `ask`.
    """
    if any(one.doing != answers[0].doing for one in answers):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(answers):
            ranks.setdefault(f"{one.doing} ({one.place})", []).append(rank)
        calls = "; ".join(f"{ranks_text(those)}: {doing}" for doing, those in ranks.items())
        raise UsageError("HT601.calls-differ", calls=calls)


def _place() -> str:
    """Return the line of the script from which this code was called."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}"


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def on_rank_zero(backend: Backend, act: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result, or raise its error, on every rank.

    Args:
        backend: backend that sends the result to all ranks.
        act: function called on rank 0; its result is picklable.

    The error of rank 0 is raised on all ranks. An `HpctrainError` is complete on rank 0, and a
    short repetition on the others.
    """
    result: Any
    result, error = _tried(act) if backend.rank == 0 else (None, None)
    sent, result = backend.broadcast_object((_picklable(error, 0), result))
    if error is not None:
        raise error
    if sent is not None:
        raise sent
    shared: T = result
    return shared


def on_all_ranks(backend: Backend, act: Callable[[], T]) -> T:
    """Call a function on each rank, and return its result; if one of them fails, all ranks raise.

    Args:
        backend: backend of the ranks.
        act: function, without a collective.

    The error is that of the first rank that has one, as for `on_rank_zero`.
    """
    result, error = _tried(act)
    first = first_error(backend, error)
    if first is not None:
        raise first
    own: T = result
    return own


def _tried(act: Callable[[], T]) -> tuple[Any, BaseException | None]:
    """Return the result of a function, and its error."""
    try:
        return act(), None
    except (Exception, SystemExit) as caught:
        return None, caught


def first_error(backend: Backend, error: BaseException | None) -> BaseException | None:
    """Return the error of the first rank that has one, for this rank to raise; called by all ranks.

    Args:
        backend: backend of the ranks.
        error: error of this rank, or None.
    """
    seen = backend.gather_object(_picklable(error, backend.rank))
    found = ((rank, one) for rank, one in enumerate(seen) if one is not None)
    first = backend.broadcast_object(next(found, None))
    if first is None:
        return None
    return error if first[0] == backend.rank else first[1]


def _picklable(error: BaseException | None, rank: int) -> BaseException | None:
    """Return a copy of an error for the other ranks to raise; they print it as a repetition.

    Args:
        error: error of this rank, or None.
        rank: number of this rank.
    """
    if error is None:
        return None
    if isinstance(error, HpctrainError):
        return repeated(type(error).__name__, *error.args)
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))  # noqa: S301, as it is our own
    except Exception:  # a class of exceptions may be anything
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"This is the error of rank {rank}, whose traceback has its place.")
    return copy
