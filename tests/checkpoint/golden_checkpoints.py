"""Checkpoints of earlier releases, which every later release has to load.

golden/NAME/run            the run directory with one checkpoint, in the middle of an epoch
golden/NAME/expected.json  the state of that checkpoint, and the losses and state of later steps

Never write the existing ones again: the test fails if this release cannot load them. For a new
format, add its checkpoints to CASES and run this script; it writes the missing ones.

    python tests/checkpoint/golden_checkpoints.py
"""

import json
import math
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import hpctrain
from hpctrain import rundir
from hpctrain.checkpoint import data_files

FOLDER = Path(__file__).with_name("golden")
SAVED, END = 3, 6  # of epochs of four steps
CASES = {
    f"format4-{backend}-{precision}-{size}": ("plain", backend, precision, size)
    for backend, precision, size in (
        ("ddp", "fp32", 1),
        ("ddp", "fp32", 3),
        ("ddp", "O2", 3),
        ("horovod", "fp32", 3),
        ("fsdp", "fp32", 3),
    )
}
# All have a moving average, which is ignored. "groups": two groups of parameters and a torch
# scheduler. "rates": options of hpctrain made the groups and the learning rates; a later script
# makes the same groups itself, and sets its own rates, so only the loaded state is compared.
CASES |= {
    f"format4-{backend}-{kind}-3": (kind, backend, "fp32", 3)
    for kind in ("groups", "rates")
    for backend in ("ddp", "horovod", "fsdp")
}


class Points(Dataset):
    """Fifty points of six numbers, with the index of the largest of the first three as target."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.points = torch.randn(50, 6, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.points[index, :3].argmax()


def make_optimizer(model, kind):
    """Return the optimizer of a kind of case; its groups are those of the checkpoint."""
    if kind == "plain":
        return torch.optim.Adam(model.parameters(), 0.02)
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
        ],
        0.02,
    )


def train(kind, backend, precision, resume):
    """Train to step END; return the first state, the losses of this rank, and the last state.

    Each step depends on the weights, the optimizer, the schedule, the random numbers of the rank
    and its samples, so a loss shows whether all of them were restored. All ranks write, though the
    model is small.
    """
    data_files.LEAST_BYTES = 1
    with hpctrain.Session(
        backend=backend, precision=precision, resume=resume, run_dir="run", global_batch=12,
        max_steps=END, checkpoint_every=SAVED, log_every=1, seed=7,
    ) as session:  # fmt: skip
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        model, optimizer = session.prepare(model, make_optimizer(model, kind))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if kind != "rates" else None
        loader = session.loader(Points())
        losses = []
        state = {"schedule": schedule} if schedule else {}
        with session.run(state=state, name="golden") as run:

            def current_state():
                return plain(
                    {
                        "step": run.step,
                        "epoch": run.epoch,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "precision": session.precision.state_dict(),
                        "schedule": schedule.state_dict() if schedule else {},
                    }
                )

            loaded = current_state()
            for _ in run.epochs():
                for points, targets in run.batches(loader):
                    noisy = points + 0.1 * torch.rand(points.shape)
                    with session.autocast():
                        loss = nn.functional.cross_entropy(model(noisy), targets)
                    session.step(loss)
                    losses.append(loss.item())
                    if schedule:
                        schedule.step()
                    run.log(loss=loss)
            return {"loaded": loaded, "losses": losses, "ended": current_state()}


def plain(value):
    """Return a nested state as JSON gives it back; every float is exact."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return {"dtype": str(value.dtype), "values": value.double().tolist()}
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def make(name):
    """Write a case: a run that stopped at its checkpoint, and the results of its resume."""
    import ranks

    kind, backend, precision, size = CASES[name]
    uninterrupted = ranks.values(ranks.run(size, train, kind, backend, precision, False))
    directory = rundir.RunDirectory("run")
    for step in set(directory.steps()) - {SAVED}:
        shutil.rmtree(directory.checkpoint(step))
    shutil.rmtree(directory.logs)
    directory.summary.unlink()
    directory.timings.unlink(missing_ok=True)
    shutil.copytree("run", "cut", ignore=shutil.ignore_patterns(".*"))
    resumed = ranks.values(ranks.run(size, train, kind, backend, precision, True))
    assert [len(one["losses"]) for one in resumed] == [END - SAVED] * size
    for one, other in zip(resumed, uninterrupted, strict=True):
        # ddp sums in another order once it has rebuilt its buckets.
        near = all(map(partial(math.isclose, rel_tol=1e-5), one["losses"], other["losses"][SAVED:]))
        assert near or kind == "rates", "the run does not repeat"
    expected = {
        "loaded": resumed[0]["loaded"],
        "losses": [one["losses"] for one in resumed],
        "ended": resumed[0]["ended"],
    }
    folder = FOLDER / name
    folder.mkdir(parents=True)
    shutil.move("cut", folder / "run")
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
    sys.modules["golden_checkpoints"] = sys.modules["__main__"]
    train.__module__ = "golden_checkpoints"
    for case in CASES:
        if (FOLDER / case).exists():
            print(f"{case} exists already")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            make(case)
        os.chdir(FOLDER)
        print(f"{case} is written")
