"""Streams of batches without an order of indices, split over the ranks as they are read."""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hpctrain.backends.base import Backend
from hpctrain.cluster.texts import ranks_text
from hpctrain.data.feed import feed
from hpctrain.data.libraries import generators, split_over_ranks, stateful
from hpctrain.data.loader import Loader, evaluated
from hpctrain.data.own_loaders import begin_own, fingerprint, length_of, samples, split_themselves
from hpctrain.data.shared_loader import begun, copied, refuse_short
from hpctrain.data.shared_order import FIRST_BATCH, SOURCE, Shared, Sharing, warn_of_other_order
from hpctrain.errors import UsageError
from hpctrain.process import seeds
from hpctrain.process.events import Events
from hpctrain.process.logging import logger
from hpctrain.process.random_states import RandomStream

__all__ = ["SharedStream", "end_together"]


class SharedStream(Shared):
    """Any iterable of batches, shared by the ranks.

    The ranks compare their first batches. If all of them differ, the stream splits itself over the
    ranks, and is left alone. If all of them are equal, each rank reads everything, and batch i
    belongs to rank i mod world_size. An evaluation uses each batch once.

    Args:
        source: iterable of batches.
        sharing: how the ranks share the batches.
        split: whether the batch size of a DataLoader is that of all ranks.
    """

    def __init__(self, source: Iterable[Any], sharing: Sharing, split: bool) -> None:
        super().__init__(source, sharing, sharing.slots if split else 1)
        self._looked = False
        self._trained: Iterator[Any] | None = None
        self._next = 0  # first micro-batch of this rank that is not read yet
        self._states: dict[int, Any] = {}  # states of the source, by the next micro-batch
        data = source.dataset if isinstance(source, DataLoader) else source
        self._own: Any = data
        self._by_node = False
        if sharing.world_size > 1 and not sharing.same_data:
            self._own, self._by_node = split_over_ranks(data, sharing.rank, sharing.world_size)
        self._generators = generators(self._own) if self._by_node else ""
        if isinstance(source, DataLoader):
            changes: dict[str, Any] = {"dataset": self._own}
            if split and source.batch_size is not None:
                size = source.batch_size // self.parts
                batched = BatchSampler(source.sampler, size, source.drop_last)
                changes.update(batch_size=size, batch_sampler=batched)
            self._own = copied(source, **changes)
        self._streams = isinstance(getattr(source, "dataset", None), IterableDataset)
        self._workers: int = getattr(source, "num_workers", 0)
        self._stateful = stateful(self._own, self._workers)
        self._first_batch = ""  # fingerprint of the first batch of this epoch
        self._drop_last = bool(getattr(source, "drop_last", False))
        self._draws = not (self._workers or isinstance(source, (list, tuple, Loader)))

    def __len__(self) -> int:
        """Return the number of batches of the source."""
        return len(self.source)  # type: ignore[arg-type]

    def begin(self, epoch: int, first: int, state: Any = None) -> None:
        """Prepare the next iteration for training; without a state read all batches again."""
        first_batch = ""
        if isinstance(state, dict) and state.keys() == {FIRST_BATCH, SOURCE}:
            first_batch, state = state[FIRST_BATCH], state[SOURCE]
        loads = state is not None and self._stateful is not None
        self._states = {}
        self._next = first if loads else 0
        batches, here = self._open(epoch, state if loads else None)
        if loads:
            self._first_batch = first_batch
        self._trained = self._parted(batches, here)
        if first and not loads:
            self._replay(first, first_batch)

    def _replay(self, first: int, first_batch: str) -> None:
        """Read the batches before the place of a resume again."""
        rank = self._sharing.rank
        if rank == 0:  # a warning is shown on each rank that logs it
            logger.warning("this loader cannot skip: %d batches are fetched and dropped", first)
        if first_batch and self._first_batch and first_batch != self._first_batch:
            warn_of_other_order(rank)
        for _ in islice(self._trained or (), first):
            pass

    def state_at(self, number: int) -> Any:
        """Return the state of the source before a micro-batch of this rank."""
        state = self._states.get(number)
        if number == self._next and number and self._stateful is not None:
            state = copy.deepcopy(self._stateful.state_dict())
        return {FIRST_BATCH: self._first_batch, SOURCE: state}

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of an evaluation; after `begin`, over batches and weights."""
        trained, self._trained = self._trained, None
        if trained is not None:
            return trained
        sharing = self._sharing
        self.events.evaluation()
        batches, here = self._open(0)
        if here:
            batches = islice(batches, sharing.rank, None, sharing.world_size)
        return evaluated(self.events, feed(batches, sharing.placement), 0)

    def _open(self, epoch: int, state: Any = None) -> tuple[Iterator[Any], bool]:
        """Return the batches of the source, and whether they have to be split here.

        Args:
            epoch: number of the epoch, from 0.
            state: state of the source to begin with; None begins with its first batch.
        """
        sharing = self._sharing
        whose = [sharing.rank] if sharing.same_data else []
        stream = RandomStream(seeds.derive("stream", sharing.seed, epoch, *whose))
        begin_own(self._own, epoch, sharing.seed)
        if state is not None:
            self._stateful.load_state_dict(state)
        batches = begun(self._own, stream)
        if self._draws:
            batches = _drawn(batches, stream)
        compares = not (sharing.same_data or self._by_node or isinstance(self.source, Loader))
        # A second batch that is read ahead would be missing in the source's state.
        both = compares and self._streams and self._workers > 1
        both = both and not self._looked and self._stateful is None
        head = list(islice(batches, 2 if both else 1))
        self._first_batch = seen = fingerprint(head[0]) if head else ""
        if both and seen and list(map(fingerprint, head[1:])) == [seen]:
            seen = _TWICE
        elif not compares:
            seen = hashlib.sha256(self._generators.encode()).hexdigest() if self._by_node else ""
        length = length_of(self._own)
        texts = sharing.exchange(f"{seen} {'' if length is None else length}")
        fingerprints, lengths = zip(*(text.split(" ") for text in texts), strict=True)
        if _TWICE in fingerprints:
            _refuse_workers(self.source, fingerprints.index(_TWICE))
        if self._by_node and len(set(fingerprints)) > 1:
            _refuse_shuffle(fingerprints)
        here = compares and (len(texts) == 1 or not split_themselves(fingerprints))
        if compares and len(texts) > 1 and not self._looked:
            self._tell(here)
        self._looked = True
        self._count(lengths, here)
        return chain(head, batches), here

    def _tell(self, here: bool) -> None:
        """Log whether the batches are split here, which the first ones have shown."""
        logger.info(
            "all ranks begin with the same batch: each rank reads all batches, and keeps one of "
            "%d; it is faster if the data set yields only the samples of its rank"
            if here
            else "the ranks begin with different batches: each rank keeps all of its own, as the "
            "data set seems to split itself; if it only shuffles without a common seed, each "
            "sample is used %d times",
            self._sharing.world_size,
        )

    def _count(self, lengths: tuple[str, ...], here: bool) -> None:
        """Set the number of steps, from the number of batches on each rank."""
        sharing, known = self._sharing, "" not in lengths
        # The length of an IterableDataset is an estimate: nobody checks it.
        certain = known and not self._streams
        self.unequal = len(lengths) > 1 and not (certain and len(set(lengths)) == 1)
        self.steps = None
        if known:
            slots, least = sharing.slots if here else sharing.accumulate, min(map(int, lengths))
            up = here and not self._drop_last
            self.steps = -(-least // slots) if up else least // slots
            if self.steps == 0:
                refuse_short(least, slots)

    def _parted(self, batches: Iterator[Any], here: bool) -> Iterator[tuple[Any, float]]:
        """Yield the micro-batches of this rank and their weights, and keep the last states."""
        sharing = self._sharing
        if not here:  # each batch is a step of its own
            sharing = replace(sharing, rank=0, world_size=1, accumulate=1)
        slots, rank, size = sharing.slots, sharing.rank, sharing.world_size
        while True:
            # Of the other ranks' batches, the first one can be needed.
            step = [
                (batch if place == 0 or place % size == rank else None, samples(batch) or 1)
                for place, batch in enumerate(islice(batches, slots))
            ]
            if not step or (len(step) < slots and self._drop_last):
                return
            self._next += sharing.accumulate
            own = sharing.own([batch for batch, _ in step], [count for _, count in step])
            del step
            yield from own
            self._remember()

    def _remember(self) -> None:
        """Keep the state of the source before the next batch is read."""
        if self._stateful is not None:
            last = list(self._states.items())[-1:]
            self._states = {**dict(last), self._next: copy.deepcopy(self._stateful.state_dict())}


_TWICE = "twice"  # in place of a fingerprint: two workers of the rank begin with the same batch


def _refuse_workers(source: Any, rank: int) -> None:
    dataset = type(source.dataset).__name__
    raise UsageError("HT508.same-batch-in-workers", rank=rank, loader=source, dataset=dataset)


def _refuse_shuffle(generators: Sequence[str]) -> None:
    ranks = [rank for rank, one in enumerate(generators) if one != generators[0]]
    raise UsageError("HT611.stream-hugging-face", ranks_text=ranks_text(ranks))


def _drawn(batches: Iterator[Any], stream: RandomStream) -> Iterator[Any]:
    """Yield the batches of an iterator that draws its random numbers from a stream of its own."""
    while True:
        with stream:
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


_END = object()


def end_together(batches: Iterator[Any], backend: Backend, events: Events) -> Iterator[Any]:
    """Return batches that end on all ranks as soon as they end on one; called by all ranks.

    Each batch is fetched while the one before is in use, and the sum that tells whether all ranks
    have one is under way meanwhile.

    Args:
        batches: batches of this rank.
        backend: backend of the ranks.
        events: receives the weight of a batch as the batch is used, not as it is fetched.
    """
    return _together(batches, _fetch(batches, events), backend, events)


def _together(
    batches: Iterator[Any], fetched: tuple[Any, list[float]], backend: Backend, events: Events
) -> Iterator[Any]:
    having = backend.sum_async([float(fetched[0] is not _END)])
    while True:
        ranks = round(having.values()[0])
        batch, weights = fetched
        for weight in weights:
            events.weight(weight)
        if ranks < backend.world_size:
            break
        fetched = _fetch(batches, events)
        having = backend.sum_async([float(fetched[0] is not _END)])
        yield batch
    if ranks:
        texts = backend.all_gather_text("ended" if batch is _END else "more")
        ended = [rank for rank, text in enumerate(texts) if text == "ended"]
        if backend.rank == 0:  # a warning is shown on each rank that logs it
            logger.warning(
                "%s: no more batches, and the other ranks have some: the epoch ends here",
                ranks_text(ended),
            )


def _fetch(batches: Iterator[Any], events: Events) -> tuple[Any, list[float]]:
    """Return the next batch, and the weights that a loader of the session has told for it."""
    weights: list[float] = []
    tell, events.weight = events.weight, weights.append
    try:
        return next(batches, _END), weights
    finally:
        events.weight = tell
