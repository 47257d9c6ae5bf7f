"""Cost of host lists: three lists of 10,000 hosts, against the simplest loop for the same names.

    python benchmarks/hostlist.py [--rounds 60] [--save FILE]

The arms take turns, and each is compared with the comprehension of its own round, so other load on
the machine affects all of them.
"""

import argparse
import gc
import time
from collections.abc import Callable

from measure import add_save, describe, facts, order, outcome, save, summary, table

from hpctrain.cluster.hostlist import compress, expand, first

HOSTS = 10_000


def comprehension() -> list[str]:
    """Return the names of the first list: the baseline."""
    return [f"n{i:05d}" for i in range(HOSTS)]


NAMES = comprehension()
LISTS = {
    "n[00000-09999]": "n[00000-09999]",
    "rack[00-99]node[00-99]": "rack[00-99]node[00-99]",
    "n00000,n00001,…": ",".join(NAMES),
}
BASE = 'f"n{i:05d}"'
# To add an arm, add a line. A target, if any, is a multiple of the base, or microseconds.
ARMS: dict[str, Callable[[], object]] = {
    BASE: comprehension,
    **{f"expand {name}": lambda text=text: expand(text) for name, text in LISTS.items()},
    **{f"first {name}": lambda text=text: first(text) for name, text in LISTS.items()},
    "compress n00000, n00001, …": lambda: compress(NAMES),
}
MOST_TIMES = {f"expand {name}": 0.7 for name in LISTS}
MOST_MICROSECONDS = {f"first {name}": 50.0 for name in LISTS}
# Every block takes long enough that the noise of the clock does not matter.
CALLS = {name: 500 if name.startswith("first") else 5 for name in ARMS}


def microseconds(arm: Callable[[], object], calls: int) -> float:
    """Return the microseconds of one call, averaged over several calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        arm()
    return (time.perf_counter() - start) / calls * 1e6


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the times of each arm, one per round."""
    for name, text in LISTS.items():
        hosts = expand(text)
        if len(hosts) != HOSTS or first(text) != hosts[0]:
            raise SystemExit(f"{name}: the list does not have the {HOSTS} expected hosts")
    if not expand(LISTS["n[00000-09999]"]) == expand(LISTS["n00000,n00001,…"]) == NAMES:
        raise SystemExit("the expanded names differ from those of the comprehension")
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    gc.disable()  # as timeit does
    for number in range(rounds):
        for name in order(list(ARMS), number):
            times[name].append(microseconds(ARMS[name], CALLS[name]))
    gc.enable()
    return times


def evaluate(times: dict[str, list[float]]) -> dict[str, dict]:
    """Return for each arm its time, and its ratio to the base of the same round."""
    results: dict[str, dict] = {}
    for name, own in times.items():
        us = summary(own)
        ratio = summary([a / b for a, b in zip(own, times[BASE], strict=True)])
        results[name] = {"us": us, "times_base": ratio, "all_us": own}
        if name in MOST_TIMES:
            limit = MOST_TIMES[name]
            results[name] |= {"target": f"≤ {limit:g} ×", "outcome": outcome(ratio, limit)}
        elif name in MOST_MICROSECONDS:
            limit = MOST_MICROSECONDS[name]
            results[name] |= {"target": f"≤ {limit:g} µs", "outcome": outcome(us, limit)}
    return results


def show(results: dict[str, dict]) -> str:
    """Return the results as a text table."""
    rows = [("", "µs", f"× {BASE}", "target", "", "rounds")]
    for name, result in results.items():
        rows.append(
            (
                name,
                describe(result["us"]),
                describe(result["times_base"], ".3f"),
                result.get("target", ""),
                result.get("outcome", ""),
                str(result["us"]["count"]),
            )
        )
    return table(rows) + "\nMedians, with their 95 % intervals."


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="The cost of host lists.")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="default: 60")
    add_save(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    record = facts(["hpctrain"])
    results = evaluate(measure(arguments.rounds))
    print(show(results))
    save(arguments.save, {"benchmark": "hostlist", **record, "results": results})


if __name__ == "__main__":
    main()
