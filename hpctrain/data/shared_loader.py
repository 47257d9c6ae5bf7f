"""DataLoaders of a script: their batches are split over the ranks by the order of their sampler."""

import copy
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, default_collate, default_convert

from hpctrain.cluster.texts import ranks_text
from hpctrain.data.augmentation import Seeded, draws
from hpctrain.data.feed import feed
from hpctrain.data.loader import begin_worker, evaluated
from hpctrain.data.own_loaders import begin_own, divided, sampler_of
from hpctrain.data.shared_order import (
    FIRST_BATCH,
    SOURCE,
    Order,
    Shared,
    Sharing,
    warn_of_other_order,
)
from hpctrain.errors import UsageError
from hpctrain.process import seeds, signals
from hpctrain.process.random_states import RandomStream

__all__ = ["SharedLoader", "begun", "copied", "refuse_short"]


class SharedLoader(Shared):
    """A DataLoader of the script over a data set with indices, shared by the ranks.

    An evaluation uses each sample once, in the order of the sampler, without padding.

    Args:
        loader: DataLoader of the script.
        sharing: how the ranks share the batches.
        split: whether the batch size of the DataLoader is that of all ranks.
    """

    source: DataLoader[Any]

    def __init__(self, loader: DataLoader[Any], sharing: Sharing, split: bool) -> None:
        # A sampler that is divided already may count on equal random numbers on all ranks.
        is_divided = divided(loader, sharing.world_size)
        self._whole = not (is_divided or sharing.same_data)
        own = sharing if self._whole else sharing.alone()
        super().__init__(loader, sharing, own.slots if split else 1)
        self._slots = own.slots
        self._seed = seed = sharing.seed if is_divided else own.seed
        samples = _Samples(loader, own.seed)
        # Of the training and of evaluations.
        self._orders = {trains: Order(loader, own, seed, split, trains) for trains in (True, False)}
        self._loaders = {
            trains: copied(loader, dataset=samples, batch_sampler=order, collate_fn=_as_it_is)
            for trains, order in self._orders.items()
        }
        self._trains = False
        self._before = ""  # first step of this epoch before a resume
        self.steps = self._orders[True].steps

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank in an epoch of training."""
        return len(self._orders[True])

    def begin(self, epoch: int, first: int, state: Any = None) -> None:
        """Prepare the next iteration for training; the state tells if the order is the same."""
        self._before = state.get(FIRST_BATCH, "") if isinstance(state, dict) else ""
        order, sharing = self._orders[True], self._sharing
        order.epoch, order.first, self._trains = epoch, first, True
        if sharing.world_size > 1 and not self._whole:
            lengths = sharing.exchange(str(order.steps))
            self.unequal = "None" in lengths or len(set(lengths)) > 1
            self.steps = None if "None" in lengths else min(map(int, lengths))
        if self.steps == 0:
            refuse_short(len(self.source), self._slots)

    def state_at(self, number: int) -> Any:
        """Return the digest of the first step; it depends on the number of micro-batches."""
        del number
        return {FIRST_BATCH: f"{self._slots} {self._orders[True].begun}", SOURCE: None}

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of an evaluation; after `begin`, over batches and weights."""
        trains, self._trains = self._trains, False
        order = self._orders[trains]
        begin_own(self.source, order.epoch, self._sharing.seed)
        order.begun = ""
        stream = RandomStream(seeds.derive("loader", self._seed, order.epoch))
        batches = begun(self._loaders[trains], stream)
        if trains:
            return self._weighed(order, batches)
        self.events.evaluation()
        size = self._sharing.world_size
        return evaluated(
            self.events,
            feed(batches, self._sharing.placement),
            0 if order.steps is None else len(order),
            lambda: order.drawn < size if order.drawn % size else None,
        )

    def _weighed(self, order: Order, batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
        for number, batch in enumerate(batches):
            if not order.begun:
                raise UsageError("HT508.custom-iterator", loader=type(self.source).__name__)
            if number == 0:
                self._compare_first(order.begun)
            yield batch, order.weights.pop(number, 1.0)

    def _compare_first(self, digest: str) -> None:
        """Compare the first step with that before a resume, and with those of the other ranks."""
        slots, _, before = self._before.partition(" ")
        if slots == str(self._slots) and before != digest:
            warn_of_other_order(self._sharing.rank)
        if self._whole and self._sharing.world_size > 1:
            batched = self.source.batch_sampler
            plain = batched is None or type(batched) is BatchSampler
            sampler = sampler_of(self.source) if plain else batched
            refuse_other_order(self._sharing.exchange(digest), sampler)


class _Samples(Seeded):
    """Collated batches of a DataLoader, whose random numbers follow from the place in the order.

    Args:
        loader: DataLoader of the script.
        seed: seed of the run.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        plain = loader.collate_fn in (default_collate, default_convert)
        super().__init__(loader.dataset, seed, random=draws(loader.dataset) or not plain)
        self._collate, self._single = loader.collate_fn, loader.batch_sampler is None

    def __getitems__(self, batch: tuple[int, Sequence[Any], Sequence[int]]) -> Any:
        """Return a batch as `collate_fn` returns it.

        Args:
            batch: epoch, indices, and for each index the key of its random numbers.
        """
        epoch, indices, keys = batch
        with self.kept():
            if self._single:
                self.set(epoch, keys[0])
                return self._collate(self.dataset[indices[0]])
            return self._collate(self.samples(epoch, indices, keys))


def _as_it_is(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def copied(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of a DataLoader with some attributes changed.

    Its workers end with this process, and its batches come in order.

    Args:
        loader: DataLoader of any class.
        changes: new values; torch would refuse to set some of them.
    """
    own = copy.copy(loader)
    init_fn = partial(begin_worker, os.getpid(), loader.worker_init_fn)
    vars(own).update(changes, worker_init_fn=init_fn, in_order=True, _iterator=None)
    return own


def begun(loader: Iterable[Any], stream: RandomStream) -> Iterator[Any]:
    """Return the iterator of a loader, whose workers leave the signals to this process.

    Args:
        loader: loader of the script.
        stream: random numbers for what the loader draws as it begins.
    """
    workers = getattr(loader, "num_workers", 0) > 0
    with stream:
        with signals.blocked():
            iterator = iter(loader)
        if not isinstance(iterator, Generator):
            return iterator
        # A subclass with its own __iter__ draws, and starts its workers, with its first batch.
        with signals.blocked() if workers else nullcontext():
            return chain(list(islice(iterator, 1)), iterator)


def refuse_other_order(digests: Sequence[str], sampler: Any) -> None:
    """Check that a sampler gives all ranks the same order.

    Args:
        digests: digest of the first step on each rank.
        sampler: sampler of the loader, for the message.

    Raises:
        UsageError: a rank has another order.
    """
    ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if ranks:
        raise UsageError(
            "HT611.order-differs", sampler=type(sampler).__name__, ranks=ranks_text(ranks)
        )


def refuse_short(batches: int, slots: int) -> None:
    """Refuse a loader that has no step in an epoch.

    Args:
        batches: number of batches of the order.
        slots: number of micro-batches in a step.

    Raises:
        UsageError: always.
    """
    key = "HT506.too-few-batches" if batches else "HT506.empty-loader"
    raise UsageError(key, batches=batches, slots=slots)
