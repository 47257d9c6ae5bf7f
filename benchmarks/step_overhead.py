"""Cost of a training step over the baseline, for hpctrain and for other libraries.

    python benchmarks/step_overhead.py [--rounds 300] [--steps 20] [--backend NAME] [--arms NAME...]

The model is so small that a step takes about a millisecond. It runs on CPUs in one process, in two
over gloo, and in two over Horovod, if Horovod is installed. The arms (see loops.py, also for what
each logs) take turns in the same processes, a short block of steps each. Each block is compared
with the baseline's block of the same round, so other load on the machine affects both. Two arms
are the same baseline: a difference that is not larger than theirs cannot be seen.

Of one process, the targets are for elapsed time. Two ranks on two cores wait for each other and for
the threads of gloo, so their elapsed times differ by several percent between equal arms. Their
target is for the CPU time of the thread that trains: such waits use none of it, and what a library
adds to a step is computed there, between two exchanges. "× base, by CPU time" is the elapsed time
of the base plus the CPU time that is added, over the elapsed time of the base.
"""

import argparse
import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Results, clocked, compare, judge, restart, run
from loops import ARMS, BASE, BATCH, LOG_EVERY, OURS, Setup, data, missing

import hpctrain
from hpctrain.tools.bench.measure import take_turns

# Name: number of ranks, backend.
WORLDS = {
    "one process": (1, "single"),
    "two processes, gloo": (2, "ddp"),
    "two processes, Horovod": (2, "horovod"),
}
BY = ("ratio", "more_us", "more_cpu_us", "ratio_by_cpu")
TARGETS = {1: {"ratio": "≤ 1.02", "more_us": "≤ 15"}, 2: {"ratio_by_cpu": "≤ 1.02"}}  # by ranks


def chosen(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the arms to measure; one of them is the baseline."""
    return [name for name in ARMS if name == BASE or name in (arguments.arms or ARMS)]


def rank(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]] | None:
    """Run one rank; return each arm's elapsed time and CPU time per step, by round."""
    torch.set_num_threads(1)
    rounds, steps = arguments.rounds, arguments.steps
    with (
        tempfile.TemporaryDirectory() as folder,
        hpctrain.Session(
            run_dir=f"{arguments.json}.run",
            backend=arguments.backend,
            batch_size=BATCH,
            log_every=LOG_EVERY,
            epochs=1,
        ) as session,
    ):
        # One epoch holds all blocks and the warm-up, so no block contains the end of an epoch.
        dataset = data((rounds + 2) * steps * session.batches.global_batch)
        setup = Setup(session, dataset, Path(folder), steps)
        left_out = missing(arguments.backend)
        wanted = [name for name in chosen(arguments) if name not in left_out]
        loops = {name: ARMS[name](setup) for name in wanted}
        arms = {
            name: partial(clocked, session, partial(next, loop), steps, "us")
            for name, loop in loops.items()
        }
        times = take_turns(arms, rounds, warm_up=1)
        for loop in loops.values():
            loop.close()
        return times if session.is_main else None


def measure(arguments: argparse.Namespace) -> Results:
    """Return the results of each world."""
    if arguments.steps < 1 or arguments.steps % LOG_EVERY:
        raise SystemExit(f"--steps: multiples of {LOG_EVERY}, so that all blocks log alike")
    results: Results = {}
    for world, (size, backend) in WORLDS.items():
        if arguments.backend not in (None, backend):
            continue
        if backend == "horovod" and importlib.util.find_spec("horovod") is None:
            print(f"{world}: left out, because it is not installed: hpctrain horovod build")
            continue
        for name, reason in missing(backend).items():
            if name in chosen(arguments):
                print(f"{world}, {name}: left out: {reason}")
        times = restart(arguments, size, backend=backend)
        results[world] = arms = compare(times, BASE, BY)
        for key, limit in TARGETS[size].items() if OURS in arms else ():
            judge(arms[OURS], key, limit)
    return results


OPTIONS: dict[str, dict[str, Any]] = {
    "--arms": {
        "nargs": "+",
        "metavar": "NAME",
        "choices": ARMS,
        "help": "arms to measure beside the baseline (all): " + ", ".join(ARMS),
    },
    "--steps": {"type": int, "default": 20, "metavar": "N", "help": "steps per block (20)"},
    "--backend": {
        "choices": [backend for _, backend in WORLDS.values()],
        "help": "measure only this backend",
    },
}

if __name__ == "__main__":
    peers = ["accelerate", "lightning-fabric", "pytorch-ignite"]
    packages = ["hpctrain", "torch", "horovod", *peers]
    run("The cost of a step over the baseline.", 300, packages, measure, OPTIONS, rank)
