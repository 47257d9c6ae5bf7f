"""Exit codes of the outermost hpctrain process, also in the exit status file."""

__all__ = ["DONE", "FAILED", "GIVEN_UP", "MOST_FRUITLESS", "STATUS", "STOPPED"]

DONE = 0
FAILED = 1
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped at a safe point, can be resumed
GIVEN_UP = 76  # restarted too often without progress

# Consecutive starts that may end without a new checkpoint; then the run is given up.
MOST_FRUITLESS = 3

# Words in summary.json and for trackers.
STATUS = {DONE: "done", FAILED: "failed", STOPPED: "stopped", GIVEN_UP: "given-up"}
