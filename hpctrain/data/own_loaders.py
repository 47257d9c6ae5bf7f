"""Loaders of a script's own: whether they give each rank its part, and in batches of which size."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hpctrain.arguments import Batches, Options
from hpctrain.errors import UsageError
from hpctrain.process import seeds
from hpctrain.process.pytree import map_tensors

__all__ = ["begin_own", "check_own", "fingerprint", "refuse_same", "samples"]

# Each goes through the whole data set, whatever the rank.
_UNDIVIDED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check_own(loader: Any, options: Options, batches: Batches, world_size: int) -> None:
    """Look at what a DataLoader says of itself, before its first batch.

    Args:
        loader: any iterable of batches; of one that is no DataLoader, nor tqdm's bar around one,
            nothing is known.
        options: of the session.
        batches: of the session.
        world_size: the number of ranks.

    Raises:
        UsageError: every rank would see all samples; or the batches have another size than the
            session was told, or none.
    """
    loader = _within_bar(loader)
    if not isinstance(loader, DataLoader):
        return
    sampler = _sampler(loader)
    if world_size > 1 and type(sampler) in _UNDIVIDED and not options.same_data:
        raise UsageError(
            f"a DataLoader with a {type(sampler).__name__}, on {world_size} ranks: each of them "
            f"would go through all {len(sampler):,} samples",
            "a loader that gives each rank its part of the data set",
            "session.loader(dataset, collate_fn=…); or DataLoader(…, sampler=DistributedSampler("
            "dataset, session.world.world_size, session.world.rank)). Where it is meant: "
            "--same-data",
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    told = options.batch_size is not None or options.global_batch is not None
    if loader.batch_size is None and loader.batch_sampler is None and not told:
        raise UsageError(
            "a DataLoader without batches: its batch_size is None, as args.batch_size is before "
            "the Session is open",
            "a batch size",
            "DataLoader(dataset, session.batches.batch_size, …); where the data set gives whole "
            "batches: --batch-size N",
        )
    matters = told or options.lr_scaling != "none"
    if matters and isinstance(size, int) and size != batches.batch_size:
        raise UsageError(
            f"a DataLoader with batches of {size}, and a session with micro-batches of "
            f"{batches.batch_size}",
            "the same in both: learning rate and speed follow from it",
            f"DataLoader(dataset, session.batches.batch_size, …), or --batch-size {size}",
        )


def begin_own(loader: Any, epoch: int, seed: int) -> None:
    """Let a DataLoader begin an epoch as it does after a resume as well.

    A sampler of torch's DistributedSampler's kind is told the epoch. A generator of the loader's
    own begins a stream that follows from the seed which it was given, and from the epoch.

    Args:
        loader: any iterable of batches.
        epoch: from 0.
        seed: of the run.
    """
    loader = _within_bar(loader)
    if not isinstance(loader, DataLoader):
        return
    sampler = _sampler(loader)
    for one in (sampler, loader.batch_sampler):
        if callable(tell := getattr(one, "set_epoch", None)):
            tell(epoch)
    owners = {getattr(one, "generator", None): one for one in (loader, sampler)}
    for generator, one in owners.items():
        if isinstance(generator, torch.Generator):
            if not hasattr(one, _GIVEN):
                setattr(one, _GIVEN, generator.initial_seed())
            generator.manual_seed(seeds.derive("generator", seed, getattr(one, _GIVEN), epoch))


_GIVEN = "_hpctrain_seed"


def samples(batch: Any) -> int | None:
    """How many a batch has: the length of its first tensor; None where it has none."""
    found: list[int] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(len(tensor) if tensor.dim() else 1)
        return tensor

    map_tensors(see, batch)
    return found[0] if found else None


def fingerprint(batch: Any) -> str:
    """What tells one batch from another; empty where it has no tensor."""
    digest, count = hashlib.blake2b(digest_size=16), 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        data = tensor.detach().cpu().contiguous()
        digest.update(repr((tensor.dtype, tensor.shape)).encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    map_tensors(add, batch)
    return digest.hexdigest() if count else ""


def refuse_same(fingerprints: Iterable[str]) -> None:
    """Hold the first batches of all ranks against each other, at rank 0.

    Args:
        fingerprints: of each rank's.

    Raises:
        UsageError: two ranks have the same.
    """
    first: dict[str, int] = {}
    for rank, one in enumerate(fingerprints):
        if one and one in first:
            raise UsageError(
                f"ranks {first[one]} and {rank} begin with the same batch",
                "another part of the data on each rank",
                "session.loader(dataset); or let your loader take every world_size-th batch, from "
                "session.world.rank on. Where it is meant: --same-data",
            )
        first[one] = rank


def _within_bar(loader: Any) -> Any:
    """What tqdm shows the progress of; or the loader itself."""
    return getattr(loader, "iterable", loader)


def _sampler(loader: DataLoader[Any]) -> Any:
    """Of its samples, also from within a plain BatchSampler."""
    batched = loader.batch_sampler
    return batched.sampler if type(batched) is BatchSampler else loader.sampler
