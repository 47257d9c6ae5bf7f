"""Reproducibility: examples/mnist.py on the digits, by every way to distribute a step.

With PARITY_RESULTS=FILE.json in the environment all arms are trained, and FILE.json gets what
docs/reproducibility.md shows: date, machine, versions and commit, and in `rows` for each arm

    arm    its name
    apart  by figure ("fp64, losses of steps 1–200", …), the difference from one process
    top1   by precision, the accuracy at the end

    PARITY_RESULTS=$PWD/docs/results/parity.json \\
        python -m pytest --all tests/precision/test_reproducibility.py
"""

import importlib.util
import json
import os
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import launches
import pytest
import ranks
import torch

from hpctrain.checkpoint import open_checkpoint
from hpctrain.data import TrainingSampler
from hpctrain.rundir import RunDirectory

# Read here: the variables of hpctrain are unset in tests.
RESULTS = os.environ.get("PARITY_RESULTS")
PAGE_RESULTS = launches.TOP / "docs" / "results" / "parity.json"
STEPS, FIRST, FEW = 200, 10, 50
# The same micro-batches in one process, two ranks and four, distributed differently.
COMMON = ("--global-batch", "32", "--batch-size", "8", "--log-every=1")
DDP, HOROVOD = ("--backend", "ddp"), ("--backend", "horovod")
FSDP = ("--backend", "fsdp")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "O1", "O2")


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        size: ranks.
        options: of the example, besides the common ones.
        precisions: in which it trains.
        same: whether its losses must equal those of one process.
        backwards: whether the micro-batches of a step come in reverse order.
    """

    size: int
    options: tuple[str, ...] = ()
    precisions: tuple[str, ...] = PRECISIONS
    same: bool = True
    backwards: bool = False


ALONE, ON_FOUR_RANKS = "one process", ("ddp, 4 ranks", "Horovod, 4 ranks")
SEEDS = {
    f"one process, `--seed {seed}`": Arm(1, ("--seed", f"{seed}"), ("fp32",), same=False)
    for seed in range(1, 5)
}
ARMS = {
    ALONE: Arm(1),
    "one process, the sums in the other order": Arm(1, backwards=True),
    "ddp, 2 ranks": Arm(2, DDP),
    "ddp, 4 ranks": Arm(4, DDP),
    "Horovod, 2 ranks": Arm(2, HOROVOD),
    "Horovod, 4 ranks": Arm(4, HOROVOD),
    "fsdp, 2 ranks": Arm(2, FSDP, ("fp64", "fp32", "bf16")),
    "fsdp, 4 ranks": Arm(4, FSDP, ("fp64", "fp32", "bf16")),
    "Horovod, 2 ranks, `--horovod groups=2`": Arm(
        2, (*HOROVOD, "--horovod", "groups=2"), ("fp64",)
    ),
    "Horovod, 2 ranks, `--horovod gradient-predivide-factor=2`": Arm(
        2, (*HOROVOD, "--horovod", "gradient-predivide-factor=2"), ("fp64",)
    ),
    "Horovod, 2 ranks, `--horovod compression=fp16`": Arm(
        2, (*HOROVOD, "--horovod", "compression=fp16"), ("fp32",), same=False
    ),
    "ddp, 2 ranks, `--ddp compression=bf16`": Arm(
        2, (*DDP, "--ddp", "compression=bf16"), ("fp32",), same=False
    ),
    **SEEDS,
}
# The largest difference of losses: of all steps in fp64, else of the first ones. Half precision
# rounds the last bits of a sum up or down by one part in 256 (bf16) or 2,048 (fp16).
APART = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.05, "fp16": 0.02, "O1": 0.02, "O2": 0.02}
ROUGHLY = 0.1
# Batch norm cancels the biases before it: their gradients are only rounding errors, which Adam
# scales to the size of any other gradient.
WITHOUT_EFFECT = ("conv1.bias", "conv2.bias")


@dataclass(frozen=True)
class Result:
    """The results of a run: losses by step, the last accuracy, the trained weights by name."""

    losses: list[float]
    top1: float
    weights: dict[str, torch.Tensor]


def run_example(arguments, backwards=False):
    sys.argv = [str(launches.EXAMPLE), *arguments]
    if backwards:
        TrainingSampler._place = lambda self, index: self.batches.accumulate - 1 - index
    runpy.run_path(sys.argv[0], run_name="__main__")


def train(name, precision, steps=STEPS):
    """Train an arm in its own folder; return its results."""
    arm = ARMS[name]
    run = RunDirectory(re.sub(r"\W+", "-", f"{name}-{precision}"))
    options = (*COMMON, *arm.options, "--precision", precision, "--run-dir", str(run.path))
    options += ("--max-steps", str(steps))
    ranks.values(ranks.run(arm.size, run_example, options, arm.backwards, timeout=300))
    rows = run.rows()
    (weights,) = open_checkpoint(run.checkpoint(steps), steps).read()["model"]
    trained = {k: v for k, v in weights.items() if "running" not in k and "num_batches" not in k}
    for name in WITHOUT_EFFECT:
        del trained[name]
    return Result(
        [row["loss"] for row in rows if "loss" in row],
        [row["top1"] for row in rows if "top1" in row][-1],
        trained,
    )


def losses_apart(one, other, steps=STEPS):
    """Return the largest relative difference of the losses of two results."""
    pairs = zip(one.losses[:steps], other.losses[:steps], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def weights_apart(one, other):
    """Return the largest relative difference of a weight tensor of two results."""
    return max(
        ((one.weights[name] - tensor).norm() / tensor.norm()).item()
        for name, tensor in other.weights.items()
    )


FIGURES = (
    f"fp64, losses of steps 1–{STEPS}",
    "fp64, weights",
    f"fp32, losses of steps 1–{FIRST}",
    f"fp32, losses of steps 1–{STEPS}",
    *(f"{precision}, losses of steps 1–{FIRST}" for precision in PRECISIONS[2:]),
)


def distances(results, name):
    """Return, by figure, the difference of an arm from one process in the same precision."""
    found = {}
    for precision in ARMS[name].precisions:
        if name in (ALONE, *SEEDS):
            continue
        own, alone = results[name, precision], results[ALONE, precision]
        if precision == "fp64":
            found["fp64, weights"] = weights_apart(own, alone)
        else:
            found[f"{precision}, losses of steps 1–{FIRST}"] = losses_apart(own, alone, FIRST)
        if precision in ("fp64", "fp32"):
            found[f"{precision}, losses of steps 1–{STEPS}"] = losses_apart(own, alone)
    return {figure: float(f"{found[figure]:.1e}") for figure in FIGURES if figure in found}


def rows_of(results):
    """Return the row of each arm on the page."""
    return [
        {
            "arm": name,
            "apart": distances(results, name),
            "top1": {p: round(results[name, p].top1, 4) for p in arm.precisions},
        }
        for name, arm in ARMS.items()
    ]


def check_rows(rows):
    """Check the rows against the claims of the page."""
    by_name = {row["arm"]: row for row in rows}
    for name, row in by_name.items():
        for figure, value in row["apart"].items():
            precision = figure.partition(",")[0]
            if precision == "fp64" or figure.endswith(f"–{FIRST}"):
                limit = APART[precision] if ARMS[name].same else ROUGHLY
                assert value <= limit, (name, figure)
    seeds = [by_name[name]["top1"]["fp32"] for name in (ALONE, *SEEDS)]
    spread = max(seeds) - min(seeds)
    for name, row in by_name.items():
        for top1 in row["top1"].values():
            assert min(abs(top1 - seed) for seed in seeds) <= spread, (name, row)


@pytest.fixture
def horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")


def test_fp64_losses_and_weights_are_equal_over_ddp_and_horovod(horovod):
    with ThreadPoolExecutor(3) as pool:
        alone, *others = pool.map(lambda name: train(name, "fp64", FEW), (ALONE, *ON_FOUR_RANKS))
    assert len(set(alone.losses)) == FEW
    for other in others:
        assert losses_apart(other, alone, FEW) <= APART["fp64"]
        assert weights_apart(other, alone) <= APART["fp64"]


@pytest.mark.slow
def test_losses_weights_and_accuracy_are_equal_over_all_backends_and_precisions(horovod):
    runs = [(name, precision) for name, arm in ARMS.items() for precision in arm.precisions]
    alone = [run for run in runs if ARMS[run[0]].size == 1]
    with ThreadPoolExecutor(2) as pool:  # one core for each
        results = dict(zip(alone, pool.map(train, *zip(*alone, strict=True)), strict=True))
    results = {run: results.get(run) or train(*run) for run in runs}
    assert {len(result.losses) for result in results.values()} == {STEPS}
    assert len(set(results[ALONE, "fp64"].losses)) == STEPS
    rows = rows_of(results)
    if RESULTS:
        sys.path.append(str(launches.TOP / "benchmarks"))
        import measure

        facts = measure.facts(("torch", "horovod"))
        command = "python -m pytest --all tests/precision/test_reproducibility.py"
        measure.save(measure.place(RESULTS), {**facts, "command": command, "rows": rows})
    check_rows(rows)


def test_reproducibility_results_fit_the_claims_of_the_page():
    rows = json.loads(PAGE_RESULTS.read_text())["rows"]
    assert [row["arm"] for row in rows] == list(ARMS)
    check_rows(rows)
