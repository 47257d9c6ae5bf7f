"""Checkpoints of earlier releases load, and their runs continue with the same losses."""

import importlib.util
import json
import shutil

import golden_checkpoints
import pytest
import ranks

from hpctrain.rundir import RunDirectory

NAMES = sorted(path.parent.name for path in golden_checkpoints.FOLDER.glob("*/expected.json"))
# Another processor sums in another order. O2 rounds such a difference to half precision.
TOLERANCE = {"fp32": 1e-4, "O2": 2e-2}
# Batch norm takes the bias before it away again, so its gradient is zero but for rounding, of which
# Adam makes a step of any size.
ROUNDING = {"0.bias", "1.running_mean"}


def test_golden_checkpoints_are_all_there():
    assert set(golden_checkpoints.CASES) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_golden_checkpoint_loads_and_resumes(name, lacking):
    loads_and_resumes(name, lacking, golden_checkpoints.CASES[name][1])


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("format4-ddp-fp32-3", "fsdp"),
        ("format4-fsdp-fp32-3", "horovod"),
        ("format4-horovod-groups-3", "fsdp"),
        ("format4-fsdp-rates-3", "ddp"),
        pytest.param("format4-fsdp-fp32-3", "ddp", marks=pytest.mark.slow),
    ],
)
def test_golden_checkpoint_of_another_backend_loads_and_resumes(name, backend, lacking):
    loads_and_resumes(name, lacking, backend)


def loads_and_resumes(name, lacking, backend):
    kind, _, precision, size = golden_checkpoints.CASES[name]
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    shutil.copytree(golden_checkpoints.FOLDER / name / "run", "run")
    expected = json.loads((golden_checkpoints.FOLDER / name / "expected.json").read_text())
    resumed = ranks.values(
        ranks.run(size, golden_checkpoints.train, kind, backend, precision, True)
    )
    run = RunDirectory("run")
    assert [line["step"] for line in run.lines(run.starts)] == [0, golden_checkpoints.SAVED]
    loaded = expected["loaded"]
    del loaded["ema"]
    ignored = "moving average (session.ema)"
    if kind == "rates":
        ignored += ", learning rates of --lr-schedule"
        for group in loaded["optimizer"]["param_groups"]:
            group["lr"] = 0.02  # that of the script
            del group["initial_lr"]
    (line,) = [line for line in run.log(0).read_text().splitlines() if "ignored" in line]
    assert line.endswith(f"{run.checkpoint(golden_checkpoints.SAVED)}: ignored: {ignored}")
    assert resumed[0]["loaded"] == expected["loaded"]
    for rank in resumed[1:]:
        assert shared_state(rank["loaded"]) == shared_state(expected["loaded"])
    for rank, losses in zip(resumed, expected["losses"], strict=True):
        some = slice(1 if kind == "rates" else None)  # the first loss is before any step
        assert rank["losses"][some] == pytest.approx(losses[some], rel=TOLERANCE[precision])
    ended = resumed[0]["ended"]
    assert ended["step"] == expected["ended"]["step"] == golden_checkpoints.END
    if kind != "rates":
        assert list(numbers(ended["model"])) == pytest.approx(
            list(numbers(expected["ended"]["model"])), rel=TOLERANCE[precision], abs=1e-4
        )


def shared_state(state):
    """Return a state without the batch norm statistics, which differ between ranks."""
    model = {name: value for name, value in state["model"].items() if "running" not in name}
    return {**state, "model": model}


def numbers(value):
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in ROUNDING:
                yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value
