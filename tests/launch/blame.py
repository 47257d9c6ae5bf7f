"""Starts with one rank that fails in a random way, and the rank that `hpctrain run` names.

python tests/launch/blame.py [--starts 200] [--seed 0] [--backend ddp] [--at-once 1]
python tests/launch/blame.py --faults [--least 3] [--rounds 1]
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# How a rank fails: in Python, in C, by a signal, by an exit, or by a sum on this rank alone.
KINDS = ("exception", "kill", "abort", "segfault", "exit", "missing", "mismatch")
# Faults of NVIDIA's resiliency extension that need no GPU, as it makes them: a thread or another
# process makes them a moment after the rank has reached a place.
FAULTS = (
    *("WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC", "OS_ABORT", "LOCK_GIL"),
    *("SEGFAULT", "SIGINT", "SIGKILL", "SIGTERM", "SIGSTOP"),
)
PLACES = ("forward", "collective", "loading")
RANKS, STEPS = 3, 6
FAULT_AT = 12  # step; the time-outs of a phase are learnt after it was seen some times
TIMEOUT = 180  # seconds until a start counts as a hang
FAILED_FIRST = r"^hpctrain: rank (\d+) failed first"

SCRIPT = """
import os, signal, sys
import torch
import hpctrain

kind, victim, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = hpctrain.detect().rank

def fail(now):
    if rank != victim or now != moment:
        return
    if kind == "exception":
        raise ValueError("the error of the victim")
    if kind == "exit":
        sys.exit(3)
    if kind == "missing":
        import no_such_package
    if kind == "mismatch":
        return session.sum(1)
    sent = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "segfault": signal.SIGSEGV}[kind]
    os.kill(os.getpid(), sent)

fail("before")
with hpctrain.Session(batch_size=4, backend=os.environ["BLAMED_BACKEND"]) as session:
    fail("open")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with session.run() as run:
        fail("run")
        for _ in run.epochs(1):
            for points in run.batches([torch.full((4, 64), float(rank))] * 6):
                fail(f"step {run.step}")
                session.step(model(points).mean())
                fail(f"after {run.step}")
        fail("sum")
        session.sum(1)
    fail("end")
"""
MOMENTS = (
    *("before", "open", "run", "sum", "end"),
    *(f"step {number}" for number in range(STEPS)),
    *(f"after {number}" for number in range(1, STEPS + 1)),
)


def start(kind, victim, moment, backend="ddp"):
    """Run one start; return the rank that was named, and standard error."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        output = train(folder, backend, script, kind, victim, moment)
    patterns = [FAILED_FIRST]
    if kind == "mismatch":  # all ranks fail; the message names the one that differs
        patterns = [r"(?:calls: |places: |; )rank (\d+): ", *patterns]
    return named_by(patterns, output), output


def train(folder, backend, script, *arguments, **more):
    """Run a script on three ranks until it fails; return standard error."""
    command = [sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", str(RANKS)]
    process = subprocess.Popen(
        [*command, str(script), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "BLAMED_BACKEND": backend, "OMP_NUM_THREADS": "1", **more},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with process:
        hang = threading.Timer(TIMEOUT, process.kill)  # then the ranks end, too
        hang.start()
        _, output = process.communicate()
        hang.cancel()
        hang.join()
    return output


def named_by(patterns, output):
    """Return the rank that the first pattern found in the output names, or None."""
    for pattern in patterns:
        if named := re.findall(pattern, output, re.MULTILINE):
            return int(named[-1])
    return None


def start_faulty(fault, victim, place, backend="ddp", least=3):
    """Run one start with a fault of `FAULTS`.

    Args:
        fault, victim, place, backend: fault, the rank that gets it, where, and the backend.
        least: shortest learnt time-out in seconds.

    Returns:
        the rank that was named or None, seconds from the fault to the end, standard error
    """
    with tempfile.TemporaryDirectory() as folder:
        script, more = Path(__file__).with_name("faulty.py"), {"HPCTRAIN_LEAST_TIMEOUT": str(least)}
        output = train(folder, backend, script, fault, victim, place, FAULT_AT, **more)
        seconds = time.time() - float((Path(folder) / "fault").read_text())
    if "ranks are silent for" in output:
        return None, seconds, output  # the stacks show it
    return named_by([FAILED_FIRST, r"stopped by SIG\w+ \(rank (\d+)\)"], output), seconds, output


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="ddp")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--faults", nargs="*", choices=FAULTS)
    parser.add_argument("--least", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    return draw_failures(options) if options.faults is None else try_faults(options)


def draw_failures(options):
    """Run starts with random failures; return whether too many ranks were not named."""
    draw, wrong, kinds = random.Random(options.seed), 0, Counter()
    drawn = [
        (draw.choice(KINDS), draw.randrange(RANKS), draw.choice(MOMENTS))
        for _ in range(options.starts)
    ]
    # A sum needs an open session.
    drawn = [(*one[:2], "open") if one[::2] == ("mismatch", "before") else one for one in drawn]
    with ThreadPoolExecutor(options.at_once) as pool:
        results = pool.map(lambda one: start(*one, options.backend), drawn)
        for (kind, victim, moment), (named, output) in zip(drawn, results, strict=True):
            kinds[kind] += 1
            if named != victim:
                wrong += 1
                print(f"{kind} of rank {victim}, {moment}: named {named}\n{output}", flush=True)
    print(f"{wrong} of {options.starts} wrong; {dict(sorted(kinds.items()))}")
    return wrong > options.starts / 200


def try_faults(options):
    """Run each fault in each place; print how often the right rank was named, and the seconds."""
    cells = [(fault, place) for fault in options.faults or FAULTS for place in PLACES]
    drawn = [
        (fault, (number + turn) % RANKS, place)
        for turn in range(options.rounds)
        for number, (fault, place) in enumerate(cells)
    ]
    counts, longest = Counter(), Counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        results = pool.map(lambda one: start_faulty(*one, options.backend, options.least), drawn)
        for (fault, victim, place), (named, seconds, output) in zip(drawn, results, strict=True):
            kind = "right" if named == victim else "unknown" if named is None else "wrong"
            counts[fault, place, kind] += 1
            longest[fault, place] = max(longest[fault, place], seconds)
            if kind != "right":
                print(f"{fault} of rank {victim}, {place}: named {named}\n{output}", flush=True)
    kinds = ("right", "wrong", "unknown")
    print("fault, place: right / wrong / not known, seconds until the end")
    for fault, place in cells:
        numbers = " / ".join(str(counts[fault, place, kind]) for kind in kinds)
        print(f"{fault}, {place}: {numbers}, {longest[fault, place]:.1f}")
    right, wrong = (sum(counts[(*cell, kind)] for cell in cells) for kind in kinds[:2])
    print(f"{right} of {len(drawn)} right, {wrong} wrong")
    return right < 0.95 * len(drawn) or wrong > 0.01 * len(drawn)


if __name__ == "__main__":
    sys.exit(main())
