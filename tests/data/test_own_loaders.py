"""Loaders that the script makes: each rank takes its part, and the batch sizes fit."""

import itertools
import random
from pathlib import Path

import numpy
import pytest
import ranks
import torch
from battery import session
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from tqdm import tqdm

import hpctrain
from hpctrain.errors import UsageError

SAMPLES = 48
DATA = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32).reshape(-1, 1))


class Stream(IterableDataset):
    """Samples without a length: all of them, or every `step`-th."""

    def __init__(self, first=0, step=1):
        self.first, self.step = first, step

    def __iter__(self):
        for number in range(self.first, SAMPLES, self.step):
            yield torch.tensor([float(number)])


def seeded_generator():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": lambda session: DataLoader(DATA, 4),
    "shuffled": lambda session: DataLoader(DATA, 4, shuffle=True),
    "seeded": lambda session: DataLoader(DATA, 4, shuffle=True, generator=seeded_generator()),
    "progress bar": lambda session: tqdm(DataLoader(DATA, 4, shuffle=True), disable=True),
    "weighted": lambda session: DataLoader(
        DATA, 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    ),
    "batch sampler": lambda session: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=True)
    ),
    "stream": lambda session: DataLoader(Stream(), 4),
    "list": lambda session: [torch.ones(4, 1)] * 3,
    "distributed": lambda session: DataLoader(
        DATA,
        4,
        sampler=DistributedSampler(DATA, session.world.world_size, session.world.rank, seed=1),
    ),
    "divided stream": lambda session: DataLoader(
        Stream(session.world.rank, session.world.world_size), 4
    ),
}


def train(name, path="run", epochs=2, stop=None, **options):
    """Return the samples of each step on this rank, and rank 0's rows of metrics."""
    options = {"batch_size": 4, "log_every": 1, "run_dir": path, "seed": 5, **options}
    with session(**options) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
        loader, seen = LOADERS[name](opened), []
        with opened.run() as run:
            for _ in run.epochs(epochs):
                for batch in run.batches(loader):
                    points = batch[0] if isinstance(batch, list) else batch
                    seen.append(points.reshape(-1).int().tolist())
                    loss = model(points).mean()
                    opened.step(loss)
                    run.log(loss=loss)
        return seen, run.directory.rows()


UNDIVIDED = [
    *("shuffled", "stream", "list"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("in order", "seeded", "progress bar", "weighted", "batch sampler")
    ),
]


@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda size: f"{size} ranks"
)
@pytest.mark.parametrize("name", UNDIVIDED)
def test_loader_that_knows_nothing_of_ranks_is_divided(size, name):
    results = ranks.values(ranks.run(size, train, name, "run", 1))
    first = sorted(sample for seen, _ in results for step in seen for sample in step)
    if name in ("list", "weighted"):
        assert len({len(seen) for seen, _ in results}) == 1
    else:
        assert first == list(range(SAMPLES))


@pytest.mark.parametrize("name", UNDIVIDED)
def test_loader_of_the_script_trains_in_one_process(name):
    ranks.values(ranks.run(1, train, name))


def test_same_data_on_all_ranks_where_it_is_meant():
    for seen, _ in ranks.values(ranks.run(2, train_on_same_data)):
        assert [sample for step in seen for sample in step] == 2 * list(range(SAMPLES))


def train_on_same_data():
    return train("in order", same_data=True)


@pytest.mark.parametrize("name", ["distributed", "divided stream"])
def test_divided_loader_gives_each_sample_to_one_rank(name):
    results = ranks.values(ranks.run(3, train, name))
    first = [sample for seen, _ in results for step in seen[: len(seen) // 2] for sample in step]
    assert sorted(first) == list(range(SAMPLES))


def test_distributed_sampler_shuffles_anew_in_each_epoch():
    for seen, _ in ranks.values(ranks.run(2, train, "distributed")):
        half = len(seen) // 2
        assert seen[:half] != seen[half:]


class Unseeded(Stream):
    """Samples in an order that no seed repeats."""

    def __iter__(self):
        yield from random.SystemRandom().sample(list(super().__iter__()), SAMPLES)


LOADERS["unseeded"] = lambda session: DataLoader(Unseeded(), 4)


class InPlace:
    """Batches that are shuffled anew in each epoch, from the order of the one before."""

    def __init__(self):
        self.batches = torch.arange(SAMPLES).split(4)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.batches = random.sample(self.batches, len(self.batches))
        return iter(batch.tolist() for batch in self.batches)


LOADERS["in place"] = lambda session: DataLoader(DATA, batch_sampler=InPlace())


@pytest.mark.parametrize(
    ("name", "warnings"), [("unseeded", 1), ("in place", 1), ("stream", 0), ("shuffled", 0)]
)
def test_resume_warns_if_a_loader_does_not_repeat_its_order(name, warnings):
    cut = SAMPLES // 4 + 2  # inside the second epoch
    train(name, "cut", max_steps=cut)
    rest, _ = train(name, "cut", max_steps=cut + 3, resume=True)
    assert len(rest) == 3
    log = Path("cut/logs/rank-0.log").read_text()
    assert log.count("this epoch began with another batch") == warnings


@pytest.mark.parametrize(
    "name",
    ["seeded", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shuffled", "weighted"))],
)
def test_resumed_run_takes_the_samples_of_an_uninterrupted_one(name):
    uninterrupted, _ = train(name, "uninterrupted", max_steps=24)
    assert uninterrupted[:12] != uninterrupted[12:]
    cut, _ = train(name, "cut", max_steps=17)
    rest, _ = train(name, "cut", max_steps=24, resume=True)
    assert cut + rest == uninterrupted


def test_samples_per_second_counts_the_samples_of_the_loader(monkeypatch):
    """Count them where the loader has another batch size than the session."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    four = train("in order", "four", batch_size=None)[1]
    eight = train("in order", "eight", batch_size=4)[1]
    assert [r["samples_per_second"] for r in four] == [r["samples_per_second"] for r in eight]


def test_batch_size_of_the_loader_that_contradicts_the_session_is_refused():
    with pytest.raises(UsageError, match="batches of 4") as caught:
        train("in order", batch_size=32)
    assert caught.value.fixes[1] == "--batch-size 4"
    assert caught.value.code == "HT509"


def test_loader_of_whole_steps_that_contradicts_the_session_is_told_to_be_split():
    with pytest.raises(UsageError, match=r"batches of 4, but .* micro-batches of 2") as caught:
        train("in order", batch_size=2, global_batch=4)
    assert "split_batches=True" in caught.value.fixes[1]


def test_batch_size_of_the_command_line_is_set_once_the_session_is_open():
    args = hpctrain.options().parse_args([])
    assert args.batch_size is None
    with hpctrain.Session(args) as opened:
        assert args.batch_size == opened.batches.batch_size == 32


def test_batch_size_of_a_dict_is_set_once_the_session_is_open(tmp_path):
    given = {"global_batch": 8, "batch_size": None, "run_dir": str(tmp_path / "run")}
    with hpctrain.Session(given, max_steps=1) as opened, opened.run() as run:
        assert given["batch_size"] == opened.batches.batch_size == 8
    (start,) = run.directory.lines(run.directory.starts)
    assert start["own_options"] == {}
    assert (start["options"]["global_batch"], start["options"]["max_steps"]) == (8, 1)


def test_loader_without_batches_is_refused():
    LOADERS["no batches"] = lambda session: DataLoader(DATA, None)
    with pytest.raises(UsageError, match="batch_size=None") as caught:
        train("no batches", batch_size=None)
    assert caught.value.code == "HT509"


def draw_random_numbers():
    with session(batch_size=4, seed=11, run_dir="run") as opened:
        opened_with = (random.random(), numpy.random.rand(), torch.rand(()).item())
        split = numpy.random.permutation(20).tolist()
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        in_epoch = []
        with opened.run() as run:
            for _ in run.epochs(2):
                for points in run.batches(LOADERS["divided stream"](opened)):
                    opened.step(model(points).mean())
                    in_epoch.append((random.random(), numpy.random.rand()))
    return opened_with, split, in_epoch


def test_python_and_numpy_random_numbers_are_equal_on_all_ranks_before_the_batches():
    first, second, third = ranks.values(ranks.run(3, draw_random_numbers))
    assert first[:2] == second[:2] == third[:2]
    assert first[2] != second[2] != third[2]
    Path("run").rename("before")
    assert ranks.values(ranks.run(3, draw_random_numbers)) == [first, second, third]


def test_generators_of_python_and_numpy_are_left_alone_where_asked_for():
    random.seed(1)
    numpy.random.seed(1)
    expected = random.Random(1).random(), numpy.random.RandomState(1).rand()
    with session(batch_size=4, seed_everything=False):
        assert (random.random(), numpy.random.rand()) == expected
