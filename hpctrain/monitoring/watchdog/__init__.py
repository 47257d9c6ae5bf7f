"""No silent hang: a helper process on each host ends ranks that give no sign of life.

Each rank writes into shared memory how far it is (`rank`, `slots`). The helper of its host
(`helper`) reads that, and the state of the processes (`processes`). When a rank is silent for too
long, the helpers of all hosts tell each other what they see (`board`), say which rank is to blame
(`blame`), show the stack of every rank (`stacks`), and kill.
"""

from hpctrain.monitoring.watchdog.phases import (
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
from hpctrain.monitoring.watchdog.rank import Watchdog

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
