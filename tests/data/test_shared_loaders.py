"""DataLoaders of the script: the ranks share the order of their samplers, in every world alike."""

import importlib.util
import os
import random
import time
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
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from tqdm import tqdm

from hpctrain.errors import UsageError

SAMPLES, SIZE, SLOTS = 50, 4, 6
PLAIN = TensorDataset(torch.arange(SAMPLES, dtype=torch.float64).reshape(-1, 1))


@pytest.fixture(params=["ddp", "horovod"])
def backend(request, lacking):
    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    return request.param


class Noisy(Dataset):
    """Samples with random numbers, and the number of samples that were fetched."""

    def __init__(self, length=SAMPLES):
        self.length, self.fetched = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fetched += 1
        numbers = torch.rand(()).item(), random.random(), numpy.random.rand()
        return torch.tensor([index, *numbers], dtype=torch.float64)


class Whole(Noisy):
    """Samples that are fetched as a whole batch, a tensor."""

    def __getitems__(self, indices):
        return torch.stack([self[index] for index in indices])


class Augmented(Dataset):
    """Images that torchvision changes at random: the mean of each channel."""

    def __init__(self):
        from torchvision.transforms import v2

        self.change = v2.Compose([v2.RandomResizedCrop(8), v2.RandAugment(), v2.RandomErasing()])

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        pixels = torch.arange(3 * 16 * 16, dtype=torch.uint8).reshape(3, 16, 16)
        means = self.change(pixels + index).double().mean((1, 2)) / 255
        return torch.tensor([index, *means], dtype=torch.float64)


def collate(samples):
    """Return a batch with one more random number in each row."""
    return torch.cat([torch.stack(samples), torch.rand(len(samples), 1).double()], 1)


class Grouped(Sampler):
    """Batches of even or odd indices, drawn with the global generators, of different sizes."""

    def __iter__(self):
        for _ in range(13):
            size = random.choice([3, 4])
            yield (
                2 * numpy.random.randint(SAMPLES // 2, size=size) + random.randint(0, 1)
            ).tolist()

    def __len__(self):
        return 13


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield int(torch.randint(SAMPLES, ()))

    def __len__(self):
        raise TypeError


class EvenIndices(Sampler):
    """A sampler that knows the epoch, as those of many libraries."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.epoch % 2, SAMPLES, 2))

    def __len__(self):
        return SAMPLES // 2


class Transformed(DataLoader):
    """A DataLoader with an __iter__ of its own."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 0


def weighted():
    return WeightedRandomSampler([1.0 + n for n in range(SAMPLES)], SAMPLES)


LOADERS = {
    "in-order": lambda: DataLoader(Noisy(), SIZE),
    "weighted": lambda: DataLoader(Noisy(), SIZE, sampler=weighted(), collate_fn=collate),
    "workers": lambda: DataLoader(
        Noisy(), SIZE, sampler=weighted(), collate_fn=collate, num_workers=2
    ),
    "grouped": lambda: DataLoader(
        Noisy(),
        batch_sampler=Grouped(),
        collate_fn=collate,
        num_workers=1,
        persistent_workers=True,
    ),
    "whole-batches": lambda: DataLoader(
        PLAIN, batch_size=None, sampler=BatchSampler(RandomSampler(PLAIN), SIZE, False)
    ),
    "with-epoch": lambda: DataLoader(Noisy(), SIZE, sampler=EvenIndices()),
    "subclass": lambda: Transformed(Noisy(), SIZE, shuffle=True, num_workers=1),
    "bar": lambda: tqdm(DataLoader(Noisy(), SIZE, shuffle=True), disable=True),
    "dropping": lambda: DataLoader(Noisy(), SIZE, shuffle=True, drop_last=True),
    "seeded": lambda: DataLoader(
        Noisy(), SIZE, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "augmented": lambda: DataLoader(Augmented(), SIZE, shuffle=True, num_workers=2),
    "endless": lambda: DataLoader(Noisy(), SIZE, sampler=Endless()),
}


def train(
    make, path="run", epochs=2, prepared=False, split=False, kill=None, run_slots=SLOTS, **options
):
    """Return this rank's micro-batches with their weights, and the weights of the model."""
    size = int(os.environ["HPCTRAIN_WORLD_SIZE"]) if "HPCTRAIN_WORLD_SIZE" in os.environ else 1
    options = {"accumulate": run_slots // size, "run_dir": path, "seed": 5, **options}
    with session(precision="fp64", **options) as opened:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        loader = LOADERS[make]() if isinstance(make, str) else make()
        if prepared:
            model, _, loader = opened.prepare(model, optimizer, loader, split_batches=split)
        else:
            model, _ = opened.prepare(model, optimizer)
        seen = []
        with opened.run() as run:
            for _ in run.epochs(epochs):
                for batch in run.batches(loader):
                    rows = batch[0] if isinstance(batch, list) else batch
                    seen.append((rows.tolist(), opened.weight, torch.rand(()).item()))
                    opened.step((model(rows[:, :1]) * rows[:, -1:]).mean())
                    if kill is not None and run.step >= kill:
                        end_after_a_checkpoint(run.directory)
        return seen, [value.tolist() for value in model.state_dict().values()]


def end_after_a_checkpoint(directory):
    """End this process as kill -9 does, once a checkpoint is complete."""
    deadline = time.monotonic() + 60
    while not directory.steps():
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.01)
    Path(f"ended-{os.environ['HPCTRAIN_RANK']}").touch()
    os._exit(9)


def steps_of(results, size):
    """Return the micro-batches of each step, with their weights, in the order of all ranks."""
    accumulate, steps = SLOTS // size, []
    for number in range(len(results[0][0]) // accumulate):
        parts = [
            results[rank][0][number * accumulate + index][:2]
            for index in range(accumulate)
            for rank in range(size)
        ]
        steps.append(parts)
    return steps


def in_world(size, *arguments, env=None, **keywords):
    return ranks.values(ranks.run(size, start, size, arguments, keywords, env=env))


def start(size, arguments, keywords):
    return train(*arguments, **keywords)


@pytest.mark.parametrize(
    "name",
    [
        *("workers", "grouped", "whole-batches"),
        pytest.param("augmented", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("in-order", "weighted", "with-epoch", "subclass", "bar", "seeded")
        ),
    ],
)
def test_loader_gives_the_same_samples_and_random_numbers_in_every_world(name):
    alone, two, three = (steps_of(in_world(size, name, f"run-{size}"), size) for size in (1, 2, 3))
    assert alone == two == three
    half = len(alone) // 2
    assert alone[:half] != alone[half:]


def test_loader_gives_the_same_samples_over_horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    results = [
        in_world(3, "workers", name, env={"TEST_BACKEND": name}) for name in ("ddp", "horovod")
    ]
    assert [seen for seen, _ in results[0]] == [seen for seen, _ in results[1]]


@pytest.mark.parametrize("name", ["in-order", "dropping"])
def test_end_of_an_epoch_has_each_sample_once_or_drops_the_last_step(name):
    steps = steps_of(in_world(3, name, epochs=1, prepared=True), 3)
    used = [[row[0] for rows, weight in step if weight for row in rows] for step in steps]
    flat = [sample for step in used for sample in step]
    assert [len(step) for step in used] == [24, 24, *([2] if name == "in-order" else [])]
    assert len(set(flat)) == len(flat)
    if name == "in-order":
        assert flat == list(range(SAMPLES))
        # A mean over 6 slots in which one batch has the weight 6 is the mean of that batch.
        assert [weight for _, weight in steps[-1]] == [6, 0, 0, 0, 0, 0]
        assert all(rows == steps[-1][0][0] for rows, _ in steps[-1])


def test_last_step_with_a_smaller_batch_is_weighted_by_samples():
    seen, _ = train(lambda: DataLoader(Noisy(22), SIZE), epochs=1)
    assert [weight for _, weight, _ in seen] == [6 * n / 22 for n in (4, 4, 4, 4, 4, 2)]


def test_collate_fn_gets_what_the_data_set_returns_for_a_batch():
    seen, _ = train(lambda: DataLoader(Whole(22), SIZE, collate_fn=lambda batch: batch), epochs=1)
    assert [[row[0] for row in rows] for rows, _, _ in seen[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def kill_and_resume(size, name, backend, **keywords):
    env = {"TEST_BACKEND": backend}
    whole = in_world(size, name, "whole", epochs=3, env=env, **keywords)
    ranks.run(
        size,
        start,
        size,
        (name, "killed"),
        {"epochs": 3, "checkpoint_every": 1, "kill": 4, **keywords},
        env=env,
    )
    assert len(list(Path().glob("ended-*"))) == size
    resumed = in_world(size, name, "killed", epochs=3, resume=True, env=env, **keywords)
    return whole, resumed


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("workers", "ddp"),
        pytest.param("grouped", "ddp", marks=pytest.mark.slow),
        pytest.param("workers", "horovod", marks=pytest.mark.slow),
        pytest.param("weighted", "ddp", marks=pytest.mark.slow),
        pytest.param("augmented", "ddp", marks=pytest.mark.slow),
        pytest.param("grouped", "horovod", marks=pytest.mark.slow),
    ],
    indirect=["backend"],
)
def test_resume_after_a_kill_has_the_bits_of_an_undisturbed_run(name, backend):
    whole, resumed = kill_and_resume(3, name, backend)
    for (seen, weights), (rest, end) in zip(whole, resumed, strict=True):
        assert 0 < len(rest) < len(seen)
        assert rest == seen[-len(rest) :]
        assert end == weights


def test_resume_on_fewer_ranks_goes_on_in_the_same_order():
    options = {"global_batch": SIZE * SLOTS, "elastic": True, "epochs": 2}
    whole = steps_of(in_world(1, "weighted", "whole", **options), 1)
    first = steps_of(in_world(3, "weighted", "cut", max_steps=4, **options), 3)
    rest = steps_of(in_world(2, "weighted", "cut", max_steps=6, resume=True, **options), 2)
    assert first + rest == whole


def test_resume_inside_an_epoch_fetches_no_earlier_sample():
    fetch_from(None, 3)
    assert fetch_from(True, 4) == SIZE * 2


def fetch_from(resume, last):
    data = Noisy()
    LOADERS["counted"] = lambda: DataLoader(data, SIZE)
    train("counted", run_slots=1, max_steps=last, resume=resume)
    return data.fetched


@pytest.mark.parametrize(
    "backend", ["ddp", pytest.param("horovod", marks=pytest.mark.slow)], indirect=True
)
def test_already_divided_loader_is_left_alone_and_skips_by_indices(backend):
    whole, resumed = kill_and_resume(3, distributed, backend, accumulate=1)
    for (seen, weights), (rest, end) in zip(whole, resumed, strict=True):
        assert rest == seen[-len(rest) :]
        assert end == weights
    first = [row[0] for seen, _ in whole for rows, _, _ in seen[:5] for row in rows]
    assert set(first) == set(range(SAMPLES))
    assert len(first) == SAMPLES + 1  # DistributedSampler pads


def distributed():
    size, rank = int(os.environ["HPCTRAIN_WORLD_SIZE"]), int(os.environ["HPCTRAIN_RANK"])
    sampler = DistributedSampler(Noisy(), size, rank, seed=1)
    return DataLoader(Noisy(), SIZE, sampler=sampler)


def test_sizes_of_a_divided_loader_may_differ_and_all_ranks_end_together(backend):
    results = in_world(3, uneven, epochs=2, accumulate=1, env={"TEST_BACKEND": backend})
    assert [len(seen) for seen, _ in results] == [4, 4, 4]


class Uneven(Sampler):
    num_replicas, rank = 3, 0

    def __iter__(self):
        return iter(range(len(self)))

    def __len__(self):
        return 8 if self.rank == 1 else 40


def uneven():
    sampler = Uneven()
    sampler.rank = int(os.environ["HPCTRAIN_RANK"])
    return DataLoader(Noisy(), SIZE, sampler=sampler)


def test_split_batches_cuts_each_batch_into_the_micro_batches_of_a_step():
    steps = [
        steps_of(in_world(size, split_24, f"run-{size}", epochs=1, prepared=True, split=True), size)
        for size in (1, 2, 3)
    ]
    assert steps[0] == steps[1] == steps[2]
    assert [[len(rows) for rows, _ in step] for step in steps[0]] == [[4] * 6, [4] * 6, [1] * 6]
    assert [weight for _, weight in steps[0][2]] == [3, 3, 0, 0, 0, 0]


def split_24():
    return DataLoader(Noisy(), 24, shuffle=True)


def test_split_batches_that_do_not_divide_are_refused_with_the_nearest():
    with pytest.raises(UsageError) as caught, session(accumulate=6) as opened:
        opened.prepare(DataLoader(Noisy(), 20), split_batches=True)
    assert caught.value.code == "HT505"
    assert caught.value.fixes == ("batch_size=18", "batch_size=24")


def test_prepared_loader_sets_the_batch_size():
    with session() as opened:
        opened.prepare(DataLoader(Noisy(), SIZE))
        assert opened.batches.global_batch == opened.batches.batch_size == SIZE


@pytest.mark.parametrize("given", [{"batch_size": 8}, {"global_batch": 48}], ids=str)
def test_prepared_loader_that_contradicts_an_option_is_refused(given):
    with pytest.raises(UsageError, match=r"batches of 4, but a session with .* 8") as caught:
        train("in-order", prepared=True, **given)
    assert caught.value.code == "HT509"


def evaluate(name):
    with session() as opened:
        loader = opened.prepare(LOADERS[name]())
        twice = [[batch[:, 0].tolist() for batch in loader] for _ in range(2)]
        return twice, opened.weight


@pytest.mark.parametrize("name", ["in-order", "subclass"])
def test_iteration_of_a_prepared_loader_is_an_evaluation(name, backend):
    results = ranks.values(ranks.run(3, evaluate, name, env={"TEST_BACKEND": backend}))
    for turn in range(2):
        batches = [twice[turn] for twice, _ in results]
        assert [len(one) for one in batches] == [5, 4, 4]
        assert sorted(n for one in batches for batch in one for n in batch) == list(range(SAMPLES))
        if name == "in-order":
            assert batches[1][0] == [4, 5, 6, 7]


def test_rest_of_the_loader_stays_and_the_loader_itself_too():
    LOADERS["initialized"] = lambda: loader
    loader = DataLoader(Opened(), SIZE, num_workers=1, worker_init_fn=open_data_set)
    sampler, before = loader.batch_sampler, loader.dataset
    seen, _ = train("initialized", epochs=1, run_slots=1)
    assert {row[1] for rows, _, _ in seen for row in rows} == {7.0}
    assert loader.batch_sampler is sampler
    assert loader.dataset is before


class Opened(Noisy):
    """A data set that is opened in its worker."""

    handle = 0.0

    def __getitem__(self, index):
        return torch.tensor([index, self.handle], dtype=torch.float64)


def open_data_set(_):
    get_worker_info().dataset.handle = 7.0


class Cached(DataLoader):
    """A DataLoader that keeps the iterator of its first batches, as timm's for many epochs."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.batches = super().__iter__()

    def __iter__(self):
        yield from self.batches


def test_loader_that_does_not_read_its_sampler_is_refused():
    LOADERS["cached"] = lambda: Cached(Noisy(), SIZE)
    with pytest.raises(UsageError, match="does not read its batch_sampler") as caught:
        train("cached")
    assert caught.value.code == "HT508"


class Unseeded(Sampler):
    """A sampler with a generator that each rank seeds anew."""

    def __iter__(self):
        yield from numpy.random.default_rng().permutation(SAMPLES).tolist()

    def __len__(self):
        return SAMPLES


def unseeded():
    return DataLoader(Noisy(), SIZE, sampler=Unseeded())


def test_sampler_that_draws_another_order_on_each_rank_is_refused(backend):
    results = ranks.run(3, start, 3, (unseeded,), {}, env={"TEST_BACKEND": backend})
    for result in results:
        assert isinstance(result, UsageError), result
        assert result.code == "HT611"


def test_loader_with_fewer_batches_than_a_step_is_refused_if_it_drops_the_last():
    with pytest.raises(UsageError, match="5 batches, but a step takes 6") as caught:
        train(lambda: DataLoader(Noisy(20), SIZE, drop_last=True))
    assert caught.value.code == "HT506"


def test_endless_sampler_trains_to_the_last_step():
    seen, _ = train("endless", max_steps=5, epochs=None)
    assert len(seen) == 5 * SLOTS
