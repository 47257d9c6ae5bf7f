"""Samplers, loaders and the digits: equal steps in every world."""

import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.arguments import Batches
from hpctrain.cluster.world import World
from hpctrain.data import (
    EvaluationSampler,
    Images,
    Loader,
    TrainingSampler,
    augmentation,
    digits,
)
from hpctrain.data.feed import Placement, feed
from hpctrain.errors import UsageError
from hpctrain.process.pytree import map_tensors

CPU = torch.device("cpu")


def worlds_of(size):
    return [World(rank, size, rank, size, 0, 1) for rank in range(size)]


def epoch_of(length, batches, size, epoch=0, first=0, seed=3):
    """Return, for each step, the micro-batches of all ranks in the order of the global batch."""
    streams = []
    for world in worlds_of(size):
        sampler = TrainingSampler(length, batches, world, seed)
        sampler.epoch, sampler.first = epoch, first
        streams.append(list(sampler))
        assert len(streams[-1]) == len(sampler)
    in_order = [each for together in zip(*streams, strict=True) for each in together]
    each = batches.accumulate * size
    return [in_order[start : start + each] for start in range(0, len(in_order), each)]


@given(
    batch_size=st.integers(1, 5),
    factor=st.integers(1, 3),
    steps=st.integers(1, 4),
    rest=st.integers(0, 11),
    epoch=st.integers(0, 3),
)
def test_sampler_gives_the_same_micro_batches_for_every_world_size(
    batch_size, factor, steps, rest, epoch
):
    # One to four ranks divide 12 micro-batches and their multiples.
    total = batch_size * 12 * factor
    length = total * steps + rest
    alone = epoch_of(length, Batches(total, batch_size, 12 * factor), 1, epoch)
    assert len(alone) == length // total
    order = [index for step in alone for micro_batch in step for index in micro_batch]
    assert len(set(order)) == len(order) == total * (length // total)
    assert set(order) <= set(range(length))
    for size in (2, 3, 4):
        batches = Batches(total, batch_size, 12 * factor // size)
        assert epoch_of(length, batches, size, epoch) == alone


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_sampler_takes_the_next_samples_for_any_batch_size(size, accumulate):
    (epoch,) = zip(*epoch_of(1000, Batches(60, 60, 1), 1), strict=True)
    order = [index for step in epoch for index in step]
    total = 3 * accumulate * size
    for number, step in enumerate(epoch_of(1000, Batches(total, 3, accumulate), size)[:4]):
        samples = [index for micro_batch in step for index in micro_batch]
        assert samples == order[number * total : (number + 1) * total]


def test_sampler_resumes_in_the_middle_of_an_epoch():
    batches = Batches(12, 2, 2)
    epoch = epoch_of(100, batches, 3, epoch=1)
    for first_step in range(len(epoch) + 1):
        first = first_step * batches.accumulate
        assert epoch_of(100, batches, 3, epoch=1, first=first) == epoch[first_step:]


def test_sampler_shuffles_by_epoch_and_seed():
    batches = Batches(10, 10, 1)
    orders = [
        str(epoch_of(100, batches, 1, epoch, seed=seed)) for epoch in range(3) for seed in range(3)
    ]
    assert len(set(orders)) == 9
    assert orders[0] == str(epoch_of(100, batches, 1, 0, seed=0))


def test_sampler_refuses_a_global_batch_larger_than_the_data_set():
    with pytest.raises(UsageError, match=r"100 samples, but a global batch of 128") as caught:
        TrainingSampler(100, Batches(128, 64, 1), worlds_of(2)[0], 0)
    assert caught.value.fixes == ("--global-batch 100, without --batch-size and --accumulate",)
    assert caught.value.code == "HT506"
    assert TrainingSampler(100, Batches(100, 50, 1), worlds_of(2)[0], 0).steps == 1


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 6))
def test_even_evaluation_has_as_many_batches_on_each_rank(length, batch_size, size):
    """Each sample counts once, in order over the ranks of a round, and no batch is empty."""
    if 0 < length < size:
        with pytest.raises(UsageError, match="samples for an evaluation by"):
            EvaluationSampler(length, batch_size, World(0, size, 0), even=True)
        return
    samplers = [
        EvaluationSampler(length, batch_size, World(rank, size, 0), even=True)
        for rank in range(size)
    ]
    rounds = list(zip(*samplers, strict=True))
    assert [index for one in rounds for batch in one for index in batch] == list(range(length))
    assert all(0 < len(batch) <= batch_size + 1 for one in rounds for batch in one)
    assert not any(sampler.uneven or sampler.idle for sampler in samplers)
    assert {len(sampler) for sampler in samplers} == {len(rounds)}


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 6))
def test_evaluation_sampler_sees_every_sample_once(length, batch_size, size):
    batches = []
    for world in worlds_of(size):
        sampler = EvaluationSampler(length, batch_size, world)
        own = list(sampler)
        assert len(own) == len(sampler)
        assert all(1 <= len(batch) <= batch_size for batch in own)
        batches += own
    assert sorted(index for batch in batches for index in batch) == list(range(length))


def test_digits_come_with_the_package():
    train, test = digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.classes == test.classes == 10
    assert train.size == test.size == (8, 8)
    for digit in range(10):
        in_test, in_train = (int((part.targets == digit).sum()) for part in (test, train))
        assert abs(in_test - 0.2 * (in_test + in_train)) <= 2


def test_images_are_normalised_by_the_training_set():
    train, test = digits()
    images = torch.stack([image for image, _ in train.__getitems__(range(len(train)))])
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 1e-5
    assert abs(float(images.std()) - 1) < 1e-3
    assert (test.mean, test.std) == (train.mean, train.std)
    image, target = train[5]
    assert torch.equal(image, images[5])
    assert target.dtype == torch.int64
    assert int(target) == int(train.targets[5])


Pair = namedtuple("Pair", "left right")


def test_nested_batches_move_to_device_and_dtype():
    numbers, classes = torch.ones(2), torch.arange(2)
    batch = {"x": [numbers, "name"], "y": (classes, None), "z": Pair(numbers, 7)}
    meta = torch.device("meta")
    moved = Placement(meta, torch.float64)(batch)
    assert moved["x"][0].device == moved["y"][0].device == meta
    assert moved["x"][0].dtype == torch.float64
    assert moved["y"][0].dtype == torch.int64
    assert moved["x"][1] == "name"
    assert moved["y"][1] is None
    assert isinstance(moved["y"], tuple)
    assert isinstance(moved["z"], Pair)
    assert moved["z"].right == 7
    assert Placement(CPU)(numbers) is numbers
    batches = iter([numbers])
    assert feed(batches, Placement(CPU)) is batches
    images = torch.ones(2, 3, 4, 5)
    placed = Placement(CPU, channels_last=True)([images, numbers])
    assert placed[0].is_contiguous(memory_format=torch.channels_last)
    assert placed[1] is numbers


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_loader_gives_the_samples_of_its_sampler(dtype):
    images = Images(torch.arange(24, dtype=torch.uint8).reshape(6, 2, 2), torch.arange(6), 0.0, 1.0)
    sampler = EvaluationSampler(6, 2, World(1, 2, 1))
    loader = Loader(images, sampler, Placement(CPU, dtype), workers=0, seed=0, rank=1)
    ((pixels, targets),) = list(loader)
    assert len(loader) == 1
    assert targets.tolist() == [2, 3]
    assert pixels.dtype == (dtype or torch.float32)
    assert pixels[:, 0, 0, 0].tolist() == [8.0, 12.0]


def test_loader_without_workers_leaves_the_worker_init_fn_out():
    sampler = EvaluationSampler(24, 24, World(0, 1, 0))
    loader = Loader(
        Noisy(), sampler, Placement(CPU), workers=0, seed=0, rank=0, worker_init_fn=pytest.fail
    )
    assert [len(batch) for batch in loader] == [24]


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_on_device_gets_whole_batches_before_the_precision(workers):
    seen = []

    def halve(batch):
        seen.append(batch[0].dtype)
        return batch[0] / 2, batch[1]

    images = torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2)
    samples = torch.utils.data.TensorDataset(images, torch.arange(6))
    sampler = EvaluationSampler(6, 4, World(0, 1, 0))
    placement = Placement(CPU, torch.float64, channels_last=True)
    loader = Loader(samples, sampler, placement, workers, seed=0, rank=0, on_device=halve)
    batches = list(loader)
    assert seen == [torch.uint8] * 2
    assert [pixels.dtype for pixels, _ in batches] == [torch.float64] * 2
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p, _ in batches)
    assert torch.cat([pixels for pixels, _ in batches]).equal(images / 2)


class StreamStandIn:
    """A stand-in for CUDA's streams that records which stream waits for which."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.events.append("aside")

    def __exit__(self, *error):
        self.events.append("back")


def test_loader_copies_to_gpu_on_a_side_stream(monkeypatch):
    events = []
    compute, aside = StreamStandIn("compute", events), StreamStandIn("copy", events)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: aside)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(Placement, "_place", lambda self, tensor: events.append("copy") or tensor)
    batches = feed(iter([torch.ones(1), torch.ones(1)]), Placement(torch.device("cuda")))
    for _ in batches:
        events.append("step")
    assert events == ["aside", "copy", "back", "compute waits for copy", "step"] * 2


@given(
    length=st.integers(1, 60),
    size=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    world_size=st.integers(1, 4),
)
def test_sampler_without_drop_last_weighs_every_sample_once(length, size, accumulate, world_size):
    batches = Batches(size * accumulate * world_size, size, accumulate)
    samplers = [
        TrainingSampler(length, batches, World(rank, world_size, rank), 3, drop_last=False)
        for rank in range(world_size)
    ]
    assert {sampler.steps for sampler in samplers} == {-(-length // batches.global_batch)}
    weights = Counter()
    for sampler in samplers:
        given = list(sampler)
        assert len(given) == len(sampler) == sampler.steps * accumulate
        for number, indices in enumerate(given):
            assert indices  # no batch is empty
            samples = min(
                batches.global_batch, length - number // accumulate * batches.global_batch
            )
            for index in indices:
                # The weight of a sample in the mean over ranks and micro-batches.
                weight = sampler.weight(number) / len(indices) / accumulate / world_size
                weights[index] += weight * samples
    assert sorted(weights) == list(range(length))
    assert all(abs(weight - 1) < 1e-12 for weight in weights.values())


def test_sampler_without_drop_last_has_the_same_last_micro_batches():
    def micro_batches_of(world_size, accumulate):
        micro_batches = {}
        for rank in range(world_size):
            batches = Batches(12, 3, accumulate)
            sampler = TrainingSampler(20, batches, World(rank, world_size, rank), 1, False)
            for number, indices in enumerate(sampler):
                if sampler.weight(number):
                    place = number // accumulate, number % accumulate * world_size + rank
                    micro_batches[place] = indices
        return micro_batches

    alone = micro_batches_of(1, 4)
    assert micro_batches_of(2, 2) == micro_batches_of(4, 1) == alone
    assert [len(alone[1, place]) for place in range(3)] == [3, 3, 2]


class Noisy(torch.utils.data.Dataset):
    """Samples made of random numbers from torch, Python and NumPy."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        numbers = torch.rand(()).item(), random.random(), numpy.random.rand()
        return torch.tensor([index, *numbers], dtype=torch.float64)


class NoisyBatches(Noisy):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def draw(dataset, world_size=1, size=4, workers=0, epochs=(0,), first=0, seed=5):
    """Return the random numbers of each sample, by epoch and index."""
    samples = {}
    for rank in range(world_size):
        batches = Batches(size * world_size, size, 1)
        sampler = TrainingSampler(24, batches, World(rank, world_size, rank), seed)
        loader = Loader(dataset, sampler, Placement(CPU), workers, seed, rank)
        for epoch in epochs:
            sampler.epoch, sampler.first = epoch, first
            for batch in loader:
                for index, *numbers in batch.tolist():
                    samples[epoch, int(index)] = tuple(numbers)
        del loader
    return samples


def test_augmentation_is_seeded_by_sample_for_any_worker_and_rank():
    alone = draw(Noisy(), epochs=(0, 1))
    assert len(alone) == 48
    for place in range(3):
        assert len({numbers[place] for numbers in alone.values()}) == 48
    assert draw(Noisy(), world_size=3, size=2, workers=2, epochs=(0, 1)) == alone
    resumed = draw(Noisy(), first=3, epochs=(1,))
    assert len(resumed) == 12
    assert resumed.items() <= alone.items()
    subset = draw(torch.utils.data.Subset(Noisy(), range(24)), size=3)
    assert subset.items() <= alone.items()
    assert not draw(Noisy(), seed=6).items() & alone.items()


def test_augmentation_of_batched_data_sets_is_seeded_by_sample():
    alone = draw(NoisyBatches())
    assert draw(NoisyBatches(), workers=1) == draw(NoisyBatches(), world_size=2) == alone
    assert len(set(alone.values())) == 24


def test_loading_leaves_the_random_states_of_training_alone():
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    expected = torch.rand(()).item(), random.random(), numpy.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    draw(Noisy())
    assert (torch.rand(()).item(), random.random(), numpy.random.rand()) == expected


@dataclass
class Output:
    logits: torch.Tensor
    note: str = "a note"


def test_map_tensors_keeps_classes():
    things = OrderedDict(a=torch.ones(1), b=Output(torch.ones(2)))
    things["c"] = defaultdict(list, d=[torch.ones(3)])
    doubled = map_tensors(lambda tensor: tensor * 2, things)
    assert type(doubled) is OrderedDict
    assert doubled["a"].tolist() == [2.0]
    assert isinstance(doubled["b"], Output)
    assert doubled["b"].logits.tolist() == [2.0, 2.0]
    assert doubled["b"].note == "a note"
    assert doubled["c"].default_factory is list
    assert doubled["c"]["d"][0].tolist() == [2.0] * 3
    assert things["a"].tolist() == [1.0]


def test_data_sets_without_augmentation_are_not_seeded():
    tensors = torch.utils.data.TensorDataset(torch.ones(4, 1))
    chain = torch.utils.data.ConcatDataset
    assert not augmentation.draws(tensors)
    assert not augmentation.draws(torch.utils.data.Subset(tensors, [1]))
    assert not augmentation.draws(chain([tensors, digits()[0]]))
    assert augmentation.draws(Noisy())
    assert augmentation.draws(chain([tensors, Noisy()]))
    quiet = Noisy()
    quiet.random = False
    assert not augmentation.draws(quiet)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("train", [True, False])
def test_loader_follows_a_data_set_that_grows_and_shrinks(train, workers):
    samples = list(range(8))
    world = World(0, 1, 0, 1, 0, 1)
    batches = Batches(4, 4, 1)
    sampler = TrainingSampler(8, batches, world, 3) if train else EvaluationSampler(8, 4, world)
    loader = Loader(samples, sampler, Placement(CPU, None, False), workers, 3, 0)
    for count in (8, 16, 12):
        samples[:] = range(count)
        assert len(loader) == count // 4
        assert sorted(torch.cat(list(loader)).tolist()) == samples
    samples[:] = range(3)
    if train:
        with pytest.raises(UsageError, match="3 samples"):
            len(loader)
