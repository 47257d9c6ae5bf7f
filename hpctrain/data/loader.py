"""Loader from a data set to batches on the device."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hpctrain.data.augmentation import Seeded, draws
from hpctrain.data.feed import Placement, feed
from hpctrain.data.sampler import EvaluationSampler, TrainingSampler
from hpctrain.errors import UsageError
from hpctrain.process import seeds, signals
from hpctrain.process.events import Events
from hpctrain.process.phases import EVALUATING

__all__ = ["Loader", "begin_worker", "check_arguments", "evaluated", "weighed"]


class Loader:
    """Batches of this rank, on its device.

    Args:
        dataset: data set with `__getitem__`, or with `__getitems__` for a whole batch at once. If
            it `draws` random numbers, the generators are seeded for each sample.
        sampler: sampler that selects and orders the samples.
        placement: device and format of the batches.
        workers: number of loader processes; 0 loads in this process.
        seed: seed of the run.
        rank: this rank; all other random numbers of the workers differ between ranks.
        events: receives the phase and the beginning of an evaluation, and the weight of each
            micro-batch, if weights differ.
        on_device: function that transforms each batch on the device.
        arguments: more arguments for `torch.utils.data.DataLoader`, such as `collate_fn`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: TrainingSampler | EvaluationSampler,
        placement: Placement,
        workers: int,
        seed: int,
        rank: int,
        events: Events | None = None,
        on_device: Callable[[Any], Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.sampler = sampler
        self._placement = placement
        self._events = events or Events()
        self._on_device = on_device
        self._seed = seeds.derive(seed, rank)
        # A separate generator, so that the loader does not change the stream that dropout uses.
        self._generator = torch.Generator()
        # Then the random numbers of `collate_fn` in a worker follow from the batch's last sample.
        seeded = draws(dataset) or (workers > 0 and "collate_fn" in arguments)
        init_fn = arguments.pop("worker_init_fn", None)
        self._dataset = dataset
        self._make = partial(
            DataLoader,
            Seeded(dataset, seed) if seeded else dataset,
            batch_sampler=_WithEpoch(sampler) if seeded else sampler,  # type: ignore[arg-type]
            num_workers=workers,
            pin_memory=placement.device.type == "cuda",
            persistent_workers=workers > 0,
            generator=self._generator,
            worker_init_fn=partial(begin_worker, os.getpid(), init_fn),
            **arguments,
        )
        self._loader = self._make()

    def resize(self) -> None:
        """Follow a data set that has grown or shrunk since the last iteration."""
        length = len(self._dataset)  # type: ignore[arg-type]
        if length != self.sampler.length:
            self.sampler.resize(length)
            self._loader = self._make()  # workers have a copy of the data set

    def __len__(self) -> int:
        self.resize()
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.resize()
        sampler = self.sampler
        if isinstance(sampler, EvaluationSampler):
            self._events.evaluation()
        self._generator.manual_seed(seeds.derive("loader", self._seed, sampler.epoch))
        _check_guard(self._loader)
        with signals.blocked():
            loaded = iter(self._loader)
        batches = feed(loaded, self._placement, self._on_device)
        if isinstance(sampler, EvaluationSampler):
            return evaluated(
                self._events, batches, len(self), lambda: sampler.idle if sampler.uneven else None
            )
        if not sampler.uneven:
            return batches
        return weighed(zip(batches, map(sampler.weight, count()), strict=False), self._events)


def _check_guard(loader: "DataLoader[Any]") -> None:
    """Check that workers may import the script, which those that are no copies do.

    Raises:
        UsageError: it would train again in each of them.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if not loader.num_workers or not script:
        return
    # To ask for the method fixes it, as the start of a worker does.
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "fork":
        return
    try:
        has_guard = "__name__" in Path(script).read_text(errors="replace")
    except OSError:
        return
    if not has_guard:
        script = os.path.basename(script)
        workers = loader.num_workers
        raise UsageError("HT109.no-main-guard", script=script, workers=workers, method=method)


def weighed(batches: Iterable[tuple[Any, float]], events: Events) -> Iterator[Any]:
    """Yield the batches; report the weight of each one first, unless all weights so far are 1.

    A loader of the session may be inside, which reports its own.

    Args:
        batches: micro-batches of this rank, and their weights.
        events: receives the weights.
    """
    last = 1.0
    try:
        for batch, weight in batches:
            if weight != 1.0 or last != 1.0:  # the session has set it to 1 after a micro-batch
                events.weight(weight)
                last = weight
            yield batch
    finally:
        if last != 1.0:
            events.weight(1.0)


def evaluated(
    events: Events,
    batches: Iterator[Any],
    length: int,
    idle: Callable[[], bool | None] = lambda: None,
) -> Iterator[Any]:
    """Yield the batches of an evaluation; report the phase before each batch is fetched.

    Args:
        events: receives the phase, the number of each batch, and an uneven end.
        batches: batches of this rank.
        length: number of batches of this rank; 0 if unknown.
        idle: function that returns at the end whether a rank had no batch; None if all ranks had
            equally many.
    """
    events.heartbeat.enter(EVALUATING)
    for number, batch in enumerate(batches):
        if length:
            events.evaluated(number, length)
        yield batch
        events.heartbeat.enter(EVALUATING)
    if (without := idle()) is not None:
        events.exhausted(without)


def check_arguments(
    dataset: Any,
    train: bool,
    batch_size: int | None,
    drop_last: bool | None,
    more: Mapping[str, Any],
) -> None:
    """Check the arguments of `session.loader`.

    Args:
        dataset, train, batch_size, drop_last: arguments as given.
        more: arguments for `torch.utils.data.DataLoader`.

    Raises:
        UsageError: the session sets the argument itself, or the argument has no meaning there.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError("HT507.no-length", dataset=type(dataset).__name__)
    own = sorted(_OWN_ARGUMENTS & more.keys())
    if own:
        raise UsageError("HT507.argument-of-session", arguments=", ".join(own))
    if train and batch_size is not None:
        raise UsageError("HT507.batch-size", batch_size=batch_size)
    if not train and drop_last is not None:
        raise UsageError("HT507.drop-last")


# Arguments for order, size and processes, which the session sets.
_OWN_ARGUMENTS = {
    *("shuffle", "sampler", "batch_sampler", "generator"),
    *("num_workers", "persistent_workers", "pin_memory"),
}


def begin_worker(master: int, init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Begin in a worker process.

    Args:
        master: process that has started it.
        init_fn: the script's own `worker_init_fn`, called last.
        worker: number of the worker.
    """
    signals.obey_parent(master)
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, Seeded):
        # The script's function expects its own data set. torch makes the attribute read-only.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if init_fn is not None:
        init_fn(worker)


class _WithEpoch:
    """Micro-batches with their epoch, for workers that run for several epochs."""

    def __init__(self, sampler: TrainingSampler | EvaluationSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
        epoch = self._sampler.epoch
        return ((epoch, indices, indices) for indices in self._sampler)
