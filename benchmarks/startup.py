"""Cost of a start: new processes against a bare Python, in turns.

    python benchmarks/startup.py [--rounds 20] [--save FILE]

The arms take turns, so other load on the machine affects all of them. Each is compared with the
bare Python of its own round.
"""

import argparse
import os
import subprocess
import sys
import time

from measure import add_save, describe, facts, order, outcome, save, summary, table

BARE = "python -c pass"
# To add an arm, add a line: its name and the arguments of the interpreter.
ARMS = {
    BARE: ("-c", "pass"),
    "import hpctrain": ("-c", "import hpctrain"),
    "python -m hpctrain --help": ("-m", "hpctrain", "--help"),
    "python -m hpctrain run --help": ("-m", "hpctrain", "run", "--help"),
    "python -m hpctrain submit --help": ("-m", "hpctrain", "submit", "--help"),
}
# A slow process for comparison: it runs only in the first rounds, and has no target.
REFERENCES = {"import torch": ("-c", "import torch")}
REFERENCE_ROUNDS = 5
TARGET_MS = 60.0


def milliseconds(arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Return the milliseconds of one new process, from before its start until its end."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return (time.perf_counter() - start) * 1e3


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the times of each arm, one for each round in which it ran."""
    # Without bytecode caches, the time would include the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    arms = ARMS | REFERENCES
    for arguments in arms.values():  # warms up: writes the caches, loads the files into memory
        milliseconds(arguments, environment)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        names = list(arms if number < REFERENCE_ROUNDS else ARMS)
        for name in order(names, number):
            times[name].append(milliseconds(arms[name], environment))
    return times


def evaluate(times: dict[str, list[float]]) -> dict[str, dict]:
    """Return for each arm its time, and how much longer it is than bare Python per round."""
    results = {}
    for name, own in times.items():
        results[name] = {"ms": summary(own), "all_ms": own}
        if name == BARE:
            continue
        more = summary([a - b for a, b in zip(own, times[BARE], strict=False)])
        results[name]["more_ms"] = more
        if name in ARMS:
            results[name] |= {"target_ms": TARGET_MS, "outcome": outcome(more, TARGET_MS)}
    return results


def show(results: dict[str, dict]) -> str:
    """Return the results as a text table."""
    rows = [("", "ms", "more than bare Python", "target", "", "processes")]
    for name, result in results.items():
        more, target = result.get("more_ms"), result.get("target_ms")
        rows.append(
            (
                name,
                describe(result["ms"]),
                describe(more) if more else "",
                f"≤ {target:g}" if target else "",
                result.get("outcome", ""),
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
