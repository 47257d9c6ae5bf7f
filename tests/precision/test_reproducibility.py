"""The same training everywhere: examples/mnist.py on the digits, by every way to share a step.

With SAMENESS_TABLE=FILE in the environment the tables of docs/sameness.md are written there:

    SAMENESS_TABLE=table.md python -m pytest tests/precision/test_reproducibility.py
"""

import importlib.util
import os
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import launches
import pytest
import ranks
import torch

from hpctrain.data import TrainingSampler
from hpctrain.rundir import RunDirectory

# Read here: a test sees no variables of ours.
TABLE = os.environ.get("SAMENESS_TABLE")
STEPS, FIRST = 200, 10
# The same micro-batches in one process, two ranks and four; only how they are shared differs.
COMMON = ("--global-batch", "32", "--batch-size", "8", "--max-steps", f"{STEPS}", "--log-every=1")
DDP, HOROVOD = ("--backend", "ddp"), ("--backend", "horovod")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "O1", "O2")


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        size: ranks.
        options: of the example, besides the common ones.
        precisions: in which it trains.
        often: those in which it trains also where there is little time.
        same: whether its losses are held to those of one process.
        backwards: whether the micro-batches of a step come in the other order.
    """

    size: int
    options: tuple[str, ...] = ()
    precisions: tuple[str, ...] = PRECISIONS
    often: tuple[str, ...] = ()
    same: bool = True
    backwards: bool = False


ALONE = "one process"
SEEDS = {
    f"one process, `--seed {seed}`": Arm(
        1, ("--seed", f"{seed}"), ("fp32",), ("fp32",) if seed < 3 else (), same=False
    )
    for seed in range(1, 5)
}
ARMS = {
    ALONE: Arm(1, often=("fp64", "fp32", "O2")),
    "one process, the sums in the other order": Arm(1, often=("fp32",), backwards=True),
    "ddp, 2 ranks": Arm(2, DDP, often=("O2",)),
    "ddp, 4 ranks": Arm(4, DDP, often=("fp64", "fp32")),
    "Horovod, 2 ranks": Arm(2, HOROVOD, often=("fp32",)),
    "Horovod, 4 ranks": Arm(4, HOROVOD, often=("fp64",)),
    "Horovod, 2 ranks, `--horovod-groups 2`": Arm(
        2, (*HOROVOD, "--horovod-groups", "2"), ("fp64",)
    ),
    "Horovod, 2 ranks, `--horovod-gradient-predivide-factor 2`": Arm(
        2, (*HOROVOD, "--horovod-gradient-predivide-factor", "2"), ("fp64",)
    ),
    "Horovod, 2 ranks, `--horovod-compression fp16`": Arm(
        2, (*HOROVOD, "--horovod-compression", "fp16"), ("fp32",), same=False
    ),
    "ddp, 2 ranks, `--ddp-compression bf16`": Arm(
        2, (*DDP, "--ddp-compression", "bf16"), ("fp32",), same=False
    ),
    **SEEDS,
}
# How far the losses may be apart: of all steps in fp64, of the first ones elsewhere. Half precision
# rounds the last bits of a sum up or down by one part in 256 (bf16) or 2,048 (fp16).
APART = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.05, "fp16": 0.02, "O1": 0.02, "O2": 0.02}
ROUGHLY = 0.1
# Batch norm takes the biases before it out again: their gradients are nothing but rounding, which
# Adam makes as large as any other.
WITHOUT_EFFECT = ("conv1.bias", "conv2.bias")


@dataclass(frozen=True)
class Result:
    """What a run left: losses by step, the last accuracy, the trained weights by name."""

    losses: list[float]
    top1: float
    weights: dict[str, torch.Tensor]


def example(arguments, backwards=False):
    sys.argv = [str(launches.EXAMPLE), *arguments]
    if backwards:
        TrainingSampler._place = lambda self, index: self.batches.accumulate - 1 - index
    runpy.run_path(sys.argv[0], run_name="__main__")


def train(name, precision):
    """Train an arm in a folder of its own, and read what is left there."""
    arm = ARMS[name]
    run = RunDirectory(re.sub(r"\W+", "-", f"{name}-{precision}"))
    options = (*COMMON, *arm.options, "--precision", precision, "--run", str(run.path))
    ranks.values(ranks.run(arm.size, example, options, arm.backwards, timeout=150))
    rows = run.rows()
    (weights,) = torch.load(run.checkpoint(STEPS) / "model.pt", weights_only=True)
    trained = {k: v for k, v in weights.items() if "running" not in k and "num_batches" not in k}
    for name in WITHOUT_EFFECT:
        del trained[name]
    return Result(
        [row["loss"] for row in rows if "loss" in row],
        [row["top1"] for row in rows if "top1" in row][-1],
        trained,
    )


def apart(one, other, steps=STEPS):
    """The largest relative difference of two results' losses."""
    pairs = zip(one.losses[:steps], other.losses[:steps], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def weights_apart(one, other):
    """The largest relative difference of a tensor of the weights."""
    return max(
        ((one.weights[name] - tensor).norm() / tensor.norm()).item()
        for name, tensor in other.weights.items()
    )


LOSSES = (
    "largest relative difference",
    f"fp64, losses of steps 1–{STEPS}",
    "fp64, weights",
    f"fp32, losses of steps 1–{FIRST}",
    f"fp32, losses of steps 1–{STEPS}",
    *(f"{precision}, losses of steps 1–{FIRST}" for precision in PRECISIONS[2:]),
)
TOP1 = ("top-1 at the end", *PRECISIONS)


def losses_of(results):
    """By arm, how far it is apart from one process in the same precision."""
    rows = {}
    for name, arm in ARMS.items():
        cells = dict.fromkeys(LOSSES[1:], "")
        for precision in arm.precisions:
            if (name, precision) not in results or name in (ALONE, *SEEDS):
                continue
            own, alone = results[name, precision], results[ALONE, precision]
            if precision == "fp64":
                cells["fp64, weights"] = f"{weights_apart(own, alone):.1e}"
            else:
                first = f"{precision}, losses of steps 1–{FIRST}"
                cells[first] = f"{apart(own, alone, FIRST):.1e}"
            if precision in ("fp64", "fp32"):
                cells[f"{precision}, losses of steps 1–{STEPS}"] = f"{apart(own, alone):.1e}"
        if any(cells.values()):
            rows[name] = list(cells.values())
    return rows


def accuracies_of(results):
    """By arm and precision, the accuracy at the end."""
    cells = {
        name: [f"{results[name, p].top1:.4f}" if (name, p) in results else "" for p in PRECISIONS]
        for name in ARMS
    }
    return {name: row for name, row in cells.items() if any(row)}


def hold(losses, accuracies):
    """Hold the tables to what the page claims."""
    for name, row in losses.items():
        for head, cell in zip(LOSSES[1:], row, strict=True):
            precision = head.partition(",")[0]
            if cell and (precision == "fp64" or str(FIRST) in head.split("–")):
                limit = APART[precision] if ARMS[name].same else ROUGHLY
                assert float(cell) <= limit, (name, head)
    column = TOP1.index("fp32") - 1
    seeds = [float(accuracies[name][column]) for name in (ALONE, *SEEDS) if name in accuracies]
    spread = max(seeds) - min(seeds)
    for name, row in accuracies.items():
        for precision, cell in zip(PRECISIONS, row, strict=True):
            away = min(abs(float(cell or seeds[0]) - seed) for seed in seeds)
            assert away <= spread, (name, precision)


def lines_of(head, rows):
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(page, head):
    """The rows of the table with a head, from a page in Markdown."""
    table = page[page.index(f"| {head[0]} |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[0] == list(head)
    return {name: cells for name, *cells in rows[2:]}


@pytest.fixture
def horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")


def test_losses_weights_and_accuracy_do_not_depend_on_how_a_step_is_shared(horovod, request):
    all_of_them = TABLE or request.config.getoption("--all")
    runs = [
        (name, precision)
        for name, arm in ARMS.items()
        for precision in (arm.precisions if all_of_them else arm.often)
    ]
    alone = [run for run in runs if ARMS[run[0]].size == 1]
    with ThreadPoolExecutor(2) as pool:  # of one core each
        results = dict(zip(alone, pool.map(train, *zip(*alone, strict=True)), strict=True))
    results = {run: results.get(run) or train(*run) for run in runs}
    assert {len(result.losses) for result in results.values()} == {STEPS}
    assert len(set(results[ALONE, "fp64"].losses)) == STEPS
    losses, accuracies = losses_of(results), accuracies_of(results)
    if TABLE:
        Path(TABLE).write_text(f"{lines_of(LOSSES, losses)}\n{lines_of(TOP1, accuracies)}")
    hold(losses, accuracies)


def test_the_tables_of_the_page_keep_what_the_page_claims():
    page = (launches.TOP / "docs" / "sameness.md").read_text()
    losses, accuracies = read(page, LOSSES), read(page, TOP1)
    assert list(accuracies) == list(ARMS)
    assert list(losses) == [name for name in ARMS if name not in (ALONE, *SEEDS)]
    hold(losses, accuracies)


def repeat(times):
    """The same training several times over; the bytes of each one's checkpoint."""
    options = ("--batch-size", "8", "--max-steps", "10", *HOROVOD, "--deterministic")
    for number in range(times):
        example((*options, "--run", f"{number}"))


def test_deterministic_horovod_repeats_bit_for_bit(horovod):
    """From three ranks on: two numbers have the same sum in any order."""
    times = 3
    ranks.values(ranks.run(3, repeat, times, timeout=100))
    first, *others = (
        torch.load(RunDirectory(f"{number}").checkpoint(10) / "model.pt", weights_only=True)[0]
        for number in range(times)
    )
    for weights in others:
        assert all(torch.equal(weights[name], tensor) for name, tensor in first.items())
