"""Phases of a step, as plain numbers, because ranks write them on the hot path."""

from dataclasses import dataclass

__all__ = ["PHASES", "STEP", "Phase"]


@dataclass(frozen=True, slots=True)
class Phase:
    """Description of a phase.

    Attributes:
        description: what a rank does in the phase, for messages.
        waits: whether ranks wait for each other in the phase.
    """

    description: str
    waits: bool


# Of two ranks at the same step, the one with the lower number is behind.
CLOSED = -1  # the rank has left the run; written by `Watchdog.close` alone
IDLE = 0  # no progress is expected
LOADING = 1
COMPUTING = 2
ACCUMULATING = 3
BACKWARD = 4
UPDATING = 5
AGREEING = 6
EVALUATING = 7
SAVING = 8
WAITING = 9

STEP = slice(LOADING, AGREEING + 1)  # phases that make up a step

PHASES = {
    CLOSED: Phase("has left the run", False),
    IDLE: Phase("outside of the run's loop", False),
    LOADING: Phase("waits for data", False),
    COMPUTING: Phase("in the script's code", False),
    ACCUMULATING: Phase("in the backward pass of a micro-batch", False),
    BACKWARD: Phase("in the backward pass or its sums", True),
    UPDATING: Phase("in the update of the weights", True),
    AGREEING: Phase("agrees with the other ranks", True),
    EVALUATING: Phase("in an evaluation", True),
    SAVING: Phase("saves a checkpoint", True),
    WAITING: Phase("waits for the other ranks before an exchange", True),
}
