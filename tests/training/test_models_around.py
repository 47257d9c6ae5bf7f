"""Modules around a prepared model, such as averages, are saved and resumed."""

from functools import partial

import pytest
import ranks
import torch
from battery import session
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Teacher(nn.Module):
    """A module that holds a prepared model, and a parameter of its own."""

    def __init__(self, student):
        super().__init__()
        self.students = nn.ModuleList([student])
        self.centre = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)

    def update_parameters(self, model):
        self.centre += model.weight.detach().sum(1)


def average(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def train(make, steps, resume=False):
    torch.manual_seed(1)
    with session(
        batch_size=2, max_steps=steps, precision="fp64", deterministic=True, run_dir="run",
        resume=resume,
    ) as opened:  # fmt: skip
        model = nn.Linear(2, 3).double()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        around = make(model)
        x = torch.full((2, 2), 1.0 + opened.world.rank, dtype=torch.float64)
        with opened.run(state={"around": around}) as run:
            for _ in run.steps(6):
                opened.step(model(x).pow(2).mean())
                around.update_parameters(model)
        return {name: value.tolist() for name, value in around.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (average, ["n_averaged", "module.weight", "module.bias"]),
        (Teacher, ["centre", "students.0.weight", "students.0.bias"]),
    ],
)
@pytest.mark.parametrize(("backend", "size"), [("auto", 1), ("auto", 2), ("horovod", 2)])
def test_module_around_a_prepared_model_resumes_bit_for_bit(
    backend, size, make, names, tmp_path, monkeypatch
):
    run = partial(ranks.run, size, env={"TEST_BACKEND": backend})
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = ranks.values(run(partial(train, make, 6)))
    monkeypatch.chdir(tmp_path)
    ranks.values(run(partial(train, make, 3)))
    resumed = ranks.values(run(partial(train, make, 6, resume=True)))
    assert resumed == whole
    assert list(resumed[0]) == names
