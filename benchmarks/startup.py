"""Cost of a start: new processes against a bare Python, in turns.

    python benchmarks/startup.py [--rounds 20] [--save FILE]

The arms take turns, so other load on the machine affects all of them. Each is compared with the
bare Python of its own round.
"""

import argparse
import subprocess
import sys
import time
from functools import partial

from harness import ENVIRONMENT, Results, compare, run

from hpctrain.tools.bench.measure import take_turns

BARE, TORCH = "python -c pass", "import torch"
# To add an arm, add a line: its name and the arguments of the interpreter.
ARMS = {
    BARE: ("-c", "pass"),
    "import hpctrain": ("-c", "import hpctrain"),
    "python -m hpctrain --help": ("-m", "hpctrain", "--help"),
    "python -m hpctrain run --help": ("-m", "hpctrain", "run", "--help"),
    "python -m hpctrain submit --help": ("-m", "hpctrain", "submit", "--help"),
    TORCH: ("-c", "import torch"),  # for comparison
}
TARGETS = {name: {"more_ms": "≤ 60"} for name in ARMS if name not in (BARE, TORCH)}


def milliseconds(arguments: tuple[str, ...]) -> float:
    """Return the milliseconds of one new process, from before its start until its end."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True
    )
    return (time.perf_counter() - start) * 1e3


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's time, and how much longer it is than bare Python."""
    arms = {name: partial(milliseconds, words) for name, words in ARMS.items()}
    # The warm-up writes the caches, and loads the files into memory.
    times = take_turns(arms, arguments.rounds, warm_up=1)
    return compare({name: {"ms": own} for name, own in times.items()}, BARE, ("more_ms",), TARGETS)


if __name__ == "__main__":
    run("The cost of starting.", 20, ["hpctrain", "torch"], measure)
