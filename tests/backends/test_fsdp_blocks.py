"""Ranks that call different blocks of a model with fsdp, or use different parameters of one."""

import os
from functools import partial

import pytest
import ranks
import torch
from battery import session
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory

LATE = 30  # a step after those in which the ranks compare each call


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.down(self.up(x))


class Experts(nn.Module):
    """Layers of which a rank calls some, in any order."""

    def __init__(self, widths=(4, 4, 4), joined=False):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, widths))
        self.joined = joined

    def forward(self, x, which):
        for number in which:
            x = self.layers[number](x)
        if self.joined:
            x = x + 0 * sum(p.sum() for p in self.parameters())
        return x


def train(choose, steps=3, widths=(4, 4, 4), joined=False, **options):
    """Train a model of layers; return its weights.

    Args:
        choose: returns the layers that a rank calls in a step.
        steps: number of steps.
        widths: width of each layer.
        joined: whether the outputs depend on all layers.
        options: options of the session.
    """
    torch.manual_seed(1)
    backend = os.environ.get("TEST_BACKEND", "auto")
    with session(
        batch_size=2, precision="fp64", run_dir=f"run-{backend}", timeout=60, **options
    ) as opened:
        model = Experts(widths, joined).double()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        rank = opened.world.rank
        with opened.run() as run:
            for step in run.steps(steps):
                x = torch.full((2, 4), 1.0 + rank, dtype=torch.float64)
                opened.step(model(x, choose(rank, step)).pow(2).mean())
        full = [opened.backend.whole(p.detach()).flatten() for p in model.parameters()]
        return torch.cat(full).tolist()


def one_each(rank, step):
    return [rank]


def drop_one_each(rank, step):
    return [number for number in range(3) if number != rank]


def drop_on_rank_2(rank, step):
    return [0, 1] if rank == 2 else [0, 1, 2]


def swap_later_on_rank_1(rank, step):
    return [1, 0, 2] if rank == 1 and step >= LATE else [0, 1, 2]


def one_later_on_rank_1(rank, step):
    return [2] if rank == 1 and step >= LATE else [0]


CALLS = [
    (one_each, {}, "rank 0: Experts.layers.0; rank 1: Experts.layers.1; rank 2: Experts.layers.2"),
    (
        one_each,
        {"widths": (3, 4, 5)},
        "rank 0: Experts.layers.0; rank 1: Experts.layers.1; rank 2: Experts.layers.2",
    ),
    (drop_one_each, {}, "rank 0: Experts.layers.1; ranks 1 and 2: Experts.layers.0"),
    (
        drop_on_rank_2,
        {},
        "ranks 0 and 1: Experts.layers.2; rank 2: the backward pass of a loss",
    ),
]


def over_fsdp(choose, **options):
    return ranks.run(3, partial(train, choose, **options), env={"TEST_BACKEND": "fsdp"})


def of_all(results):
    for result in results:
        assert isinstance(result, UsageError), result
    return str(results[0])


@pytest.mark.parametrize(("choose", "options", "calls"), CALLS)
def test_ranks_that_call_different_blocks_are_named_in_the_first_step(choose, options, calls):
    results = over_fsdp(choose, **options)
    assert of_all(results).startswith(f"the ranks call different blocks of a model: {calls}")


def test_blocks_in_another_order_at_a_later_step_are_in_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = over_fsdp(swap_later_on_rank_1, steps=LATE + 5, checkpoint_every=LATE + 2)
    assert "have called different blocks of a model" in of_all(results)
    assert RunDirectory("run-fsdp").steps() == []


def test_parameters_that_some_ranks_do_not_use_are_named():
    results = over_fsdp(one_each, fsdp="blocks=Experts")
    assert of_all(results).startswith(
        "the ranks have gradients of different parameters: "
        "rank 0: no gradient of layers.1.up.weight, layers.1.up.bias, layers.1.down.weight "
        "and 5 more; ranks 1 and 2: no gradient of layers.0.up.weight"
    )


def test_parameters_that_some_ranks_do_not_use_later_are_in_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = over_fsdp(
        one_later_on_rank_1, steps=LATE + 5, checkpoint_every=LATE + 2, fsdp="blocks=Experts"
    )
    assert "gradients of different parameters" in of_all(results)
    assert RunDirectory("run-fsdp").steps() == []


def test_different_layers_train_where_the_whole_model_is_one_block_and_its_output_has_all():
    """As the fix in the error says."""
    expected, *_ = ranks.values(ranks.run(3, partial(train, one_each, 8, joined=True)))
    for found in ranks.values(over_fsdp(one_each, steps=8, joined=True, fsdp="blocks=Experts")):
        assert found == pytest.approx(expected, rel=1e-12)
