"""Cost of comparing weights and optimizer states between the ranks.

    python benchmarks/replica_check.py [--rounds 20] [--steps 60] [--save FILE]

Two ranks train 5 million weights by Adam over gloo, on CPUs, so that a check reads 63 MB. The arms:

- no check, and the same once more: a smaller difference than between these cannot be seen
- by default: at the distance at which its measured cost is half a percent of the steps
- in each step: a digest in each step, read one step later
- waiting in each step: all sums of tensors are gathered in each step, as before a save

The arms take turns in the same processes, a block of steps each, which has several checks by
default. Each is compared with the arm without checks of its round. The elapsed times of two ranks
on two cores differ by percents between equal arms, so the target is for the share of the elapsed
time that is spent in the calls of the check: the digest is computed there, and its sum is read
there.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from harness import Results, clocked, compare, restart, run
from torch import nn

import hpctrain
from hpctrain.process.phases import COMPUTING, PHASES
from hpctrain.tools.bench.measure import take_turns
from hpctrain.training.replica_check import ReplicaCheck

BATCH = 64
BASE, DEFAULT, EACH, WAITING = "no check", "by default", "in each step", "waiting in each step"
EVERY = {BASE: 0, f"{BASE}, again": 0, DEFAULT: None, EACH: 1, WAITING: 0}
BY = ("ratio", "more_ms", "more_cpu_ms", "ratio_by_cpu")
TARGETS = {DEFAULT: {"check_share": "≤ 0.005"}}


class Arm:
    """Training steps with the checks of one arm.

    Args:
        session: the session.
        name: name of the arm.
        train: takes a training step.
    """

    def __init__(self, session: hpctrain.Session, name: str, train: Callable[[], None]) -> None:
        context = replace(
            session._context, options=replace(session.options, check_replicas_every=EVERY[name])
        )
        self._backend, self._train, self._waits = session.backend, train, name == WAITING
        self._seconds = [0.0] * (1 + max(PHASES))
        self._check = ReplicaCheck(context, self._seconds, 0, resumed=True)
        self._steps, self._pending = 0, None
        self._looked = 0.0  # seconds in the calls of the check

    def step(self) -> None:
        """Take a training step, and check."""
        begun = time.perf_counter()
        self._train()
        trained = time.perf_counter()
        self._look()
        end = time.perf_counter()
        self._looked += end - trained
        self._seconds[COMPUTING] += end - begun

    def block(self, session: hpctrain.Session, steps: int) -> dict[str, float]:
        """Return the times of a step in a block of steps, and the share of the check."""
        before = self._looked
        times = clocked(session, self.step, steps)
        return {**times, "check_share": (self._looked - before) / (times["ms"] / 1e3 * steps)}

    def _look(self) -> None:
        """Check as a run does: begin a sum where one is due, and read it one step later."""
        self._steps += 1
        if self._waits:
            self._check.compare(self._steps)
        if self._pending is not None:
            names, work = self._pending
            self._check.judge(dict(zip(names, work.values(), strict=True)))
        values = self._check.values(self._steps)
        work = self._backend.sum_async(list(values.values())) if values else None
        self._pending = (list(values), work) if work else None


def rank(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]] | None:
    """Run one rank; return each arm's elapsed time and CPU time per step, by round."""
    torch.set_num_threads(1)
    with hpctrain.Session(backend="ddp", batch_size=BATCH) as session:
        model = nn.Sequential(
            nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )
        model, _ = session.prepare(model, torch.optim.Adam(model.parameters(), 1e-4))
        inputs, targets = torch.randn(BATCH, 512), torch.randint(0, 10, (BATCH,))

        def train() -> None:
            session.step(nn.functional.cross_entropy(model(inputs), targets))

        blocks = {
            name: partial(Arm(session, name, train).block, session, arguments.steps)
            for name in EVERY
        }
        # The warm-up finds the distance of the default.
        times = take_turns(blocks, arguments.rounds, warm_up=2)
        return times if session.is_main else None


def measure(arguments: argparse.Namespace) -> Results:
    """Return the times of each arm, and the ratio to the steps without a check."""
    return dict(compare(restart(arguments, ranks=2), BASE, BY, TARGETS))


if __name__ == "__main__":
    options = {"--steps": {"type": int, "default": 60, "metavar": "N", "help": "of a block"}}
    run("The cost of comparing the ranks.", 20, ["hpctrain", "torch"], measure, options, rank)
