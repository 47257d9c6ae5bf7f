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
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops import launched
from measure import add_save, describe, facts, order, outcome, save, summary, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpctrain

SAMPLES, BATCH = 1_999, 64
SIZE, CLASSES = 32, 100
TARGET = 1.02
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


def rank_main(arguments: argparse.Namespace) -> None:
    """Run one rank; rank 0 writes the times of each arm, and the metrics that it reports."""
    torch.set_num_threads(1)
    with hpctrain.Session(backend="ddp", batch_size=BATCH) as session:
        dataset, model = samples()
        names = [name for name in ARMS if name != ACCELERATE or _has_accelerate()]
        with torch.no_grad():
            arms = {name: ARMS[name](session, dataset, model) for name in names}
            reported = {name: arm() for name, arm in arms.items()}  # also warms up
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for number in range(arguments.rounds):
                for name in order(names, number):
                    session.backend.barrier()
                    cpu, clock = time.process_time(), time.perf_counter()
                    arms[name]()
                    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
                    times[name].append((clock * 1e3, cpu * 1e3))
            reported["one process"] = figures(
                counted(model(dataset.tensors[0]), dataset.tensors[1])
            )
        if session.is_main:
            Path(arguments.rank_of).write_text(json.dumps([times, reported]))


def _has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


def measure(rounds: int) -> dict[str, dict[str, Any]]:
    """Start the ranks; return each arm's time, ratio to the padded arm, and reported metrics."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "times.json")
        command = [
            sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", "2", __file__,
            "--rank-of", str(result), "--rounds", str(rounds),
        ]  # fmt: skip
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\ntwo ranks ended with exit code {done.returncode}")
        times, reported = json.loads(result.read_text())
    results: dict[str, dict[str, Any]] = {}
    base_clock, base_cpu = zip(*times[BASE], strict=True)
    for name, taken in times.items():
        clock, cpu = zip(*taken, strict=True)
        results[name] = {
            "ms": summary(clock),
            "ratio": summary([a / b for a, b in zip(clock, base_clock, strict=True)]),
            "cpu_ms": summary(cpu),
            "cpu_ratio": summary([a / b for a, b in zip(cpu, base_cpu, strict=True)]),
            "reported": reported[name],
        }
    results[EXACT] |= {"target": TARGET, "outcome": outcome(results[EXACT]["ratio"], TARGET)}
    results["one process"] = {"reported": reported["one process"]}
    return results


def show(results: dict[str, dict[str, Any]]) -> str:
    """Return two text tables: times, and each arm's metrics with their error."""
    times = [("two ranks over gloo", "ms", "× padded", "× padded, processor", "target")]
    numbers = [("", "top-1", "off by, points", "top-5", "off by, points", "loss", "samples")]
    truth = results["one process"]["reported"]
    for name, result in results.items():
        if "ms" in result:
            ratios = [describe(result[key], ".3f") for key in ("ratio", "cpu_ratio")]
            target = f"{result['target']:g}: {result['outcome']}" if "target" in result else ""
            own = ratios if name != BASE else ["", ""]
            times.append((name, describe(result["ms"]), *own, target))
        metrics = result["reported"]
        cells = []
        for key in ("top1", "top5"):
            cells += [f"{100 * metrics[key]:.4f} %", f"{100 * (metrics[key] - truth[key]):+.4f}"]
        numbers.append((name, *cells, f"{metrics['loss']:.6f}", f"{metrics['samples']:.0f}"))
    return f"{table(times)}\n\n{table(numbers)}\n"


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="An exact evaluation against one that pads.")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="default: 40")
    add_save(parser)
    parser.add_argument("--rank-of", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments)
        return
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    record = facts(["hpctrain", "torch", "accelerate"])
    results = measure(arguments.rounds)
    print(show(results))
    if not _has_accelerate():
        print(f"{ACCELERATE}: left out: not installed: pip install 'hpctrain[benchmark]'")
    print("Medians over rounds, with their 95 % intervals; ratios round by round.")
    settings = {"rounds": arguments.rounds, "samples": SAMPLES, "batch_size": BATCH}
    save(arguments.save, {"benchmark": "evaluation", **record, **settings, "results": results})


if __name__ == "__main__":
    main()
