"""Order of a script's DataLoader: which micro-batches of it are those of this rank.

A step is the next world_size × accumulate batches of the order. Micro-batch i of a step belongs to
rank i mod world_size, at accumulation index i div world_size. All ranks draw the same order.
`Shared` is what loaders with and without such an order have in common.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hpctrain.data.feed import Placement
from hpctrain.data.own_loaders import length_of, sampler_of
from hpctrain.process import seeds
from hpctrain.process.events import Events
from hpctrain.process.logging import logger
from hpctrain.process.random_states import RandomStream

__all__ = ["FIRST_BATCH", "SOURCE", "Order", "Shared", "Sharing", "warn_of_other_order"]

# Keys of the state of a loader in a checkpoint.
FIRST_BATCH, SOURCE = "first batch", "source"


T = TypeVar("T")


# The samplers of torch that draw all random numbers, or the seed of them, with the first index.
_DRAW_AT_FIRST = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the ranks share the batches of a loader, and what the loader needs of the session.

    Attributes:
        rank, world_size: this rank, and the number of ranks that share.
        accumulate: micro-batches of a step on one rank.
        seed: seed of the run; the same on all ranks.
        same_data: whether each rank keeps all batches of its loaders.
        placement: device and format of the batches.
        events: receives the beginning and the progress of an evaluation.
        exchange: sends a text, and returns those of all ranks.
    """

    rank: int
    world_size: int
    accumulate: int
    seed: int
    same_data: bool
    placement: Placement
    events: Events
    exchange: Callable[[str], list[str]]

    @property
    def slots(self) -> int:
        """Number of micro-batches in a step."""
        return self.world_size * self.accumulate

    def alone(self) -> "Sharing":
        """Return the same for a loader whose batches all belong to this rank."""
        seed = seeds.derive(self.seed, self.rank)
        return replace(self, rank=0, world_size=1, seed=seed)

    def own(self, step: Sequence[T], counts: Sequence[int]) -> Iterator[tuple[T, float]]:
        """Yield the micro-batches of this rank in a step, with their weights.

        A rank without a micro-batch gets the first one of the step with weight 0.

        Args:
            step: micro-batches of a step, at most `slots`.
            counts: count of each one; the weights are in proportion to it, with a mean of 1.
        """
        total = sum(counts) or 1
        even = len(step) == self.slots and min(counts) == max(counts)
        for place in range(self.rank, self.slots, self.world_size):
            if place < len(step):
                yield step[place], 1.0 if even else counts[place] * self.slots / total
            else:
                yield step[0], 0.0


class Shared:
    """Loader of the script as the ranks share it.

    `run.batches` trains with it. Any other iteration is an evaluation. Other attributes are those
    of the source.

    Args:
        source: loader as given; it is not changed.
        sharing: how the ranks share the batches.
        parts: number of micro-batches that a batch of the source is cut into.

    Attributes:
        source, parts: the arguments.
        events: as in `sharing`.
        steps: number of steps of an epoch; None if unknown.
        unequal: whether ranks may have different numbers of batches.
    """

    def __init__(self, source: Iterable[Any], sharing: Sharing, parts: int) -> None:
        self.source, self.events, self.parts = source, sharing.events, parts
        self._sharing = sharing
        self.steps: int | None = None
        self.unequal = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # for copy and pickle, which ask before there is a source
            raise AttributeError(name)
        return getattr(self.source, name)

    def begin(self, epoch: int, first: int, state: Any = None) -> None:
        """Prepare the next iteration for training; called by all ranks.

        Args:
            epoch: number of the epoch, from 0.
            first: number of micro-batches of this rank to skip.
            state: state of the source at `first` in a checkpoint; None without one.

        Raises:
            UsageError: some ranks or workers have the same batches; or an epoch has no step.
        """
        raise NotImplementedError

    def state_at(self, number: int) -> Any:
        """Return the state of the loader before a micro-batch of this rank, for a checkpoint.

        Args:
            number: number of the micro-batch in its epoch, from 0.
        """
        raise NotImplementedError


def warn_of_other_order(rank: int) -> None:
    """Log that an epoch does not have the order that it had before a resume."""
    logger.warning(
        "rank %d: this epoch began with another batch before the resume, so its order is not "
        "repeated, as in a shuffle without a seed, or of a list that stays shuffled: some samples "
        "of this epoch are used twice, and others not at all",
        rank,
    )


class Order(Sampler[tuple[int, list[Any], list[int]]]):
    """Micro-batches of this rank, in the order of a DataLoader's sampler or batch sampler.

    An element has the epoch, the indices of the samples, and their positions in the order, which
    are the keys of their random numbers. The order is drawn step by step, so it may be endless.

    Args:
        loader: DataLoader of the script.
        sharing: how the ranks share the batches.
        seed: seed of the order; the same on all ranks that share it.
        split: whether a batch of the order is a whole step, which is cut into micro-batches.
        trains: whether the batches form steps of equal length on all ranks, with weights. Else
            each batch is used once, by one rank.

    Attributes:
        epoch: epoch of the next iteration.
        first: number of micro-batches of this rank to skip at the beginning of an iteration.
        begun: digest of the first step of all ranks; empty until the DataLoader has taken it.
        weights: weights of the micro-batches that were drawn, by their number in this iteration;
            those of weight 1 are left out.
        drawn: number of micro-batches of all ranks that were drawn in this iteration.
    """

    def __init__(
        self, loader: DataLoader[Any], sharing: Sharing, seed: int, split: bool, trains: bool
    ) -> None:
        batched: Any = loader.batch_sampler
        self._source: Any = loader.sampler if batched is None else batched
        self._single = batched is None
        self._sharing, self._seed = sharing, seed
        self._split, self._trains = split, trains
        plain = isinstance(self._source, BatchSampler)
        plain = plain and type(self._source).__name__ == BatchSampler.__name__
        self._by_samples = plain or split
        known = type(sampler_of(loader)) in _DRAW_AT_FIRST
        self._draws_at_first = known and (plain or self._single)
        self._drop_last = loader.drop_last or bool(getattr(batched, "drop_last", False))
        self.epoch = self.first = 0
        self.begun = ""
        self.weights: dict[int, float] = {}
        self.drawn = 0

    @property
    def steps(self) -> int | None:
        """Number of steps of a whole epoch; None if the sampler has no length."""
        count = length_of(self._source)
        if count is None or self._split:
            return count
        slots = self._sharing.slots
        return count // slots if self._drop_last and self._trains else -(-count // slots)

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError(f"{type(self._source).__name__} has no length")
        return self.steps * self._sharing.accumulate - self.first

    def __iter__(self) -> Iterator[tuple[int, list[Any], list[int]]]:
        sharing, first = self._sharing, self.first
        self.weights.clear()
        self.drawn = 0
        for number, parts in enumerate(self._steps()):
            self.drawn += len(parts)
            if not self._trains:
                for indices, keys in parts[sharing.rank :: sharing.world_size]:
                    yield self.epoch, indices, keys
                continue
            place = number * sharing.accumulate - first
            if place + sharing.accumulate <= 0:
                continue
            counts = [self._count(indices) for indices, _ in parts]
            for (indices, keys), weight in sharing.own(parts, counts):
                if place >= 0:
                    if weight != 1.0:
                        self.weights[place] = weight
                    yield self.epoch, indices, keys
                place += 1

    def _count(self, indices: list[Any]) -> int:
        if not self._by_samples:
            return 1
        return len(indices[0]) if self._single else len(indices)

    def _steps(self) -> Iterator[list[tuple[list[Any], list[int]]]]:
        """Yield the micro-batches of each step: indices of the samples, and their positions."""
        slots = self._sharing.slots
        wanted, position = 1 if self._split else slots, 0
        stream: Any = RandomStream(seeds.derive("order", self._seed, self.epoch))
        with stream:
            batches = iter(self._source)
        while True:
            with stream:
                drawn = list(islice(batches, wanted))
            if self._draws_at_first:
                stream = nullcontext()
            if not drawn or (self._trains and self._drop_last and len(drawn) < wanted):
                return
            parts = []
            for batch in drawn:
                indices = [batch] if self._single else list(batch)
                keys = list(range(position, position + len(indices)))
                position += len(indices)
                size = max(-(-len(indices) // slots) if self._split else len(indices), 1)
                for start in range(0, len(indices), size):
                    parts.append((indices[start : start + size], keys[start : start + size]))
            self.begun = self.begun or hashlib.blake2b(repr(parts).encode()).hexdigest()
            yield parts
