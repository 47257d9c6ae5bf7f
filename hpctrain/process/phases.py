"""Phases of a step, as plain numbers, because ranks write them on the hot path."""

from operator import itemgetter

__all__ = ["AFTER_LOADING", "PHASES", "STEP"]

# Of two ranks after the same number of steps, the one with the lower number is behind: first the
# phases in which a rank waits for no other one, then, from AGREEING on, those in which ranks wait
# for each other: those between two steps, then the sums.
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

#: What a rank does in each phase, for messages.
PHASES = {
    CLOSED: "has left the run",
    IDLE: "outside of the run's loop",
    LOADING: "waits for data",
    COMPUTING: "in the script's code",
    ACCUMULATING: "in the backward pass of a micro-batch",
    AGREEING: "agrees with the other ranks",
    EVALUATING: "in an evaluation",
    SAVING: "saves a checkpoint",
    WAITING: "waits for the other ranks before an exchange",
    BACKWARD: "in the backward pass, its sums or the update",
    UPDATING: "in the update of the weights",
}
