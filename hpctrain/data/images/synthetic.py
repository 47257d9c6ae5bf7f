"""Synthetic images without input cost, to time the steps alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from hpctrain.process import seeds

__all__ = ["SyntheticImages"]


class _Whole(NamedTuple):
    """Batch that is made as a whole, without collating."""

    images: Tensor
    flips: Tensor
    targets: Tensor


def _unwrapped(batch: list[_Whole], **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    images, flips, targets = batch[0]
    return images, flips, targets


# The documented way to register a type with default_collate: its docstring, option 2.
default_collate_fn_map[_Whole] = _unwrapped


class SyntheticImages(Dataset[tuple[Tensor, bool, int]]):
    """Noise with classes, in the layout of an `ImageSet`'s batches.

    A batch is the beginning of a pool of noise. The pool is made with the first batch, and pinned
    if there are GPUs. Nothing is read or decoded, and all batches are equal. Without loader
    processes nothing is copied on the host; with them torch copies each batch to pinned memory.

    Args:
        samples: length of the data set.
        size: height and width in pixels.
        classes: number of classes.
    """

    random = False

    def __init__(self, samples: int, size: int, classes: int) -> None:
        self.samples = samples
        self.size = size
        self.classes = [str(number) for number in range(classes)]
        self._pool: _Whole | None = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, bool, int]:
        """Return a sample: the first one of the pool."""
        if not 0 <= index < self.samples:
            raise IndexError(index)
        images, flips, targets = self._first(1)
        return images[0], bool(flips[0]), int(targets[0])

    def __getitems__(self, indices: Sequence[int]) -> list[_Whole]:
        """Return a whole batch, which torch's loaders do not collate."""
        return [self._first(len(indices))]

    def _first(self, count: int) -> _Whole:
        if self._pool is None or len(self._pool.targets) < count:
            self._pool = self._new(count)
        return _Whole(*(part[:count] for part in self._pool))

    def _new(self, count: int) -> _Whole:
        generator = torch.Generator().manual_seed(seeds.derive("synthetic images"))
        shape = (count, 3, self.size, self.size)
        pool = _Whole(
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
            torch.rand(count, generator=generator) < 0.5,
            torch.randint(0, len(self.classes), (count,), generator=generator),
        )
        # A worker must not use CUDA, and its memory is shared with the rank as it is.
        if get_worker_info() is None and torch.cuda.is_available():
            pool = _Whole(*(part.pin_memory() for part in pool))
        return pool
