"""What does it cost to start? Fresh processes against a bare Python, in turns.

    python benchmarks/startup.py [--rounds 20] [--save FILE]

The arms take turns, so whatever else the machine does falls on all of them; each is compared with
the bare Python of its own round.
"""

import argparse
import os
import subprocess
import sys
import time

from measure import add_save, describe, facts, order, save, summary, table, verdict

BARE = "python -c pass"
# A new arm is a line here: what it is called, and what follows the interpreter.
ARMS = {
    BARE: ("-c", "pass"),
    "import hpctrain": ("-c", "import hpctrain"),
    "python -m hpctrain --help": ("-m", "hpctrain", "--help"),
}
# A yardstick, slow: it runs only in the first rounds, and has no target.
YARDSTICKS = {"import torch": ("-c", "import torch")}
YARDSTICK_ROUNDS = 5
TARGET_MS = 150.0


def milliseconds(arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """One fresh process, from before its start until it is gone."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return (time.perf_counter() - start) * 1e3


def measure(rounds: int) -> dict[str, list[float]]:
    """The times of each arm, one for each round that it took part in."""
    # Without bytecode caches it would be the compiler that is measured.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    arms = ARMS | YARDSTICKS
    for arguments in arms.values():  # writes the caches, and brings the files into memory
        milliseconds(arguments, environment)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        names = list(arms if number < YARDSTICK_ROUNDS else ARMS)
        for name in order(names, number):
            times[name].append(milliseconds(arms[name], environment))
    return times


def evaluate(times: dict[str, list[float]]) -> dict[str, dict]:
    """Per arm the time, and what it is more than the bare Python of the same round."""
    results = {}
    for name, own in times.items():
        results[name] = {"ms": summary(own), "all_ms": own}
        if name == BARE:
            continue
        more = summary([a - b for a, b in zip(own, times[BARE], strict=False)])
        results[name]["more_ms"] = more
        if name in ARMS:
            results[name] |= {"target_ms": TARGET_MS, "verdict": verdict(more, TARGET_MS)}
    return results


def show(results: dict[str, dict]) -> str:
    """The results for people."""
    rows = [("", "ms", "more than bare Python", "target", "", "processes")]
    for name, result in results.items():
        more, target = result.get("more_ms"), result.get("target_ms")
        rows.append(
            (
                name,
                describe(result["ms"]),
                describe(more) if more else "",
                f"≤ {target:g}" if target else "",
                result.get("verdict", ""),
                str(result["ms"]["count"]),
            )
        )
    return table(rows) + "\nMedians, with their 95 % intervals."


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="The cost of starting.")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: 20")
    add_save(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    record = facts(["hpctrain", "torch"])
    results = evaluate(measure(arguments.rounds))
    print(show(results))
    save(arguments.save, {"benchmark": "startup", **record, "results": results})


if __name__ == "__main__":
    main()
