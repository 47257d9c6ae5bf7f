"""Time from the command to the first all-reduce, with two ranks over gloo, against torchrun.

    python benchmarks/first_allreduce.py [--rounds 8] [--save FILE]

The clock starts before the command and stops when both ranks have the sum. The end of the
command is not counted. The arms take turns. Each is compared with the baseline of its own round:
torchrun with a script that does not use hpctrain. Most of the time is spent on imports, so other
load on the machine slows all arms. The last arm shows the least that is possible: two processes
that do nothing but import torch.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from harness import ENVIRONMENT, Results, compare, run

from hpctrain.tools.bench.measure import take_turns

RANKS = 2
TIMEOUT = 120.0
READY = "rank is ready"
BASELINE = f"""\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == 2
print("{READY}", flush=True)
dist.destroy_process_group()
"""
WITH_SESSION = f"""\
import torch

import hpctrain

with hpctrain.Session() as session:
    tensor = session.backend.sum(torch.ones(1))
    assert tensor.item() == 2
    print("{READY}", flush=True)
"""
IMPORTS = f"""\
import subprocess
import sys

command = [sys.executable, "-c", "import torch; print('{READY}', flush=True)"]
for process in [subprocess.Popen(command) for _ in range({RANKS})]:
    process.wait()
"""
SCRIPTS = {"baseline.py": BASELINE, "with_session.py": WITH_SESSION, "imports.py": IMPORTS}
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(RANKS))
RUN = (sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", str(RANKS))
BASE, OURS = "torchrun, baseline", "hpctrain run, Session"
# To add an arm, add a line: its name and its command.
ARMS = {
    BASE: (*TORCHRUN, "baseline.py"),
    "torchrun, Session": (*TORCHRUN, "with_session.py"),
    OURS: (*RUN, "with_session.py"),
    # --as torchrun gives the ranks the variables of torchrun, which env:// reads.
    "hpctrain run --as torchrun, baseline": (*RUN, "--as", "torchrun", "baseline.py"),
    "two imports of torch": (sys.executable, "imports.py"),
}


def seconds(command: tuple[str, ...], folder: str) -> dict[str, float]:
    """Return the seconds from before the start until each rank is ready.

    Raises:
        SystemExit: the command failed, or it ran longer than the timeout.
    """
    start, output, took = time.perf_counter(), "", 0.0
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        # A launcher that is terminated ends its ranks.
        alarm = threading.Timer(TIMEOUT, process.terminate)
        alarm.start()
        for line in process.stdout or ():
            output += line
            if READY in line and output.count(READY) == RANKS:
                took = time.perf_counter() - start
        alarm.cancel()
    if process.returncode or not took:
        raise SystemExit(f"{output}\n{command} ended with {process.returncode}")
    return {"s": took}


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's time, and its ratio to the baseline."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            Path(folder, name).write_text(text)
        arms = {name: partial(seconds, command, folder) for name, command in ARMS.items()}
        # The warm-up writes the caches, and loads the files into memory.
        times = take_turns(arms, arguments.rounds, warm_up=1)
    return compare(times, BASE, targets={OURS: {"ratio": "≤ 0.5"}})


if __name__ == "__main__":
    run("From the command to the first all-reduce.", 8, ["hpctrain", "torch"], measure)
