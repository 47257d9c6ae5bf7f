"""Plain values and generators in `session.run(state=…)` continue after a resume."""

import os
import random
from functools import partial
from pathlib import Path

import faults
import numpy
import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, session
from torch import nn

from hpctrain.errors import UsageError


def make_state(rank):
    """Return values and generators by name; `seeded` is equal on all ranks, the others are not."""
    return {
        "mine": {"best": 0.0, "of": None, "drawn": [], "parts": {"sum": torch.zeros(2)}},
        "queue": torch.zeros(3),
        "seen": [],
        "torch": torch.Generator().manual_seed(rank),
        "python": random.Random(rank),
        "numpy": numpy.random.Generator(numpy.random.MT19937(rank)),
        "seeded": numpy.random.default_rng(7),
    }


def train(die_at=None, **options):
    """Draw from each generator in each step; return all values at the end."""
    options = {"global_batch": 12, "epochs": 2, "run_dir": "run", "checkpoint_every": 2, **options}
    with session(**options) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        state = make_state(opened.world.rank)
        mine, drawn = state["mine"], state["mine"]["drawn"]
        loader = opened.loader([torch.ones(1)] * 60)
        with opened.run(state=state) as run:
            for _ in run.epochs():
                for points in run.batches(loader):
                    drawn.append(torch.rand((), generator=state["torch"]).item())
                    drawn.append(state["python"].gauss(0, 1))
                    drawn.append(state["numpy"].random())
                    mine["best"] = max(mine["best"], numpy.float64(drawn[-1]))
                    mine["of"] = f"step {run.step}"
                    mine["parts"]["sum"] += drawn[-2]
                    state["queue"] += drawn[-1]
                    state["seen"].append(int(state["seeded"].integers(1000)))
                    opened.step(model(points).mean())
                    if run.step == die_at:
                        os._exit(9)
        assert mine["drawn"] is drawn
        return (
            *(mine["best"], mine["of"], drawn, mine["parts"]["sum"].tolist()),
            *(state["seen"], state["queue"].tolist()),
        )


@HOROVOD_SLOW
def test_plain_values_and_generators_of_each_rank_continue_after_a_kill(run, tmp_path, monkeypatch):
    for folder in ("uninterrupted", "cut"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "uninterrupted")
    uninterrupted = ranks.values(run(3, train))
    assert len({tuple(drawn) for _, _, drawn, *_ in uninterrupted}) == 3
    monkeypatch.chdir(tmp_path / "cut")
    run(3, partial(train, die_at=7))
    assert ranks.values(run(3, partial(train, resume=True))) == uninterrupted
    assert 0 < faults.started_at()[-1] < 7


def resume_on_fewer_ranks():
    with session(global_batch=12, epochs=3, run_dir="run", elastic=True) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        state = make_state(opened.world.rank)
        with opened.run(state=state):
            python = state["python"].random()
            return state["mine"], python, int(state["seeded"].integers(1000))


def test_fewer_ranks_take_the_values_of_rank_0_and_the_equal_generators():
    (_, _, drawn, _, seen, _), *_ = ranks.values(ranks.run(3, train))
    (mine, first, seeded), (other, second, other_seeded) = ranks.values(
        ranks.run(2, resume_on_fewer_ranks)
    )
    assert mine["drawn"] == other["drawn"] == drawn
    generator = numpy.random.default_rng(7)
    expected = [int(generator.integers(1000)) for _ in range(len(seen) + 1)]
    assert [*seen, seeded] == [*seen, other_seeded] == expected
    assert [first, second] == [random.Random(rank).random() for rank in (0, 1)]
    log = Path("run/logs/rank-0.log").read_text()
    assert "no python for this rank; it starts anew" in log
    assert "no seeded" not in log


def resume(state, **options):
    options = {"batch_size": 4, "max_steps": 4, "run_dir": "run", "resume": True, **options}
    with session(**options) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with opened.run(state=state) as run:
            for _ in run.epochs():
                for points in run.batches([torch.ones(4, 1)] * 5):
                    opened.step(model(points).mean())


def test_tensors_and_nested_dicts_are_filled_in_place_and_new_names_keep_their_values():
    table = {"a": 1, "inner": {"b": torch.ones(2)}}
    resume({"table": table, "queue": torch.full((2,), 5.0)})
    inner, queue = {"b": (tensor := torch.zeros(2)), "c": "new"}, torch.zeros(2)
    table = {"a": 0, "inner": inner, "later": 3}
    resume({"table": table, "queue": queue}, max_steps=5)
    assert table == {"a": 1, "inner": inner, "later": 3}
    assert inner == {"b": tensor, "c": "new"}
    assert tensor.tolist() == [1, 1]
    assert queue.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({"a": 1}, [1]),
        (torch.ones(2), torch.ones(3)),
        (random.Random(0), torch.Generator()),
        (numpy.random.default_rng(0), numpy.random.Generator(numpy.random.MT19937(0))),
    ],
    ids=["dict and list", "shape", "generator", "bit generator"],
)
def test_value_of_another_kind_than_in_the_checkpoint_is_refused(saved, now):
    resume({"mine": saved})
    with pytest.raises(UsageError, match="mine of the checkpoint does not match") as caught:
        resume({"mine": now}, max_steps=5)
    assert caught.value.code == "HT621"


@pytest.mark.parametrize("value", [0.5, 3, "best", None])
def test_bare_value_is_refused_with_the_dict_to_write(value):
    with session(batch_size=4) as opened, pytest.raises(UsageError) as caught:
        opened.run(state={"best": value})
    assert caught.value.code == "HT616"
    assert caught.value.fixes[0].startswith(f'mine = {{"best": {value!r}}}')


@pytest.mark.parametrize(
    "value",
    [{"a": Path()}, [object()], {"g": random.Random()}],
    ids=["path", "object", "bare generator"],
)
def test_value_that_no_checkpoint_can_restore_is_refused_when_the_run_is_made(value):
    with session(batch_size=4) as opened, pytest.raises(UsageError, match="'mine'") as caught:
        opened.run(state={"mine": value})
    assert caught.value.code == "HT706"


class Replay:
    """A buffer with a state of its own, as of an environment on each rank."""

    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return {"values": torch.tensor(self.values), "size": len(self.values)}

    def load_state_dict(self, state):
        self.values = state["values"].tolist()


def save_objects():
    with session(batch_size=4, max_steps=2, run_dir="run") as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        state = {"own": Replay([opened.world.rank // 2]), "common": Replay([1, 2])}
        with opened.run(state=state) as run:
            for _ in run.steps(2):
                opened.step(model(torch.ones(4, 1)).mean())


def test_objects_whose_states_differ_between_ranks_are_named():
    ranks.values(ranks.run(3, save_objects))
    log = Path("run/logs/rank-0.log").read_text()
    assert log.count("own has another state on rank 2 than on rank 0") == 1
    assert "common has another state" not in log
