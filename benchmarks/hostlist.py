"""Cost of host lists: three lists of 10,000 hosts, against the simplest loop for the same names.

    python benchmarks/hostlist.py [--rounds 60] [--save FILE]

The arms take turns, and each is compared with the comprehension of its own round, so other load on
the machine affects all of them.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

from harness import Results, compare, run

from hpctrain.cluster.hostlist import compress, expand
from hpctrain.tools.bench.measure import take_turns

NAMES = [f"n{i:05d}" for i in range(10_000)]
LISTS = {
    "n[00000-09999]": "n[00000-09999]",
    "rack[00-99]node[00-99]": "rack[00-99]node[00-99]",
    "n00000,n00001,…": ",".join(NAMES),
}
BASE = 'f"n{i:05d}"'
ARMS: dict[str, Callable[[], object]] = {
    BASE: lambda: [f"n{i:05d}" for i in range(10_000)],
    **{f"expand {name}": partial(expand, text) for name, text in LISTS.items()},
    "compress n00000, n00001, …": partial(compress, NAMES),
}
TARGETS = {f"expand {name}": {"ratio": "≤ 0.7"} for name in LISTS}


def microseconds(arm: Callable[[], object]) -> dict[str, float]:
    """Return the microseconds of one call."""
    start = time.perf_counter()
    arm()
    return {"us": (time.perf_counter() - start) * 1e6}


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's time, and its ratio to the base."""
    arms = {name: partial(microseconds, arm) for name, arm in ARMS.items()}
    times = take_turns(arms, arguments.rounds, warm_up=3)
    return compare(times, BASE, targets=TARGETS)


if __name__ == "__main__":
    run("The cost of host lists.", 60, ["hpctrain"], measure)
