"""Random numbers for augmentation, with a separate stream for each sample in each epoch."""

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
    """Return whether samples of a data set may be random; seeding costs 13 µs per sample.

    The attribute `random` decides, if present. Data sets of tensors, and subsets or concatenations
    of data sets that are not random, are not random.
    """
    if hasattr(dataset, "random"):
        return bool(dataset.random)
    if isinstance(dataset, Subset):
        return draws(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(draws, dataset.datasets))
    return not isinstance(dataset, TensorDataset)


class Seeded(Dataset[Any]):
    """Data set whose random transforms depend only on seed, epoch and index.

    They do not depend on the rank, the worker process, earlier samples, or the step of a resume.
    The generators of torch, Python and NumPy are seeded before each sample, and restored if this
    process also trains. A data set with its own `__getitems__` returns whole batches, so its stream
    depends on the first index of the batch.

    Args:
        dataset: data set with `__getitem__`.
        seed: seed of the run.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        # Subset's own __getitems__ may fetch sample by sample.
        self._whole = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)

    def __getitems__(self, batch: tuple[int, Sequence[int]]) -> Sequence[Any]:
        """Return the samples of a batch.

        Args:
            batch: epoch and indices.
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
            sys.modules["numpy"].random.seed(seed % 2**32)  # NumPy accepts 32 bits


@contextmanager
def _put_back() -> Iterator[None]:
    """Restore the generators at the end, except in a worker, where nothing else uses them."""
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
