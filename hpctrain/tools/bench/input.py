"""Benchmark of the input: images per second to the device, by the number of loader workers."""

import argparse
import importlib
import io
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from hpctrain import data
from hpctrain.data.shards.layouts import Source
from hpctrain.errors import UsageError
from hpctrain.tools.bench.measure import Results, compare
from hpctrain.tools.bench.turns import Times, finish, in_turns
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = ["Pictures", "evaluate", "measure", "numbers_of_workers"]

DECODE = "decoded, no loader"
SYNTHETIC = "synthetic"
_SIDE = 224
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_BLOCK_SECONDS = 1.0
# A round is one batch of each worker. Each worker starts with tasks for two batches.
_ROUNDS_BEFORE = 2
_LEAST_ROUNDS = 3
_NOTE = (
    "The first line: images decoded whole in one thread; the others cut, collate and normalise as "
    "well,\nand decode no more of a JPEG than they need."
)


class Pictures:
    """Source of synthetic images in memory: noise with pixels and bytes as those of ImageNet.

    Eight files of 500 × 375 pixels and about 110 kB repeat. They decode as slowly as a photograph
    of as many bytes, but all images of a data set are of one size.

    Args:
        length: number of images.

    Attributes:
        classes: names of the classes.
        place: place of the images, for messages.

    Raises:
        UsageError: Pillow, which creates the images, is not installed.
    """

    place = "memory"

    def __init__(self, length: int = 100_000) -> None:
        self.classes = ["one", "other"]
        self._length = length
        self._files = [_noise() for _ in range(8)]

    def __len__(self) -> int:
        return self._length

    def read(self, index: int) -> bytes:
        """Return the JPEG file of an image."""
        return self._files[index % len(self._files)]

    def target(self, index: int) -> int:
        """Return the class number of an image."""
        return index % len(self.classes)

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"picture {index}"


def _noise() -> bytes:
    """Return a JPEG file of grains of two pixels."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UsageError(
            "HT905",
            f"synthetic images, but Pillow cannot be imported: {error}",
            "Pillow, which creates them",
            "pip install 'hpctrain[vision]'",
        ) from None
    bands = [image.effect_noise((250, 188), 40).resize((500, 375)) for _ in range(3)]
    buffer = io.BytesIO()
    image.merge("RGB", bands).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


class _Endless(data.TrainingSampler):
    """Sampler that never ends: between two epochs, the workers would stop and start again."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from super().__iter__()
            self.epoch += 1


class _LoadingArms:
    """Arms that load images, started again in every block; each returns the seconds per image.

    Args:
        session: open session.
        source: source of the images.
    """

    def __init__(self, session: Session, source: Source) -> None:
        self._session = session
        self._whole = data.ImageSet(
            source,
            lambda file, decoder: (decoder.decode(file), False),  # type: ignore[arg-type]
        )
        self._set = data.ImageSet(source, data.RandomResizedCrop(_SIDE))
        self._sampler = _Endless(len(source), session.batches, session.world, session.options.seed)

    def decode(self) -> float:
        """Read and decode whole images in one thread of one process.

        Raises:
            DataError: an image cannot be read or decoded.
        """
        begin, count, seconds = time.perf_counter(), 0, 0.0
        for index in itertools.chain.from_iterable(self._new_order()):
            self._whole[index]
            count += 1
            seconds = time.perf_counter() - begin
            if seconds >= _BLOCK_SECONDS:
                break
        return seconds / count

    def load(self, workers: int) -> float:
        """Read, decode, crop, collate, and normalise on the device, as a training does.

        Workers that start together stay in step, and their batches arrive in bursts. So the timing
        covers whole rounds, which take the same time wherever in a burst they begin.

        Args:
            workers: number of loader processes.
        """
        session = self._session
        loader = data.Loader(
            self._set,
            self._new_order(),
            session.placement,
            workers,
            session.options.seed,
            session.world.rank,
            on_device=data.Normalize(_MEAN, _STD),
        )
        batches, a_round = iter(loader), max(workers, 1)
        _take(batches, _ROUNDS_BEFORE * a_round)
        finish(session.device)
        begin, rounds, seconds = time.perf_counter(), 0, 0.0
        while seconds < _BLOCK_SECONDS or rounds < _LEAST_ROUNDS:
            _take(batches, a_round)
            rounds += 1
            seconds = time.perf_counter() - begin
        finish(session.device)
        return (time.perf_counter() - begin) / (rounds * a_round * session.batches.batch_size)

    def _new_order(self) -> data.TrainingSampler:
        """Return the samples of this rank in a new order, so that each block starts with others."""
        self._sampler.epoch += 1
        return self._sampler


def _take(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)


def measure(session: Session, arguments: argparse.Namespace) -> Results:
    """Measure images per second by number of workers; all ranks must call this together.

    Args:
        session: open session.
        arguments: arguments `data`, `workers` (numbers; None for the default), `need` and
            `seconds`.

    Raises:
        UsageError: there are no images, fewer than one step takes, or no decoder.
    """
    synthetic = arguments.data == SYNTHETIC
    source = Pictures() if synthetic else data.image_source(arguments.data, "train")
    _refuse_few(source, session)
    arms = _LoadingArms(session, source)
    cores = min(len(os.sched_getaffinity(0)), session.workers + 1)
    numbers = on_rank_zero(session.backend, lambda: arguments.workers or numbers_of_workers(cores))
    turns = {DECODE: arms.decode}
    turns |= {_name(number): partial(arms.load, number) for number in numbers}
    in_turns(session, turns, 0.0, 1)  # warm-up: files are found, and processes started once
    ranks = session.backend.gather_object(in_turns(session, turns, arguments.seconds))
    if not session.is_main:
        return {}
    size = session.batches.batch_size
    return {
        "data": arguments.data,
        "images": len(source),
        "batch_size": size,
        "title": f"{arguments.data}: {len(source):,} images, to {_SIDE} pixels, "
        f"{size} of a rank in a batch",
        **evaluate(ranks, numbers, arguments.need),
    }


def _refuse_few(source: Source, session: Session) -> None:
    """Raise an error if there are fewer images than one batch of each rank takes."""
    ranks, size = session.world.world_size, session.batches.batch_size
    if len(source) < ranks * size:
        raise UsageError(
            "HT909",
            f"{source.place} has {len(source)} images, but a batch of each rank takes "
            f"{ranks * size}",
            "at least as many images",
            f"--batch-size {len(source) // ranks}"
            if len(source) >= ranks
            else "--data PATH of more images",
        )


def numbers_of_workers(cores: int) -> list[int]:
    """Return the numbers of workers to try: 0, 1, 2, 4 and so on, up to one for each core.

    Args:
        cores: number of cores of a rank.
    """
    powers = [2**n for n in range(cores.bit_length())]
    return sorted({0, *powers, cores})


def _name(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def evaluate(ranks: Sequence[Times], numbers: Sequence[int], need: int | None) -> Results:
    """Summarise the results of the arms.

    Args:
        ranks: for each rank, the seconds per image of each arm, one value per round.
        numbers: numbers of workers that were tried.
        need: images per second that the steps of a rank need; None where not given.
    """
    rounds = {name: list(zip(*(own[name] for own in ranks), strict=True)) for name in ranks[0]}
    series = {name: {"images_per_s": [_rate(row) for row in own]} for name, own in rounds.items()}
    results = compare(series, by=())
    for name, arm in results.items():
        arm["images_per_s_of_a_rank"] = 1 / statistics.median(map(max, rounds[name]))
    found: Results = {"results": results, "notes": _NOTE}
    if need is not None:
        enough = [n for n in numbers if results[_name(n)]["images_per_s_of_a_rank"] >= need]
        found["enough_workers"] = min(enough, default=None)
        option = f"--workers {min(enough)}" if enough else "none of these numbers"
        found["notes"] += f"\n{need:,} images/s for a rank: {option} is enough."
    return found


def _rate(seconds: Sequence[float]) -> float:
    """Return the images per second of all ranks from their seconds per image."""
    return sum(1 / own for own in seconds)
