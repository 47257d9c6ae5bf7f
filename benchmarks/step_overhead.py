"""What does hpctrain's loop cost over a loop written by hand?

    python benchmarks/step_overhead.py [--rounds 300] [--steps 20] [--backend NAME] [--save FILE]

A model so small that a step takes about a millisecond, on CPUs, in one process, in two over gloo,
and in two over Horovod, where one is installed. The arms take turns in the same processes, a short
block of steps each, and each block is compared with the block by hand of the same round: what else
the machine does falls on all of them. Besides the time on the clock, for which the targets are,
there is the time on the processor, which hardly knows of other jobs.
"""

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import describe, facts, order, save, summary, table, verdict
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

import hpctrain

LOG_EVERY = 10
BATCH, FEATURES, WIDTH, CLASSES = 32, 32, 128, 10
TARGET_RATIO, TARGET_US = 1.02, 15.0
# What it is called, the ranks, and how they talk.
WORLDS = {
    "one process": (1, "single"),
    "two processes, gloo": (2, "ddp"),
    "two processes, Horovod": (2, "horovod"),
}
Times = dict[str, list[tuple[float, float]]]


@dataclasses.dataclass
class Setup:
    """What every arm begins with: the same work."""

    session: hpctrain.Session
    dataset: TensorDataset
    folder: Path

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and its optimizer; the same weights in every arm."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def shared(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as an expert lets the ranks share them, with the settings of hpctrain."""
        if self.backend == "ddp":
            model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        elif self.backend == "horovod":
            import horovod.torch as hvd

            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return model, optimizer

    @property
    def backend(self) -> str:
        """How the ranks talk."""
        return self.session.backend.name

    def loss_to_log(self, loss: torch.Tensor) -> float:
        """What an expert writes: of rank 0, and with Horovod of all, as in its examples."""
        if self.backend == "horovod":
            import horovod.torch as hvd

            loss = hvd.allreduce(loss.detach(), name="loss")
        return loss.item()


def by_hand(setup: Setup) -> Iterator[None]:
    """The loop that an expert writes, with the log that an expert has."""
    rank, size = setup.session.world.rank, setup.session.world.world_size
    model, optimizer = setup.shared(*setup.parts())
    sampler = RandomSampler(setup.dataset)
    if size > 1:
        sampler = DistributedSampler(setup.dataset, size, rank, drop_last=True)
    batches = BatchSampler(sampler, BATCH, drop_last=True)
    loader = DataLoader(setup.dataset, batch_sampler=batches)
    with open(setup.folder / f"by-hand-{rank}.jsonl", "w", buffering=1) as log:
        for step, (inputs, targets) in enumerate(loader, 1):
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0 and (rank == 0 or setup.backend == "horovod"):
                row = {"step": step, "time": time.time(), "loss": setup.loss_to_log(loss)}
                log.write(json.dumps(row) + "\n")
            yield


def bare(setup: Setup) -> Iterator[None]:
    """By hand over hpctrain's loader, without a log: only the work that no loop can leave out."""
    model, optimizer = setup.shared(*setup.parts())
    for inputs, targets in setup.session.loader(setup.dataset):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def with_hpctrain(setup: Setup) -> Iterator[None]:
    """The loop of hpctrain's examples, with everything on that is on by default."""
    session = setup.session
    model, _ = session.prepare(*setup.parts())
    loader = session.loader(setup.dataset)
    with session.run() as run:
        for _ in run.epochs():
            for inputs, targets in run.batches(loader):
                with session.autocast():
                    loss = cross_entropy(model(inputs), targets)
                session.step(loss)
                run.log(loss=loss)
                yield


BASE = "by hand"
# A new arm is a function that yields after each step, and a line here: its name, the function, and
# whether the targets are its own.
ARMS: dict[str, tuple[Callable[[Setup], Iterator[None]], bool]] = {
    BASE: (by_hand, False),
    "bare, no log": (bare, False),
    "hpctrain": (with_hpctrain, True),
}


def block(loop: Iterator[None], steps: int) -> tuple[float, float]:
    """The microseconds of a step over a block of them: on the clock, and of all processors."""
    cpu, clock = time.process_time(), time.perf_counter()
    for _ in range(steps):
        next(loop)
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    return clock / steps * 1e6, cpu / steps * 1e6


def take_turns(session: hpctrain.Session, rounds: int, steps: int, folder: Path) -> Times:
    """What each arm took, a pair for each round."""
    # One epoch holds all blocks and the one to warm up, so no block has the end of an epoch in it.
    samples = (rounds + 2) * steps * session.batches.global_batch
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(samples, FEATURES, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )
    loops = {name: arm(Setup(session, dataset, folder)) for name, (arm, _) in ARMS.items()}
    times: Times = {name: [] for name in ARMS}
    for loop in loops.values():
        block(loop, steps)  # to warm up
    for number in range(rounds):
        for name in order(list(ARMS), number):
            session.backend.barrier()
            times[name].append(block(loops[name], steps))
    for loop in loops.values():
        loop.close()
    return times


def rank_main(arguments: argparse.Namespace) -> None:
    """One rank; rank 0 writes the times."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        hpctrain.Session(
            run=f"{arguments.rank_of}.run",
            backend=arguments.backend,
            batch_size=BATCH,
            log_every=LOG_EVERY,
            epochs=1,
        ) as session,
    ):
        times = take_turns(session, arguments.rounds, arguments.steps, Path(folder))
        if session.is_main:
            Path(arguments.rank_of).write_text(json.dumps(times))


def start(size: int, backend: str, arguments: argparse.Namespace, folder: str) -> Times:
    """Start the ranks of one world, and read what rank 0 wrote."""
    result = Path(folder) / f"{backend}.json"
    launcher = ["-m", "hpctrain", "run", "--nproc-per-node", str(size)] if size > 1 else []
    command = [
        sys.executable, *launcher, __file__, "--rank-of", str(result), "--backend", backend,
        "--rounds", str(arguments.rounds), "--steps", str(arguments.steps),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{size} ranks ended with exit code {done.returncode}")
    return json.loads(result.read_text())


def evaluate(times: Times) -> dict[str, dict[str, Any]]:
    """Per arm the time of a step, and block by block what it is to the loop by hand."""
    results = {}
    base_clock, base_cpu = zip(*times[BASE], strict=True)
    for name, (_, has_target) in ARMS.items():
        clock, cpu = zip(*times[name], strict=True)
        result = {
            "us": summary(clock),
            "ratio": summary([a / b for a, b in zip(clock, base_clock, strict=True)]),
            "more_us": summary([a - b for a, b in zip(clock, base_clock, strict=True)]),
            "cpu_us": summary(cpu),
            "more_cpu_us": summary([a - b for a, b in zip(cpu, base_cpu, strict=True)]),
        }
        if has_target:
            result["targets"] = {
                key: {"limit": limit, "verdict": verdict(result[key], limit)}
                for key, limit in (("ratio", TARGET_RATIO), ("more_us", TARGET_US))
            }
        results[name] = result
    return results


def show(world: str, results: dict[str, dict[str, Any]]) -> str:
    """The results of one world, for people."""
    rows = [(world, "µs per step", "× by hand", "µs more", "µs more, processor")]
    said = []
    for name, result in results.items():
        cells = (
            describe(result["ratio"], ".3f"),
            describe(result["more_us"]),
            describe(result["more_cpu_us"]),
        )
        rows.append((name, describe(result["us"]), *(cells if name != BASE else ("", "", ""))))
        if "targets" in result:
            ratio, more = result["targets"]["ratio"], result["targets"]["more_us"]
            said.append(f"{name}: at most × {ratio['limit']:g}: {ratio['verdict']}")
            said.append(f"{name}: at most {more['limit']:g} µs more: {more['verdict']}")
    return "\n".join([table(rows), *said, ""])


def main() -> None:
    """Measure every world, print, save."""
    parser = argparse.ArgumentParser(description="The cost of a step over a loop by hand.")
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="default: 300")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of a block (20)")
    parser.add_argument("--save", metavar="FILE", help="the results as JSON")
    parser.add_argument("--rank-of", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--backend", choices=[backend for _, backend in WORLDS.values()], help="only this one"
    )
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments)
        return
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    if arguments.steps < 1 or arguments.steps % LOG_EVERY:
        parser.error(f"--steps: whole multiples of {LOG_EVERY}, so that all blocks log alike")
    record = facts(["hpctrain", "torch", "horovod"])
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for world, (size, backend) in WORLDS.items():
            if arguments.backend not in (None, backend):
                continue
            if backend == "horovod" and importlib.util.find_spec("horovod") is None:
                print(f"{world}: left out, as there is none: hpctrain horovod build\n")
                continue
            results[world] = evaluate(start(size, backend, arguments, folder))
            print(show(world, results[world]), flush=True)
    print("Medians over blocks, with their 95 % intervals; ratios and differences block by block.")
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "batch_size": BATCH}
    save(arguments.save, {"benchmark": "step_overhead", **record, **settings, "results": results})


if __name__ == "__main__":
    main()
