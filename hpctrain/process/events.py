"""Events of a training: what lower layers report to the session and its open run.

Imports go down only, so a loader cannot call its session. It calls an event here instead, and the
session or the run has set what then happens. No other call goes up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Events"]


def _nothing(*_: Any) -> None:
    """Do nothing: no session or no run is open."""


@dataclass(slots=True)
class Events:
    """Functions to call as something happens; each one does nothing unless it is set.

    Attributes:
        phase: called by session, run and loaders with a phase of `hpctrain.process.phases` as it
            begins; set by the run. Several times per step, so it takes less than a microsecond.
        weight: called by a loader with the weight of the micro-batch that it returns next; 1 if all
            have the same number of samples; set by the session.
        evaluation: called by a loader before the first batch of an evaluation, on all ranks; set by
            the session.
        evaluated: called by a loader with the number of a batch of an evaluation, from 0, and the
            number of batches, before the batch is used; set by the run.
        exhausted: called by a loader after the last batch of an evaluation in which ranks have
            different numbers of batches, with whether a rank has none; set by the session.
        exchange: called before an exchange that belongs to an evaluation, with a text that is the
            same on all ranks; set by the session.
        backward: called by the session before each backward pass; set by the run.
        stepped: called as an optimizer has stepped or skipped an overflowed step; set by the run.
        row: called at rank 0 with each written row of metrics, and with whether it is a training
            row; set by the run.
    """

    phase: Callable[[int], None] = _nothing
    weight: Callable[[float], None] = _nothing
    evaluation: Callable[[], None] = _nothing
    evaluated: Callable[[int, int], None] = _nothing
    exhausted: Callable[[bool], None] = _nothing
    exchange: Callable[[str], None] = _nothing
    backward: Callable[[], None] = _nothing
    stepped: Callable[[], None] = _nothing
    row: Callable[[Mapping[str, Any], bool], None] = _nothing

    def close_run(self) -> None:
        """Unset what the run has set."""
        self.phase = self.evaluated = self.backward = self.stepped = self.row = _nothing
