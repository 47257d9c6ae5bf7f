"""Time from the command to the first all-reduce over gloo, and to a first step, against torchrun.

    python benchmarks/first_allreduce.py [--ranks 2 8] [--rounds 8] [--save FILE]

The clock starts before the command and stops when all ranks have the sum. The end of the command is
not counted. The arms take turns. Each is compared with the baseline of its own round: torchrun with
a script that does not use hpctrain. Most of the time is spent on imports, so other load on the
machine slows all arms.

The first steps are taken by four ranks. One is that of a package without torch in its first file: a
model in DistributedDataParallel, a backward pass, and a step of SGD, for which torch imports its
compiler. The other is that of examples/mnist.py, until its line in the log.

Two counts need no quiet machine, and are taken once: the calls to the file system of the whole
start (`strace -f -e trace=file`, where it is installed), and the private memory of all ranks after
`import torch` (Private_Dirty of /proc/PID/smaps_rollup).
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness import ENVIRONMENT, Results, compare, judge, run

from hpctrain.tools.bench.measure import take_turns

TIMEOUT = 240.0
READY = "rank is ready"
BASELINE = f"""\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == dist.get_world_size()
print("{READY}", flush=True)
dist.destroy_process_group()
"""
WITH_SESSION = f"""\
import torch

import hpctrain

with hpctrain.Session() as session:
    tensor = session.backend.sum(torch.ones(1))
    assert tensor.item() == session.world.world_size
    print("{READY}", flush=True)
"""
MEMORY = """\
import torch

with open("/proc/self/smaps_rollup") as file:
    print(next(line for line in file if line.startswith("Private_Dirty")), flush=True)
"""
STEP = f"""\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    print("{READY}", flush=True)
    dist.destroy_process_group()
"""
SCRIPTS = {"baseline.py": BASELINE, "with_session.py": WITH_SESSION, "memory.py": MEMORY}
SCRIPTS |= {"lab/__init__.py": "", "lab/work.py": STEP}
SCRIPTS |= {"lab/__main__.py": "from .work import main\n\nmain()\n"}
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node")
RUN = (sys.executable, "-m", "hpctrain", "run", "--nproc-per-node")
FRESH = (*RUN[:-1], "--fresh-interpreters", RUN[-1])
BASE, OURS = "torchrun, baseline", "hpctrain run, baseline"
# To add an arm, add a line: its name, its launcher, and its script.
ARMS = {
    BASE: (TORCHRUN, "baseline.py"),
    OURS: (RUN, "baseline.py"),
    "torchrun, Session": (TORCHRUN, "with_session.py"),
    "hpctrain run, Session": (RUN, "with_session.py"),
    "hpctrain run --fresh-interpreters, baseline": (FRESH, "baseline.py"),
}
RANKS_OF_STEPS = 4
STEPS = {
    "torchrun": (*TORCHRUN, str(RANKS_OF_STEPS)),
    "hpctrain run": (*RUN, str(RANKS_OF_STEPS)),
}
MNIST = Path(__file__).resolve().parents[1] / "examples" / "mnist.py"
# Script or module with its arguments, the text at its first step, and how many ranks print it.
FIRST_STEPS = {
    "a package": (["-m", "lab"], READY, RANKS_OF_STEPS),
    "mnist.py": (
        [str(MNIST), "--data", "digits", "--global-batch", "64", "--max-steps", "1"],
        "step 1/1 ",
        1,
    ),
}
# Of OURS, by ranks.
TARGETS = {2: {"ratio": "≤ 0.55"}, 8: {"ratio": "≤ 0.3"}}
COUNTED = {8: {"calls": "≤ 0.2", "private_mb": "≤ 0.25"}}


def seconds(command: Sequence[str], times: int, folder: str, text: str = READY) -> dict[str, float]:
    """Return the seconds from before the start until a text was printed so many times.

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
            if text in line and output.count(text) == times:
                took = time.perf_counter() - start
        alarm.cancel()
    if process.returncode or not took:
        raise SystemExit(f"{output}\n{command} ended with {process.returncode}")
    return {"s": took}


def counts(command: Sequence[str], folder: str) -> dict[str, float]:
    """Return the calls to the file system of a start, and the private memory of its ranks."""
    found: dict[str, float] = {}
    if shutil.which("strace"):
        log = Path(folder, "strace")
        trace = ["strace", "-f", "-qq", "-e", "trace=file", "-o", str(log), *command]
        subprocess.run(trace, env=ENVIRONMENT, cwd=folder, capture_output=True, check=True)
        found["calls"] = sum(1 for _ in log.open(errors="replace"))
    done = subprocess.run(
        [*command[:-1], "memory.py"],
        env=ENVIRONMENT,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines() if "Private_Dirty" in line]
    found["private_mb"] = sum(int(line[-2]) for line in lines) / 1024
    return found


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's time, its ratio to the baseline, and its counts, by ranks."""
    results: Results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_text(text)
        for what, (words, text, printed) in FIRST_STEPS.items():
            steps = {
                name: partial(seconds, [*launcher, *words], printed, folder, text)
                for name, launcher in STEPS.items()
            }
            times = take_turns(steps, arguments.rounds, warm_up=1)
            results[f"{RANKS_OF_STEPS} ranks, first step of {what}"] = compare(times, "torchrun")
        for ranks in arguments.ranks:
            commands = {
                name: [*launcher, str(ranks), script] for name, (launcher, script) in ARMS.items()
            }
            arms = {
                name: partial(seconds, command, ranks, folder) for name, command in commands.items()
            }
            # The warm-up writes the caches, and loads the files into memory.
            times = take_turns(arms, arguments.rounds, warm_up=1)
            own = compare(times, BASE, targets={OURS: TARGETS.get(ranks, {})})
            counted = {name: counts(commands[name], folder) for name in (BASE, OURS)}
            for name, figures in counted.items():
                own[name] |= figures
            for key, limit in COUNTED.get(ranks, {}).items():
                if key in counted[BASE]:
                    ratio = counted[OURS][key] / counted[BASE][key]
                    own[OURS][f"{key}_ratio"] = {"median": ratio, "low": ratio, "high": ratio}
                    judge(own[OURS], f"{key}_ratio", limit)
            results[f"{ranks} ranks"] = own
    return results


if __name__ == "__main__":
    run(
        "From the command to the first all-reduce.",
        8,
        ["hpctrain", "torch"],
        measure,
        {"--ranks": {"type": int, "nargs": "+", "default": [2, 8], "help": "2 8"}},
    )
