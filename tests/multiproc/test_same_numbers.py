"""The same training everywhere: examples/mnist.py on the digits, by every way to share a step.

With SAMENESS_TABLE=FILE in the environment the table of docs/sameness.md is written there:

    SAMENESS_TABLE=table.md python -m pytest tests/multiproc/test_same_numbers.py
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

from hpctrain.rundir import RunDirectory

# Read here: a test sees no variables of ours.
TABLE = os.environ.get("SAMENESS_TABLE")
STEPS, FIRST = 200, 10
# The same micro-batches in one process, two ranks and four; only how they are shared differs.
COMMON = ("--global-batch", "32", "--batch-size", "8", "--max-steps", f"{STEPS}", "--log-every=1")
HOROVOD = ("--backend", "horovod")


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        size: ranks.
        options: of the example, besides the common ones.
        precisions: in which it trains.
        same: whether its losses are held to those of one process.
        more: whether it is only trained where there is time, or the table is written.
    """

    size: int
    options: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("fp64", "fp32")
    same: bool = True
    more: bool = False


ALONE = "one process"
ARMS = {
    ALONE: Arm(1),
    "one process, `--seed 1`": Arm(1, ("--seed", "1"), ("fp32",), same=False),
    "one process, `--seed 2`": Arm(1, ("--seed", "2"), ("fp32",), same=False),
    "ddp, 2 ranks": Arm(2, ("--backend", "ddp")),
    "ddp, 4 ranks": Arm(4, ("--backend", "ddp")),
    "Horovod, 2 ranks": Arm(2, HOROVOD),
    "Horovod, 4 ranks": Arm(4, HOROVOD),
    "Horovod, 2 ranks, `--horovod-groups 2`": Arm(
        2, (*HOROVOD, "--horovod-groups", "2"), ("fp64",), more=True
    ),
    "Horovod, 2 ranks, `--horovod-gradient-predivide-factor 2`": Arm(
        2, (*HOROVOD, "--horovod-gradient-predivide-factor", "2"), ("fp64",), more=True
    ),
    "Horovod, 2 ranks, `--horovod-compression fp16`": Arm(
        2, (*HOROVOD, "--horovod-compression", "fp16"), ("fp32",), same=False, more=True
    ),
}
FP64, FP32, ROUGHLY, TOP1 = 1e-9, 1e-3, 0.1, 0.02
# Batch norm takes the biases before it out again: their gradients are nothing but rounding, which
# Adam makes as large as any other.
WITHOUT_EFFECT = ("conv1.bias", "conv2.bias")


@dataclass(frozen=True)
class Result:
    """What a run left: losses by step, the last accuracy, the trained weights by name."""

    losses: list[float]
    top1: float
    weights: dict[str, torch.Tensor]


def example(arguments):
    sys.argv = [str(launches.EXAMPLE), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def train(name, precision):
    """Train an arm in a folder of its own, and read what is left there."""
    arm = ARMS[name]
    run = RunDirectory(re.sub(r"\W+", "-", f"{name}-{precision}"))
    options = (*COMMON, *arm.options, "--precision", precision, "--run", str(run.path))
    ranks.values(ranks.run(arm.size, example, options, timeout=150))
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


def rows_of(results):
    """The table: per arm its name and its cells, which a person reads and a test holds."""
    rows = {}
    for name in dict.fromkeys(name for name, _ in results):
        arm = ARMS[name]
        cells = ["", "", "", "", f"{results[name, arm.precisions[-1]].top1:.4f}"]
        for precision in arm.precisions if name != ALONE and "--seed" not in arm.options else ():
            own, alone = results[name, precision], results[ALONE, precision]
            if precision == "fp64":
                cells[:2] = f"{apart(own, alone):.1e}", f"{weights_apart(own, alone):.1e}"
            else:
                cells[2:4] = f"{apart(own, alone, FIRST):.1e}", f"{apart(own, alone):.1e}"
        rows[name] = cells
    return rows


HEAD = (
    "",
    f"fp64, losses of steps 1–{STEPS}",
    "fp64, weights",
    f"fp32, losses of steps 1–{FIRST}",
    f"fp32, losses of steps 1–{STEPS}",
    "top-1",
)


def hold(rows):
    """Hold a table to what the page claims."""
    alone = float(rows[ALONE][-1])
    for name, (fp64, weights, fp32, _, top1) in rows.items():
        same = ARMS[name].same
        assert float(fp64 or 0) <= FP64, name
        assert float(weights or 0) <= FP64, name
        assert float(fp32 or 0) <= (FP32 if same else ROUGHLY), name
        assert float(top1) == pytest.approx(alone, abs=TOP1), name


@pytest.fixture
def horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")


def test_losses_weights_and_accuracy_do_not_depend_on_how_a_step_is_shared(horovod, request):
    all_of_them = TABLE or request.config.getoption("--long")
    chosen = {name: arm for name, arm in ARMS.items() if all_of_them or not arm.more}
    runs = [(name, precision) for name, arm in chosen.items() for precision in arm.precisions]
    alone = [run for run in runs if ARMS[run[0]].size == 1]
    with ThreadPoolExecutor(2) as pool:  # of one core each
        results = dict(zip(alone, pool.map(train, *zip(*alone, strict=True)), strict=True))
    results = {run: results.get(run) or train(*run) for run in runs}
    assert {len(result.losses) for result in results.values()} == {STEPS}
    assert len(set(results[ALONE, "fp64"].losses)) == STEPS
    table = rows_of(results)
    if TABLE:
        lines = [HEAD, ["---"] * len(HEAD), *([name, *cells] for name, cells in table.items())]
        Path(TABLE).write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    hold(table)


def test_the_table_of_the_page_keeps_what_the_page_claims():
    page = (launches.TOP / "docs" / "sameness.md").read_text()
    table = page[page.index(f"| {HEAD[1]}") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [name for name, *_ in rows] == list(ARMS)
    hold({name: cells for name, *cells in rows})


def repeat(times):
    """The same training several times over; the bytes of each one's checkpoint."""
    options = ("--batch-size", "8", "--max-steps", "20", *HOROVOD, "--deterministic")
    for number in range(times):
        example((*options, "--run", f"{number}"))


def test_deterministic_repeats_over_horovod_are_equal_to_the_last_bit(horovod):
    """From three ranks on: two numbers have the same sum in any order."""
    times = 4
    ranks.values(ranks.run(4, repeat, times, timeout=100))
    first, *others = (
        torch.load(RunDirectory(f"{number}").checkpoint(20) / "model.pt", weights_only=True)[0]
        for number in range(times)
    )
    for weights in others:
        assert all(torch.equal(weights[name], tensor) for name, tensor in first.items())
