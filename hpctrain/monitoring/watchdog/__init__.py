"""Watchdog against silent hangs: a helper process on each host ends ranks without heartbeat.

Each rank writes its progress into shared memory (`rank`, `slots`). The helper of its host
(`helper`, `loop`) reads it, and the state of the processes (`processes`). When a rank is silent for
too long, the helpers of all hosts exchange their observations (`exchange`), decide which rank is to
blame (`blame`), show the stack of every rank (`stacks`), and kill the ranks.
"""

from hpctrain.monitoring.watchdog.rank import Watchdog
from hpctrain.process.phases import (
    ACCUMULATING,
    AGREEING,
    BACKWARD,
    COMPUTING,
    EVALUATING,
    IDLE,
    LOADING,
    PHASES,
    SAVING,
    UPDATING,
    WAITING,
)

__all__ = [
    "ACCUMULATING",
    "AGREEING",
    "BACKWARD",
    "COMPUTING",
    "EVALUATING",
    "IDLE",
    "LOADING",
    "PHASES",
    "SAVING",
    "UPDATING",
    "WAITING",
    "Watchdog",
]
