"""From a data set to batches on the device."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hpctrain import seeds
from hpctrain.data.sampler import EvaluationSampler, TrainingSampler

__all__ = ["Loader", "move"]


class Loader:
    """The batches of this rank, on its device.

    Args:
        dataset: with `__getitem__`; with `__getitems__` it gives a whole batch at once.
        sampler: which samples, in which order.
        device: where the batches go.
        dtype: of their floating-point tensors; None leaves them.
        workers: processes that load; 0 loads in this one.
        seed: of the workers' random numbers; another on each rank.
        before: called before each iteration.
        arguments: more for `torch.utils.data.DataLoader`, such as `collate_fn`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: TrainingSampler | EvaluationSampler,
        device: torch.device,
        dtype: torch.dtype | None,
        workers: int,
        seed: int,
        before: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> None:
        self.sampler = sampler
        self._device = device
        self._dtype = dtype
        self._before = before
        self._seed = seed
        # A generator of its own: the loader takes nothing from the stream that dropout reads.
        self._generator = torch.Generator()
        self._loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            generator=self._generator,
            **arguments,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._before()
        epoch = getattr(self.sampler, "epoch", 0)
        self._generator.manual_seed(seeds.derive("loader", self._seed, epoch))
        if self._device.type == "cpu" and self._dtype is None:
            return iter(self._loader)
        return (move(batch, self._device, self._dtype) for batch in self._loader)


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A batch (tensors in tuples, lists and dicts) on the device.

    Args:
        batch: what a loader gave; what is no tensor stays as it is.
        device: where to.
        dtype: of its floating-point tensors; None leaves them.
    """
    if isinstance(batch, torch.Tensor):
        wanted = dtype if dtype is not None and batch.is_floating_point() else batch.dtype
        return batch.to(device=device, dtype=wanted, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device, dtype) for value in batch)
    return batch
