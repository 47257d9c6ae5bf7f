"""Cost of copies of the state in memory: the time of a step with --memory-checkpoint-every.

    python benchmarks/memory_checkpoint.py [--rounds 20] [--every 10] [--megabytes 100]
        [--save FILE]

Two ranks over gloo on one host train layers whose weights and momenta have this size together. In
one arm the first rank keeps a copy in /dev/shm every 10 steps, in the other one it does not. They
take turns in the same run, a block of so many steps each. The copy is made in the middle of its
block, so the block has its write, too.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from harness import Results, clocked, compare, restart, run
from torch import nn

import hpctrain
from hpctrain.cluster import env_vars
from hpctrain.process import shared_memory
from hpctrain.tools.bench.measure import take_turns
from hpctrain.training.training_run import Run

BASE, OURS = "no copies", "copies in memory"
WIDTH = 1024


def train(session: hpctrain.Session, layers: int) -> Iterator[Run]:
    """Yield the run after each step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    batch = torch.randn(session.batches.batch_size, WIDTH)
    with session.run() as training:
        for _ in training.steps(1 << 30):
            session.step(model(batch).square().mean())
            yield training


def block(
    session: hpctrain.Session, loop: Iterator[Run], steps: int, every: int
) -> dict[str, float]:
    """Return the milliseconds per step over a block.

    Args:
        session, loop: of the training.
        steps: number of steps of the block.
        every: steps between two copies; 0 for none.
    """
    checkpoints = next(loop)._checkpoints
    assert checkpoints is not None
    checkpoints.memory_every = every
    return clocked(session, partial(next, loop), steps - 1)


def rank(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]] | None:
    """Run one rank; return the milliseconds per step of each arm, by round."""
    torch.set_num_threads(1)
    every = arguments.every
    folder = shared_memory.folder_of(os.environ[env_vars.START].partition("/")[0])
    os.environ[env_vars.MEMORY] = str(folder)  # as in a job
    with hpctrain.Session(
        run_dir=f"{arguments.json}.run", batch_size=32, memory_checkpoint_every=every
    ) as session:
        loop = train(session, round(arguments.megabytes * 1e6 / 2 / 4 / WIDTH**2))
        for _ in range(every // 2):
            next(loop)  # the number of the step is then that of the middle of a block
        arms = {
            name: partial(block, session, loop, every, copies)
            for name, copies in ((BASE, 0), (OURS, every))
        }
        # The warm-up allocates memory.
        times = take_turns(arms, arguments.rounds, warm_up=1)
        session.backend.barrier()
        loop.close()
    if session.is_main:
        shared_memory.remove(folder)
        return times
    return None


def measure(arguments: argparse.Namespace) -> Results:
    """Return the results of a state of this size."""
    times = restart(arguments, ranks=2)
    kind = f"{arguments.megabytes} MB, every {arguments.every} steps"
    return {kind: compare(times, BASE, ("ratio", "more_ms"))}


OPTIONS: dict[str, dict[str, Any]] = {
    "--every": {"type": int, "default": 10, "metavar": "STEPS", "help": "between copies (10)"},
    "--megabytes": {"type": int, "default": 100, "help": "size of the state (100)"},
}

if __name__ == "__main__":
    packages = ["hpctrain", "torch"]
    run("The cost of copies of the state in memory.", 20, packages, measure, OPTIONS, rank)
