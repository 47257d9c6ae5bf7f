"""What hpctrain has to know of the streams of webdataset and of Hugging Face's datasets.

Neither library is imported here: their objects are recognized by attributes. Every other stream is
used by the protocol of `state_dict()` and `load_state_dict()` alone.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from hpctrain.process import seeds

__all__ = ["begin_pipelines", "generators", "split_over_ranks", "stateful"]


def split_over_ranks(source: Any, rank: int, world_size: int) -> tuple[Any, bool]:
    """Return a stream that gives this rank its part; True if its library divides it.

    A stream of Hugging Face is split by that library. A pipeline of webdataset is changed: the
    stage that divides the tar files, or refuses several ranks, gets the rank from here, because the
    library finds it under some launchers only.

    Args:
        source: data set, or pipeline of webdataset; others are returned as they are.
        rank, world_size: this rank, and the number of ranks.
    """
    library = sys.modules.get("datasets")
    if library is not None and isinstance(source, getattr(library, "IterableDataset", ())):
        if getattr(source, "_distributed", None) is None:  # else the script has split it
            from datasets.distributed import split_dataset_by_node

            source = split_dataset_by_node(source, rank, world_size)
        return source, True
    is_split = False
    for stages in _pipelines(source):
        for number, stage in enumerate(stages):
            if isinstance(stage, partial) and stage.func is _every:
                is_split = True  # by an earlier call
            elif getattr(stage, "__name__", "") in ("single_node_only", "split_by_node"):
                stages[number] = partial(_every, rank, world_size)
                is_split = True
    return source, is_split


def _every(rank: int, world_size: int, shards: Any) -> Iterator[Any]:
    """Return every `world_size`-th tar file from `rank` on; a stage of a pipeline."""
    return islice(shards, rank, None, world_size)


def begin_pipelines(source: Any, epoch: int, seed: int) -> None:
    """Prepare the shuffles of webdataset for an epoch.

    A `detshuffle` counts the epochs from the start of the process. A `shuffle` without a seed draws
    one from the clock, so that a resumed run could not get the same samples.

    Args:
        source: any loader, data set or pipeline.
        epoch: number of the epoch, from 0.
        seed: seed of the run.
    """
    for stages in _pipelines(source):
        for number, stage in enumerate(stages):
            if isinstance(getattr(stage, "epoch", None), int):
                stage.epoch = epoch - 1  # the stage adds 1 as it begins
            options = getattr(stage, "kw", None)
            function = getattr(getattr(stage, "f", None), "__name__", "")
            if function != "_shuffle" or options is None or len(stage.args) > _BEFORE_RNG:
                continue
            if vars(stage).setdefault(_OWN_SEED, not options.keys() & {"rng", "seed"}):
                options["seed"] = seeds.derive("shuffle", seed, epoch, number)


_OWN_SEED = "_hpctrain_seed"
_BEFORE_RNG = 2  # arguments of a shuffle before its generator


def _pipelines(source: Any) -> Iterator[list[Any]]:
    """Yield the lists of stages in a pipeline of webdataset, also those inside of a DataLoader."""
    inner = [vars(source).get("dataset")] if hasattr(source, "__dict__") else []
    if "webdataset" in sys.modules and isinstance(getattr(source, "pipeline", None), list):
        yield source.pipeline
        inner += source.pipeline
    for one in inner:
        if one is not None and not isinstance(one, type):
            yield from _pipelines(one)


def stateful(source: Any, workers: int) -> Any:
    """Return what can report and restore the position in a stream exactly; None without it.

    This is the loader, or without worker processes its data set.

    Args:
        source: loader, or any other iterable.
        workers: number of worker processes of the loader.
    """
    dataset = getattr(source, "dataset", None)
    if any(hasattr(node, "buffer_size") for one in (source, dataset) for node in _nodes(one)):
        return None  # a shuffle of Hugging Face, which loses what is in its buffer
    for one in (source, dataset if workers == 0 else None):
        if hasattr(one, "load_state_dict") and _takes_nothing(getattr(one, "state_dict", None)):
            return one
    return None


def _takes_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def generators(dataset: Any) -> str:
    """Return the states of the generators in a stream of Hugging Face; empty without any."""
    found = [getattr(node, "generator", None) for node in _nodes(dataset)]
    return "".join(repr(one.bit_generator.state) for one in found if one is not None)


def _nodes(dataset: Any) -> Iterator[Any]:
    """Yield the steps by which a stream of Hugging Face makes its samples."""
    left = [getattr(dataset, "_ex_iterable", None)]
    while left:
        node = left.pop()
        if node is not None:
            yield node
            left += [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())]
