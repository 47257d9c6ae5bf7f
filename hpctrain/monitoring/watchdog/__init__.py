"""Watchdog against silent hangs: a helper process on each host ends ranks without heartbeat.

Each rank writes its progress into shared memory (`rank`, `shared_memory`). The helper of its host
(`helper`, `loop`) reads it, and the state of the processes (`watched_rank`). When a rank is silent
for too long, the helpers of all hosts exchange their observations (`helper_exchange`), decide which
rank is to blame (`blame`), show the stack of every rank, and kill the ranks.
"""

from hpctrain.monitoring.watchdog.rank import Watchdog

__all__ = ["Watchdog"]
