"""A run that begins at a checkpoint of another one: what it takes from it, and what it does not."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import ranks
import torch

import hpctrain
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

SAVED = 5  # inside the second epoch, of four steps
BACKENDS = [
    pytest.param(1, "auto"),
    pytest.param(3, "ddp"),
    pytest.param(3, "fsdp"),
    pytest.param(3, "horovod", marks=pytest.mark.slow),
]


class History:
    def __init__(self):
        self.values = []

    def state_dict(self):
        return {"values": list(self.values)}

    def load_state_dict(self, state):
        self.values = list(state["values"])


def train(backend, run_dir, steps, lr=0.1, optimizer="SGD", width=2, **options):
    """Train; return what the run began with, and what it ended with."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    options = {
        "global_batch": 6,
        "seed": 1,
        "deterministic": True,
        "checkpoint_every": 1,
        **options,
    }
    with hpctrain.Session(
        backend=backend, run_dir=run_dir, max_steps=steps, precision="fp64", **options
    ) as session:
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Dropout(0.25)).double()
        kinds = {
            "SGD": lambda p: torch.optim.SGD(p, lr, momentum=0.9),
            "Adam": lambda p: torch.optim.Adam(p, lr),
        }
        stepper = kinds[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
        model, stepper, scheduler = session.prepare(model, stepper, scheduler)
        data = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)).double()
        loader, history = session.loader(data), History()
        with session.run(state={"history": history}) as run:
            states = [
                session.backend.whole(value).norm().item()
                for state in stepper.state.values()
                for name, value in state.items()
                if name != "step" and value is not None
            ]
            begin = {
                "step": run.step,
                "weights": session.state_dict(model)["0.weight"].tolist(),
                "optimizer": any(states),
                "scheduled": scheduler.last_epoch,
                "lr": stepper.param_groups[0]["lr"],
                "history": list(history.values),
                "lines": lines,
            }
            for _ in run.epochs():
                for x in run.batches(loader):
                    session.step(model(x).pow(2).mean() + model(x).sum())
                    scheduler.step()
                    history.values.append(run.step)
        return begin, session.state_dict(model)["0.weight"].tolist(), list(history.values)


def started(size, *arguments, **options):
    return ranks.values(ranks.run(size, call, arguments, options))[0]


def call(arguments, options):
    return train(*arguments, **options)


@pytest.mark.parametrize(("size", "backend"), BACKENDS)
def test_each_part_of_a_checkpoint_is_restored_or_not_as_asked(size, backend):
    fresh, weights, history = started(size, backend, "old", SAVED)
    _, end, _ = started(size, backend, "undisturbed", SAVED + 4)
    for what in ("all", "all-but-optimizer", "model"):
        for step in ("", ",step=0"):
            last = (0 if step else SAVED) + 4
            begin, reached, _ = started(
                size, backend, f"{what}{step}", last, resume_from="old", restore=what + step
            )
            assert begin["weights"] == weights != fresh["weights"]
            assert begin["step"] == (0 if step else SAVED)
            assert begin["optimizer"] == (what == "all")
            assert begin["scheduled"] == (SAVED if what == "all" else 0)
            assert begin["lr"] == pytest.approx(0.1 * 0.25 if what == "all" else 0.1)
            assert begin["history"] == (history if what != "model" else [])
            assert (reached == end) == (what == "all" and not step)
            line = f"of step {SAVED} in old; the run starts at step {begin['step']}"
            assert sum(line in one for one in begin["lines"]) == 1
            assert (RunDirectory(what + step).steps() or [0])[-1] == last
    assert RunDirectory("old").steps()[-1] == SAVED


def test_restart_of_such_a_run_continues_with_its_own_checkpoint():
    started(1, "auto", "old", SAVED)
    options = {"resume_from": "old/checkpoints/step-00000003", "restore": "model,step=0"}
    _, expected, _ = started(1, "auto", "undisturbed", 6, **options)
    started(1, "auto", "new", 3, **options)
    shutil.rmtree("old")
    begin, reached, history = started(1, "auto", "new", 6, resume=True, **options)
    assert (begin["step"], begin["scheduled"], history) == (3, 3, [*range(1, 7)])
    assert reached == expected
    assert any("new has a checkpoint: the run continues there" in one for one in begin["lines"])
    first, *_ = (json.loads(one) for one in Path("new/starts.jsonl").read_text().splitlines())
    assert first["options"]["resume_from"] == options["resume_from"]


def test_stop_before_the_first_step_leaves_a_checkpoint(tmp_path):
    """The next start finds a state in the directory of its own run."""
    started(1, "auto", "old", SAVED)
    (tmp_path / "stop").touch()
    env = {"HPCTRAIN_STOP_FILE": str(tmp_path / "stop")}
    ended = ranks.run(1, call, ("auto", "new", 9), {"resume_from": "old"}, env=env)
    assert ended == [("exit", 75)]
    assert RunDirectory("new").steps() == [SAVED + 1]


def test_other_optimizer_starts_from_the_state_of_another_run():
    _, weights, _ = started(3, "ddp", "old", SAVED)
    with pytest.raises(UsageError, match="the checkpoint has the states of SGD"):
        started(3, "ddp", "all", 9, optimizer="Adam", resume_from="old")
    begin, _, history = started(
        3, "ddp", "new", 9, 0.01, optimizer="Adam", resume_from="old", restore="all-but-optimizer"
    )
    assert (begin["weights"], begin["lr"]) == (weights, 0.01)
    assert history == [*range(1, 10)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resume_from": "nowhere"}, "nowhere, which has no complete checkpoint"),
        ({"resume_from": "old/checkpoints/step-00000009"}, "which has no complete checkpoint"),
        ({"restore": "model"}, "--restore model without --resume-from"),
        ({"resume_from": "old", "width": 5}, "old has weights of other names or shapes"),
        ({"resume_from": "old", "global_batch": 12}, "global batch"),
        ({"resume_from": "old", "restore": "models"}, "--restore models"),
    ],
)
def test_what_cannot_be_restored_is_refused(options, text):
    started(1, "auto", "old", SAVED)
    with pytest.raises(UsageError, match=text):
        started(1, "auto", "new", 9, **options)


def test_other_global_batch_and_number_of_ranks_start_at_step_0():
    _, weights, _ = started(3, "fsdp", "old", SAVED)
    begin, *_ = started(
        1, "auto", "new", 2, resume_from="old", restore="all,step=0", global_batch=12
    )
    torch.testing.assert_close(begin["weights"], weights)
    assert (begin["step"], begin["optimizer"]) == (0, True)
