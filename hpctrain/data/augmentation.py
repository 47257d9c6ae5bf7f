"""Random numbers for augmentation: a stream of its own for each sample in each epoch."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from hpctrain.process import seeds

__all__ = ["Seeded", "draws"]


def draws(dataset: Dataset[Any]) -> bool:
    """Whether samples of a data set may be random; setting the generators costs 13 µs for each.

    Not where its attribute `random` is False, nor those of tensors, nor parts or chains of such.
    """
    if hasattr(dataset, "random"):
        return bool(dataset.random)
    if isinstance(dataset, Subset):
        return draws(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(draws, dataset.datasets))
    return not isinstance(dataset, TensorDataset)


class Seeded(Dataset[Any]):
    """A data set whose random transforms follow from seed, epoch and index, and nothing else.

    Not from the rank, the worker process, the samples before, or where a run was resumed. The
    generators of torch, Python and NumPy are set before each sample, and put back where this
    process also trains. A data set with a `__getitems__` of its own is asked for whole batches, so
    its stream follows from the first index of the batch.

    Args:
        dataset: with `__getitem__`.
        seed: of the run.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        # Subset has one that asks for sample after sample.
        self._whole = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)

    def __getitems__(self, batch: tuple[int, Sequence[int]]) -> Sequence[Any]:
        """The samples of a batch.

        Args:
            batch: the epoch and the indices.
        """
        epoch, indices = batch
        with _put_back():
            if self._whole:
                self._set(epoch, indices[0])
                samples: Sequence[Any] = self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
                return samples
            samples = []
            for index in indices:
                self._set(epoch, index)
                samples.append(self.dataset[index])
            return samples

    def _set(self, epoch: int, index: int) -> None:
        seed = seeds.derive("sample", self.seed, epoch, index)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)  # which takes no more


@contextmanager
def _put_back() -> Iterator[None]:
    """Leave the generators as they were, but in a worker, where nothing else draws from them."""
    if get_worker_info() is not None:
        yield
        return
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])
