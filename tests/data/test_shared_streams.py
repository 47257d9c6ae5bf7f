"""Streams of the script: each rank takes its part, all ranks end together, and a resume goes on."""

import importlib.util
import os
import sys
import time
import types
from pathlib import Path

import pytest
import ranks
import torch
from battery import session
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from hpctrain.errors import UsageError

SAMPLES, SIZE = 40, 4


@pytest.fixture(params=["ddp", "horovod"])
def backend(request, lacking):
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    return request.param


def place():
    """Return rank and world size, as a stream that splits itself finds them."""
    size = int(os.environ.get("HPCTRAIN_WORLD_SIZE", "1"))
    return int(os.environ.get("HPCTRAIN_RANK", "0")), size


class Stream(IterableDataset):
    """Shuffled numbers, and a random number with each; in each worker other ones, if `aware`."""

    def __init__(self, first=0, step=1, last=SAMPLES, aware=True):
        self.first, self.step, self.last, self.aware = first, step, last, aware

    def __iter__(self):
        order = torch.randperm(self.last).tolist()
        worker = get_worker_info() if self.aware else None
        if worker is not None:
            order = range(worker.id, self.last, worker.num_workers)
        for place, number in enumerate(order):
            if place % self.step == self.first:
                yield torch.tensor([number, torch.rand(()).item()], dtype=torch.float64)


class Counter(IterableDataset):
    """Numbers in order, with a length that is only the script's word."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def __iter__(self):
        for number in range(self.first, self.last):
            yield torch.tensor([number, 0.0], dtype=torch.float64)

    def __len__(self):
        return SAMPLES


class Stateful(DataLoader):
    """A loader with a state, like torchdata's; it counts what it has read from its data set."""

    read = 0
    begin_at = 0

    def __iter__(self):
        begin, self.begin_at = self.begin_at, 0
        self.given = begin
        for number, batch in enumerate(super().__iter__()):
            type(self).read += 1
            if number >= begin:
                self.given += 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.begin_at = state["given"]


def divided(last=SAMPLES):
    rank, size = place()
    return DataLoader(Stream(rank, size, last), SIZE)


def uneven():
    rank, _ = place()
    return DataLoader(Counter(100 * rank, 100 * rank + (9 if rank == 1 else SAMPLES)), SIZE)


def uneven_list():
    rank, _ = place()
    return [torch.full((SIZE, 2), float(10 * rank + n)).double() for n in range(7 - rank // 2)]


def half_equal():
    return [torch.full((SIZE, 2), float(min(place()[0], 1))).double()] * 4


def numbers():
    for number in range(10):
        yield torch.tensor([[number, torch.rand(()).item()]], dtype=torch.float64)


STREAMS = {
    "equal": lambda: DataLoader(Stream(), SIZE),
    "workers": lambda: DataLoader(Stream(), SIZE, num_workers=2),
    "unaware": lambda: DataLoader(Stream(aware=False), SIZE, num_workers=2),
    "constant": lambda: DataLoader(Counter(0, SAMPLES), SIZE, num_workers=2),
    "divided": divided,
    "uneven": uneven,
    "uneven-list": uneven_list,
    "half-equal": half_equal,
    "list": lambda: [torch.full((SIZE, 2), float(n)).double() for n in range(7)],
    "stateful": lambda: Stateful(Counter(0, SAMPLES), SIZE),
    "stateful-divided": lambda: Stateful(Counter(100 * place()[0], 100 * place()[0] + 30), SIZE),
}


def train(name, path="run", epochs=1, slots=None, kill=None, **options):
    """Return this rank's micro-batches with their weights, and the weights of the model."""
    size = place()[1]
    accumulate = (slots or size) // size
    options = {"accumulate": accumulate, "run_dir": path, "seed": 5, **options}
    with session(precision="fp64", **options) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
        loader, seen = STREAMS[name]() if name != "generator" else None, []
        with opened.run() as run:
            for _ in run.epochs(epochs):
                for rows in run.batches(numbers() if loader is None else loader):
                    seen.append((rows.tolist(), opened.weight, torch.rand(()).item()))
                    opened.step((model(rows[:, :1]) * rows[:, -1:]).mean())
                    if kill is not None and run.step >= kill:
                        end_after_a_checkpoint(run.directory)
        return seen, [value.tolist() for value in model.state_dict().values()], Stateful.read


def end_after_a_checkpoint(directory):
    """End this process as kill -9 does, once a checkpoint is complete."""
    deadline = time.monotonic() + 60
    while not directory.steps():
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.01)
    Path(f"ended-{place()[0]}").touch()
    os._exit(9)


def check_ended():
    assert sorted(path.name for path in Path().glob("ended-*")) == ["ended-0", "ended-1", "ended-2"]


def start(name, keywords):
    return train(name, **keywords)


def in_world(size, name, backend="ddp", **keywords):
    env = {"TEST_BACKEND": backend if size > 1 else "auto"}
    return ranks.values(ranks.run(size, start, name, keywords, env=env))


def global_order(results, slots=6):
    """Return all micro-batches with their weights, in the order of the ranks."""
    size = len(results)
    accumulate = slots // size
    return [
        results[rank][0][step * accumulate + index][:2]
        for step in range(len(results[0][0]) // accumulate)
        for index in range(accumulate)
        for rank in range(size)
    ]


@pytest.mark.parametrize("name", ["equal", "generator", "workers", "list"])
def test_stream_that_is_equal_on_all_ranks_is_split_alike_in_every_world(name):
    alone, two, three = (
        global_order(in_world(size, name, path=f"run-{size}", slots=6)) for size in (1, 2, 3)
    )
    assert alone == two == three
    used = [tuple(row) for rows, weight in alone if weight for row in rows]
    if name == "equal":
        assert sorted(number for number, _ in used) == list(range(SAMPLES))
    assert len(alone) == 12  # the last step of 6 has fewer batches


def told(text, path="run"):
    """Return how often rank 0 has told a text, and how often the others have."""
    logs = [Path(path, "logs", f"rank-{rank}.log").read_text() for rank in range(3)]
    return logs[0].count(text), sum(log.count(text) for log in logs[1:])


def test_split_of_equal_streams_is_told_once(backend):
    in_world(3, "equal", backend, epochs=2)
    assert told("all ranks begin with the same batch")[0] == 1


def test_stream_that_splits_itself_is_left_alone(backend):
    results = in_world(3, "divided", backend)
    assert len({len(seen) for seen, *_ in results}) == 1
    used = [row[0] for seen, *_ in results for rows, *_ in seen for row in rows]
    assert len(used) == len(set(used)) >= 36
    assert told("the ranks begin with different batches")[0] == 1


def test_ranks_with_unequal_streams_end_together_and_the_first_to_end_is_named(backend):
    results = in_world(3, "uneven", backend, epochs=2)
    assert [len(seen) for seen, *_ in results] == [6, 6, 6]
    assert told("rank 1: no more batches") == (2, 0)  # once in each epoch


def test_ranks_with_lists_of_unequal_length_end_together(backend):
    results = in_world(3, "uneven-list", backend)
    assert [len(seen) for seen, *_ in results] == [6, 6, 6]
    assert told("rank 2: no more batches") == (1, 0)


def train_with_wrapped_loader():
    """Return the numbers of samples, and the weights, of a wrapped loader of the session."""
    data = TensorDataset(torch.arange(20.0).reshape(-1, 1))
    with session(batch_size=SIZE, run_dir="run") as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        loader, seen = opened.loader(data, drop_last=False), []
        with opened.run() as run:
            for _ in run.epochs(2):
                for (rows,) in run.batches(batch for batch in loader):
                    seen.append((len(rows), opened.weight))
                    opened.step(model(rows).mean())
        return seen, opened.weight


def test_weights_of_a_wrapped_loader_belong_to_the_batch_in_use(backend):
    results = ranks.values(ranks.run(3, train_with_wrapped_loader, env={"TEST_BACKEND": backend}))
    for (seen, after), last in zip(results, [1.5, 1.5, 0.0], strict=True):
        assert seen == 2 * [(4, 1.0), (4, last)]
        assert after == 1.0


def test_ranks_of_which_only_some_have_the_same_batch_are_refused():
    for result in ranks.run(3, start, "half-equal", {}):
        assert isinstance(result, UsageError), result
        assert result.code == "HT508"
        assert "ranks 1 and 2 have the same first batch" in result.found


@pytest.mark.parametrize("size", [1, 3])
def test_workers_that_all_read_the_same_are_refused(size):
    for result in ranks.run(size, start, "constant", {}):
        assert isinstance(result, UsageError), result
        assert result.code == "HT508"
        assert "get_worker_info()" in result.fixes[0]


def test_same_data_leaves_a_stream_alone():
    results = in_world(3, "list", same_data=True)
    assert [len(seen) for seen, *_ in results] == [7, 7, 7]


def kill_and_resume(name, backend):
    whole = in_world(3, name, backend, path="whole", epochs=2, slots=3)
    options = {"path": "killed", "epochs": 2, "slots": 3, "checkpoint_every": 1, "kill": 2}
    ranks.run(3, start, name, options, env={"TEST_BACKEND": backend})
    check_ended()
    return whole, in_world(3, name, backend, path="killed", epochs=2, slots=3, resume=True)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(("workers", "ddp"), ("generator", "ddp"), ("uneven", "ddp")),
        *(
            pytest.param(name, "horovod", marks=pytest.mark.slow)
            for name in ("workers", "generator", "uneven", "equal")
        ),
    ],
    indirect=["backend"],
)
def test_resumed_stream_has_the_bits_of_an_undisturbed_one(name, backend):
    whole, resumed = kill_and_resume(name, backend)
    for (seen, weights, _), (rest, end, _) in zip(whole, resumed, strict=True):
        assert 0 < len(rest) < len(seen)
        assert rest == seen[-len(rest) :]
        assert end == weights


@pytest.mark.parametrize("name", ["stateful", "stateful-divided"])
def test_state_of_a_stream_is_saved_and_loaded(name, backend):
    whole, resumed = kill_and_resume(name, backend)
    for (seen, weights, _), (rest, end, _) in zip(whole, resumed, strict=True):
        assert 0 < len(rest) < len(seen)
        assert rest == seen[-len(rest) :]
        assert end == weights
    assert told("cannot skip", "killed") == (0, 0)


class OfHuggingFace(IterableDataset):
    """Stand-in of datasets.IterableDataset, which that library splits."""

    _distributed = None

    def __init__(self, rank=0, size=1):
        self.rank, self.size, self.epoch = rank, size, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.rank, SAMPLES, self.size):
            yield torch.tensor([number, self.epoch], dtype=torch.float64)


def of_hugging_face():
    library = types.ModuleType("datasets")
    library.IterableDataset = OfHuggingFace
    distributed = types.ModuleType("datasets.distributed")
    distributed.split_dataset_by_node = lambda dataset, rank, size: OfHuggingFace(rank, size)
    sys.modules |= {"datasets": library, "datasets.distributed": distributed}
    STREAMS["hugging-face"] = lambda: DataLoader(OfHuggingFace(), SIZE)
    return train("hugging-face", epochs=2)


def test_stream_of_hugging_face_is_split_by_its_library():
    results = ranks.values(ranks.run(3, of_hugging_face))
    for rank, (seen, *_) in enumerate(results):
        rows = [row for rows, *_ in seen for row in rows]
        assert {number % 3 for number, _ in rows} == {rank}
        assert {epoch for _, epoch in rows} == {0, 1}


def evaluate(name):
    with session() as opened:
        loader = opened.prepare(STREAMS[name]())
        return [row[0] for rows in loader for row in rows.tolist()]


@pytest.mark.parametrize("name", ["equal", "divided"])
def test_iteration_of_a_prepared_stream_is_an_evaluation(name):
    results = ranks.values(ranks.run(3, evaluate, name))
    assert sorted(number for seen in results for number in seen) == list(range(SAMPLES))


def draw(path="run", kill=None, number=10, **options):
    """Train with batches that the loop draws; return what was drawn, and the weights."""
    with session(precision="fp64", run_dir=path, batch_size=SIZE, seed=5, **options) as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, _ = opened.prepare(model, optimizer)
        drawn, rates = [], []
        with opened.run() as run:
            for step in run.steps(number):
                x = torch.rand(SIZE, 1).double()
                drawn.append((step, x.tolist()))
                rates.append(optimizer.param_groups[0]["lr"])
                loss = model(x).mean()
                opened.step(loss)
                run.log(loss=loss)
                if kill is not None and run.step >= kill:
                    end_after_a_checkpoint(run.directory)
        weights = [value.tolist() for value in model.state_dict().values()]
        return drawn, weights, rates, run.directory.steps(), len(run.directory.rows())


def draw_with(keywords):
    return draw(**keywords)


def test_steps_without_a_loader_resume_with_the_bits_of_an_undisturbed_run(backend):
    env = {"TEST_BACKEND": backend}
    options = {"checkpoint_every": 2, "log_every": 1, "accumulate": 2}
    whole = ranks.values(ranks.run(3, draw_with, {"path": "whole", **options}, env=env))
    assert [step for step, _ in whole[0][0]] == [n // 2 for n in range(20)]
    assert whole[0][0] != whole[1][0]
    ranks.run(3, draw_with, {"path": "killed", "kill": 5, **options}, env=env)
    check_ended()
    again = {"path": "killed", "resume": True, **options}
    for one, other in zip(
        whole, ranks.values(ranks.run(3, draw_with, again, env=env)), strict=True
    ):
        assert 0 < len(other[0]) < 20
        assert other[0] == one[0][-len(other[0]) :]
        assert other[1] == one[1]
        assert other[3][-1] == 10
        assert other[4] == one[4] == 10


def test_max_steps_hold_in_steps():
    drawn, *_ = draw("other", max_steps=3)
    assert [step for step, _ in drawn] == [0, 1, 2]
