"""Cost of an exact evaluation over one that pads, and the error of the padded one.

    python benchmarks/evaluation.py [--rounds 40] [--save FILE]

Two ranks run over gloo, on CPUs. The model is small, three convolutions over images of 32 × 32, so
that the cost of counting is visible. The arms:

- padded: torch's DistributedSampler, which repeats samples until all ranks have equally many;
  top-1, top-5 and the loss are summed on each rank and once over both, as in PyTorch's ImageNet
  example
- exact: `session.loader(train=False)` and `session.classification`, which also counts per class and
  fills the confusion matrix
- accelerate: `gather_for_metrics`, which gathers all outputs of each batch, and drops repeated
  samples

The arms take turns in the same processes, a whole evaluation each. Each is compared with the padded
arm of its round. As in most real data sets, the samples cannot be divided evenly over the ranks.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import Results, clocked, compare, restart, run
from loops import launched, missing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpctrain
from hpctrain.tools.bench.measure import take_turns

SAMPLES, BATCH = 1_999, 64
SIZE, CLASSES = 32, 100
BASE, EXACT, ACCELERATE = "padded", "exact", "accelerate"
Figures = dict[str, float]
Evaluation = Callable[[], Figures]


def samples() -> tuple[TensorDataset, nn.Module]:
    """Return a data set and a model that is sometimes right, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 36, CLASSES),
    ).eval()  # fmt: skip
    with torch.no_grad():
        outputs = model(inputs)
    noise = torch.randn(outputs.shape, generator=generator) * outputs.std()
    return TensorDataset(inputs, (outputs + noise).argmax(1)), model


def counted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return sums in float64: top-1 hits, top-5 hits, loss and samples."""
    hits = outputs.topk(5).indices == targets[:, None]
    loss = cross_entropy(outputs, targets, reduction="sum")
    return torch.stack([hits[:, 0].sum(), hits.sum(), loss, loss.new_tensor(len(targets))]).double()


def figures(sums: Tensor) -> Figures:
    """Return the means per sample from the sums of `counted`, and the number of samples."""
    top1, top5, loss, count = sums.tolist()
    return {"top1": top1 / count, "top5": top5 / count, "loss": loss / count, "samples": count}


def padded(session: hpctrain.Session, dataset: TensorDataset, model: nn.Module) -> Evaluation:
    """Return the usual evaluation: samples repeat until all ranks have equally many."""
    world = session.world
    sampler: Any = DistributedSampler(dataset, world.world_size, world.rank, shuffle=False)
    loader = DataLoader(dataset, BATCH, sampler=sampler)

    def evaluation() -> Figures:
        sums = torch.zeros(4, dtype=torch.float64)
        for inputs, targets in loader:
            sums += counted(model(inputs), targets)
        dist.all_reduce(sums)
        return figures(sums)

    return evaluation


def exact(session: hpctrain.Session, dataset: TensorDataset, model: nn.Module) -> Evaluation:
    """Return hpctrain's evaluation, which counts each sample once."""
    loader = session.loader(dataset, train=False, batch_size=BATCH)

    def evaluation() -> Figures:
        scores = session.classification(CLASSES)
        for inputs, targets in loader:
            scores.update(model(inputs), targets)
        found = scores.compute()
        return {
            "top1": found.top1, "top5": found.top5, "loss": found.loss, "samples": found.count
        }  # fmt: skip

    return evaluation


def with_accelerate(
    session: hpctrain.Session, dataset: TensorDataset, model: nn.Module
) -> Evaluation:
    """Return Accelerate's evaluation, as in its guide to metrics."""
    from accelerate import Accelerator

    with launched(session):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(dataset, BATCH))

    def evaluation() -> Figures:
        sums = torch.zeros(4, dtype=torch.float64)
        for inputs, targets in loader:
            sums += counted(*accelerator.gather_for_metrics((model(inputs), targets)))
        return figures(sums)

    return evaluation


ARMS = {BASE: padded, EXACT: exact, ACCELERATE: with_accelerate}


def rank(arguments: argparse.Namespace) -> tuple[Any, Any] | None:
    """Run one rank; return the times of each arm at rank 0, and the metrics that it reports."""
    torch.set_num_threads(1)
    with hpctrain.Session(backend="ddp", batch_size=BATCH) as session, torch.no_grad():
        dataset, model = samples()
        left_out = missing("ddp")
        arms = {
            name: make(session, dataset, model)
            for name, make in ARMS.items()
            if name not in left_out
        }
        reported = {name: arm() for name, arm in arms.items()}  # also warms up
        reported["one process"] = figures(counted(model(dataset.tensors[0]), dataset.tensors[1]))
        timers = {name: partial(clocked, session, arm) for name, arm in arms.items()}
        times = take_turns(timers, arguments.rounds)
        return (times, reported) if session.is_main else None


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's time, ratio to the padded arm, and reported metrics."""
    if reason := missing("ddp").get(ACCELERATE):
        print(f"{ACCELERATE}: left out: {reason}")
    times, reported = restart(arguments, ranks=2)
    results = compare(times, BASE, targets={EXACT: {"ratio": "≤ 1.01"}})
    return {name: results.get(name, {}) | metrics for name, metrics in reported.items()}


if __name__ == "__main__":
    packages = ["hpctrain", "torch", "accelerate"]
    run("An exact evaluation against one that pads.", 40, packages, measure, rank=rank)
