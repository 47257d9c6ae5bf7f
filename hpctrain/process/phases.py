"""Phases of a step, as plain numbers, because ranks write them on the hot path."""

from dataclasses import dataclass
from operator import itemgetter

__all__ = ["AFTER_LOADING", "PHASES", "STEP", "Phase"]


@dataclass(frozen=True, slots=True)
class Phase:
    """Description of a phase.

    Attributes:
        description: what a rank does in the phase, for messages.
        waits: whether ranks wait for each other in the phase.
    """

    description: str
    waits: bool


# Of two ranks after the same number of steps, the one with the lower number is behind: first the
# phases in which a rank waits for no other one, then those between two steps, then the sums.
CLOSED = -1  # the rank has left the run; written by `Watchdog.close` alone
IDLE = 0  # no progress is expected
LOADING = 1
COMPUTING = 2
ACCUMULATING = 3
AGREEING = 4
EVALUATING = 5
SAVING = 6
WAITING = 7
BACKWARD = 8
UPDATING = 9

# Phases that make up a step, without and with the wait for data; each returns their entries.
AFTER_LOADING = itemgetter(COMPUTING, ACCUMULATING, BACKWARD, UPDATING, AGREEING)
STEP = itemgetter(LOADING, COMPUTING, ACCUMULATING, BACKWARD, UPDATING, AGREEING)

PHASES = {
    CLOSED: Phase("has left the run", False),
    IDLE: Phase("outside of the run's loop", False),
    LOADING: Phase("waits for data", False),
    COMPUTING: Phase("in the script's code", False),
    ACCUMULATING: Phase("in the backward pass of a micro-batch", False),
    AGREEING: Phase("agrees with the other ranks", True),
    EVALUATING: Phase("in an evaluation", True),
    SAVING: Phase("saves a checkpoint", True),
    WAITING: Phase("waits for the other ranks before an exchange", True),
    BACKWARD: Phase("in the backward pass, its sums or the update", True),
    UPDATING: Phase("in the update of the weights", True),
}
