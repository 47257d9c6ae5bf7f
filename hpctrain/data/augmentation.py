"""Random numbers for augmentation, with a separate stream for each sample in each epoch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from hpctrain.process import random_states, seeds

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
    """Data set whose random transforms depend only on seed, epoch and the sample's key.

    They do not depend on the rank, the worker process, earlier samples, or the step of a resume.
    The generators of torch, Python and NumPy are seeded before each sample, and restored if this
    process also trains. A data set with its own `__getitems__` returns whole batches, so its stream
    depends on the first key of the batch.

    Args:
        dataset: data set with `__getitem__`.
        seed: seed of the run.
        random: whether samples may be random; else nothing is seeded.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, random: bool = True) -> None:
        self.dataset = dataset
        self.seed = seed
        self.random = random
        # Subset's own __getitems__ may fetch sample by sample.
        by_sample = random and isinstance(dataset, Subset)
        self._whole = hasattr(dataset, "__getitems__") and not by_sample

    def __getitems__(self, batch: tuple[int, Sequence[Any], Sequence[int]]) -> Any:
        """Return the samples of a batch.

        Args:
            batch: epoch, indices, and for each index the key of its random numbers.
        """
        with self.kept():
            return self.samples(*batch)

    def samples(self, epoch: int, indices: Sequence[Any], keys: Sequence[int]) -> Any:
        """Return the samples of a batch, and leave the generators as the last sample did.

        Args:
            epoch, indices, keys: as for `__getitems__`.
        """
        if self._whole:
            self.set(epoch, keys[0])
            return self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        samples = []
        for index, key in zip(indices, keys, strict=True):
            self.set(epoch, key)
            samples.append(self.dataset[index])
        return samples

    def set(self, epoch: int, key: int) -> None:
        """Seed the generators for a sample."""
        if self.random:
            number = seeds.derive("sample", self.seed, epoch, key)
            random_states.seed(number, torch.device("cpu"), everything=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the generators at the end, except in a worker, where nothing else uses them."""
        if not self.random or get_worker_info() is not None:
            yield
            return
        before = random_states.states()
        try:
            yield
        finally:
            random_states.restore(before)
