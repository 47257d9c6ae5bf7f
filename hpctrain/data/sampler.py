"""Order of the samples on each rank; each step has the same samples at every world size.

A step is the next `global_batch` indices of the epoch's order, split into micro-batches in that
order. Micro-batch i belongs to rank i mod world_size, at accumulation index i div world_size.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from hpctrain.arguments import Batches
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.process import seeds

__all__ = ["EvaluationSampler", "TrainingSampler"]


class TrainingSampler(Sampler[list[int]]):
    """Micro-batches of one rank in a shuffled epoch.

    The last samples of an epoch are left out if they do not fill a global batch. Each epoch has
    another order, so other samples are left out. Without `drop_last` they form an additional step,
    split into micro-batches in the same way; the last micro-batch may be smaller. Each micro-batch
    is weighted by its number of samples. A rank without samples gets the first micro-batch of the
    step with weight 0, because all ranks must run the model equally often.

    Args:
        length: number of samples.
        batches: sizes of a step.
        world: this rank and the world size.
        seed: seed of the order; the same on all ranks.
        drop_last: whether to leave out the samples that do not fill a global batch.

    Attributes:
        epoch: epoch of the next iteration, which determines the order.
        first: number of micro-batches of this rank to skip at the beginning of an iteration.

    Raises:
        UsageError: there are fewer samples than one step needs.
    """

    def __init__(
        self, length: int, batches: Batches, world: World, seed: int, drop_last: bool = True
    ) -> None:
        self.batches = batches
        self.world = world
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.first = 0
        self.resize(length)

    def resize(self, length: int) -> None:
        """Set the number of samples, between two iterations.

        Raises:
            UsageError: there are fewer samples than one step needs.
        """
        batches, size = self.batches, self.world.world_size
        if length < (batches.global_batch if self.drop_last else 1):
            largest = max(length // size, 1) * size
            raise UsageError(
                "HT506.too-few-samples", length=length, batches=batches, max_global_batch=largest
            )
        self.length = length

    @property
    def steps(self) -> int:
        """Number of steps of a whole epoch."""
        whole, rest = divmod(self.length, self.batches.global_batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def uneven(self) -> bool:
        """Whether the last step of an epoch has fewer samples than the others."""
        return not self.drop_last and self.length % self.batches.global_batch > 0

    def weight(self, number: int) -> float:
        """Return the weight of a micro-batch: its samples / mean samples per micro-batch of a step.

        Args:
            number: number of the micro-batch in this iteration, from 0.
        """
        step, index = divmod(self.first + number, self.batches.accumulate)
        rest = self.length - step * self.batches.global_batch
        if rest >= self.batches.global_batch:
            return 1.0
        size, slots = self.batches.batch_size, self.batches.accumulate * self.world.world_size
        samples = min(max(rest - self._place(index) * size, 0), size)
        return samples * slots / rest

    def _place(self, index: int) -> int:
        """Return the number of a micro-batch in its step, from its accumulation index."""
        return index * self.world.world_size + self.world.rank

    def __len__(self) -> int:
        return self.steps * self.batches.accumulate - self.first

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(seeds.derive("order", self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator).tolist()
        size, accumulate = self.batches.batch_size, self.batches.accumulate
        starts = [self._place(index) * size for index in range(accumulate)]
        for number in range(self.first, self.steps * accumulate):
            first = number // accumulate * self.batches.global_batch
            start = first + starts[number % accumulate]
            yield order[start : start + size] or order[first : first + size]


class EvaluationSampler(Sampler[list[int]]):
    """Every sample once, in order, over all ranks, without padding; parts can be uneven.

    Args:
        length: number of samples.
        batch_size: batch size of one rank.
        world: this rank and the world size.
        even: whether all ranks need the same number of batches, as they compute together. Then the
            last batches are of unlike sizes, at most one sample larger than the batch size.

    Attributes:
        epoch: 0, so that each evaluation draws the same random numbers.
        uneven: whether ranks have different numbers of batches.
        idle: whether a rank has no batch, and another one has.

    Raises:
        UsageError: all ranks need a batch, and there are fewer samples than ranks.
    """

    def __init__(self, length: int, batch_size: int, world: World, even: bool = False) -> None:
        self.epoch = 0
        self.batch_size = batch_size
        self._world, self._even = world, even
        self.resize(length)

    def resize(self, length: int) -> None:
        """Set the number of samples, between two iterations.

        Raises:
            UsageError: all ranks need a batch, and there are fewer samples than ranks.
        """
        world, even, batch_size = self._world, self._even, self.batch_size
        if even and 0 < length < world.world_size:
            raise UsageError("HT507.fewer-samples-than-ranks", length=length, world=world)
        self.length = length
        batches = -(-length // batch_size)
        size, rank = world.world_size, world.rank
        self.uneven = batches % size > 0 and not even
        self.idle = 0 < batches < size and not even
        end = length
        if even:
            end -= length % (batch_size * size)
            if end and 0 < length - end < size:
                end -= batch_size * size
        starts = range(rank * batch_size, end, batch_size * size)
        self._batches = [range(start, min(start + batch_size, end)) for start in starts]
        if end < length:
            share, more = divmod(length - end, size)
            start = end + rank * share + min(rank, more)
            self._batches.append(range(start, start + share + (rank < more)))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        yield from map(list, self._batches)
