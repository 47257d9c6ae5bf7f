"""Events of a training: what lower layers report to the session and its open run.

Imports go down only, so a loader cannot call its session. It calls an event here instead, and the
session or the run has set what then happens. No other call goes up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.process.heartbeat import Heartbeat

__all__ = ["Events"]


def _nothing(*_: Any) -> None:
    """Do nothing: no session or no run is open."""


@dataclass(slots=True)
class Events:
    """Functions to call as something happens; each one does nothing unless it is set.

    Attributes:
        heartbeat: phase of this rank; session, run and loaders enter one as it begins.
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
        row: called at rank 0 with each written row of metrics, and with whether it is a training
            row; set by the run.
    """

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    weight: Callable[[float], None] = _nothing
    evaluation: Callable[[], None] = _nothing
    evaluated: Callable[[int, int], None] = _nothing
    exhausted: Callable[[bool], None] = _nothing
    exchange: Callable[[str], None] = _nothing
    row: Callable[[Mapping[str, Any], bool], None] = _nothing

    def close_run(self) -> None:
        """Unset what the run has set."""
        self.evaluated = self.row = _nothing
