"""Cost of comparing weights and optimizer states between the ranks.

    python benchmarks/replica_check.py [--rounds 30] [--steps 20] [--save FILE]

Two ranks train 5 million weights by Adam over gloo, on CPUs, so that a check reads 63 MB. The arms:

- no check
- by default: at the distance at which its measured cost is half a percent
- in each step: a digest in each step, read one step later
- waiting in each step: all sums of tensors are gathered in each step, as before a save

The arms take turns in the same processes, a short block of steps each. Each is compared with the
arm without checks of its round.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from harness import Results, compare, run, start
from torch import nn

import hpctrain
from hpctrain.process.phases import COMPUTING, PHASES
from hpctrain.tools.bench.measure import take_turns
from hpctrain.training.replica_check import ReplicaCheck

BATCH = 64
BASE, DEFAULT, EACH, WAITING = "no check", "by default", "in each step", "waiting in each step"
EVERY = {BASE: 0, DEFAULT: None, EACH: 1, WAITING: 0}
TARGETS = {DEFAULT: {"ratio": "≤ 1.01"}}


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
        self._step, self._pending = 0, None

    def block(self, steps: int) -> tuple[float, float]:
        """Return milliseconds per step over a block: elapsed time, and CPU time of all threads."""
        self._backend.barrier()
        cpu, clock = time.process_time(), time.perf_counter()
        for _ in range(steps):
            begun = time.perf_counter()
            self._train()
            self._look()
            self._seconds[COMPUTING] += time.perf_counter() - begun
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        return clock / steps * 1e3, cpu / steps * 1e3

    def _look(self) -> None:
        """Check as a run does: begin a sum where one is due, and read it one step later."""
        self._step += 1
        if self._waits:
            self._check.compare(self._step)
        if self._pending is not None:
            names, work = self._pending
            self._check.judge(dict(zip(names, work.values(), strict=True)))
        values = self._check.values(self._step)
        work = self._backend.sum_async(list(values.values())) if values else None
        self._pending = (list(values), work) if work else None


def rank(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]] | None:
    """Run one rank; return each arm's elapsed time and CPU time per step, a pair per round."""
    torch.set_num_threads(1)
    with hpctrain.Session(backend="ddp", batch_size=BATCH) as session:
        model = nn.Sequential(
            nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )
        model, _ = session.prepare(model, torch.optim.Adam(model.parameters(), 1e-4))
        inputs, targets = torch.randn(BATCH, 512), torch.randint(0, 10, (BATCH,))

        def train() -> None:
            session.step(nn.functional.cross_entropy(model(inputs), targets))

        arms = {name: Arm(session, name, train) for name in EVERY}
        blocks = {name: lambda arm=arm: arm.block(arguments.steps) for name, arm in arms.items()}
        take_turns(blocks, 2)  # warms up, and finds the distance of the default
        times = take_turns(blocks, arguments.rounds)
        return times if session.is_main else None


def measure(arguments: argparse.Namespace) -> Results:
    """Return the times of each arm, and the ratio to the steps without a check."""
    options = ("--rounds", str(arguments.rounds), "--steps", str(arguments.steps))
    times = start(__file__, *options, ranks=2)
    series = {
        name: dict(zip(("ms", "cpu_ms"), zip(*own, strict=True), strict=True))
        for name, own in times.items()
    }
    return dict(compare(series, BASE, ("ratio", "more_ms"), TARGETS))


if __name__ == "__main__":
    options = {"--steps": {"type": int, "default": 20, "metavar": "N", "help": "of a block"}}
    run("The cost of comparing the ranks.", 30, ["hpctrain", "torch"], measure, options, rank)
