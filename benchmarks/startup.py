"""Cost of a start: new processes against a bare Python, and imports against that of torch.

    python benchmarks/startup.py [--rounds 20] [--save FILE]

The arms take turns, so other load on the machine affects all of them. Each is compared with the
first arm of its table in the same round.
"""

import argparse
import subprocess
import sys
import time
from functools import partial

from harness import ENVIRONMENT, Results, compare, run

from hpctrain.tools.bench.measure import take_turns

BARE, TORCH, SESSION = "python -c pass", "import torch", "from hpctrain import Session"
# To add an arm, add a line: its name and the arguments of the interpreter.
COMMANDS = {
    BARE: ("-c", "pass"),
    "import hpctrain": ("-c", "import hpctrain"),
    "python -m hpctrain --help": ("-m", "hpctrain", "--help"),
    "python -m hpctrain run --help": ("-m", "hpctrain", "run", "--help"),
    "python -m hpctrain submit --help": ("-m", "hpctrain", "submit", "--help"),
}
IMPORTS = {TORCH: ("-c", TORCH), SESSION: ("-c", SESSION)}
TARGETS = {name: {"more_ms": "≤ 60"} for name in COMMANDS if name != BARE}


def milliseconds(arguments: tuple[str, ...]) -> dict[str, float]:
    """Return the milliseconds of one new process, from before its start until its end."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True
    )
    return {"ms": (time.perf_counter() - start) * 1e3}


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's time, and how much longer it is than that of the first one."""

    def times(arms: dict[str, tuple[str, ...]]) -> dict[str, list[dict[str, float]]]:
        calls = {name: partial(milliseconds, words) for name, words in arms.items()}
        # The warm-up writes the caches, and loads the files into memory.
        return take_turns(calls, arguments.rounds, warm_up=1)

    return {
        "commands": compare(times(COMMANDS), BARE, ("more_ms",), TARGETS),
        "imports": compare(times(IMPORTS), TORCH, targets={SESSION: {"ratio": "≤ 1.05"}}),
    }


if __name__ == "__main__":
    run("The cost of starting.", 20, ["hpctrain", "torch"], measure)
