"""Checks of a script's own loaders: a separate part for each rank, and the right batch size."""

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

# Each iterates over the whole data set on every rank.
_UNDIVIDED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def check_own(loader: Any, options: Options, batches: Batches, world_size: int) -> None:
    """Check the sampler and batch size of a DataLoader, before its first batch.

    Args:
        loader: any iterable of batches; only a DataLoader, or tqdm's bar around one, is checked.
        options: options of the session.
        batches: batch sizes of the session.
        world_size: number of ranks.

    Raises:
        UsageError: every rank would see all samples; or the batch size differs from that of the
            session, or is missing.
    """
    loader = _without_bar(loader)
    if not isinstance(loader, DataLoader):
        return
    sampler = _sampler(loader)
    if world_size > 1 and type(sampler) in _UNDIVIDED and not options.same_data:
        raise UsageError(
            "HT508",
            f"a DataLoader with a {type(sampler).__name__}, on {world_size} ranks: each rank "
            f"would go through all {len(sampler):,} samples",
            "a loader that gives each rank its part of the data set",
            "session.loader(dataset, collate_fn=…)",
            "DataLoader(…, sampler=DistributedSampler(dataset, session.world.world_size, "
            "session.world.rank))",
            "--same-data (if you want this)",
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    size_given = options.batch_size is not None or options.global_batch is not None
    if loader.batch_size is None and loader.batch_sampler is None and not size_given:
        raise UsageError(
            "HT509",
            "a DataLoader without batches: its batch_size is None, as args.batch_size is before "
            "the Session is open",
            "a batch size",
            "DataLoader(dataset, session.batches.batch_size, …)",
            "--batch-size N (if the data set gives whole batches)",
        )
    matters = size_given or options.lr_scaling != "none"
    if matters and isinstance(size, int) and size != batches.batch_size:
        raise UsageError(
            "HT509",
            f"a DataLoader with batches of {size}, but a session with micro-batches of "
            f"{batches.batch_size}",
            "the same in both: learning rate and speed follow from it",
            "DataLoader(dataset, session.batches.batch_size, …)",
            f"--batch-size {size}",
        )


def begin_own(loader: Any, epoch: int, seed: int) -> None:
    """Prepare a DataLoader for an epoch, so that a resumed run gets the same batches.

    A sampler with `set_epoch`, such as DistributedSampler, gets the epoch. A generator of the
    loader or sampler is seeded from the run's seed, the generator's first seed and the epoch.

    Args:
        loader: any iterable of batches.
        epoch: number of the epoch, from 0.
        seed: seed of the run.
    """
    loader = _without_bar(loader)
    if not isinstance(loader, DataLoader):
        return
    sampler = _sampler(loader)
    for owner in (sampler, loader.batch_sampler):
        if callable(set_epoch := getattr(owner, "set_epoch", None)):
            set_epoch(epoch)
    owners = {getattr(owner, "generator", None): owner for owner in (loader, sampler)}
    for generator, owner in owners.items():
        if isinstance(generator, torch.Generator):
            if not hasattr(owner, _FIRST_SEED):
                setattr(owner, _FIRST_SEED, generator.initial_seed())
            generator.manual_seed(
                seeds.derive("generator", seed, getattr(owner, _FIRST_SEED), epoch)
            )


_FIRST_SEED = "_hpctrain_seed"


def samples(batch: Any) -> int | None:
    """Return the number of samples of a batch: the length of its first tensor; None without one."""
    found: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(len(tensor) if tensor.dim() else 1)
        return tensor

    map_tensors(add, batch)
    return found[0] if found else None


def fingerprint(batch: Any) -> str:
    """Return a digest of a batch's tensors; empty if the batch has no tensor."""
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
    """Check on rank 0 that the first batches of all ranks differ.

    Args:
        fingerprints: fingerprint of each rank's first batch.

    Raises:
        UsageError: two ranks have the same batch.
    """
    first: dict[str, int] = {}
    for rank, digest in enumerate(fingerprints):
        if digest and digest in first:
            raise UsageError(
                "HT508",
                f"ranks {first[digest]} and {rank} begin with the same batch",
                "a different part of the data on each rank",
                "session.loader(dataset)",
                "let your loader take every world_size-th batch, from session.world.rank on",
                "--same-data (if you want this)",
            )
        first[digest] = rank


def _without_bar(loader: Any) -> Any:
    """Return the loader inside of a tqdm bar, or the loader itself."""
    return getattr(loader, "iterable", loader)


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of single samples, also from inside of a plain BatchSampler."""
    batched = loader.batch_sampler
    return batched.sampler if type(batched) is BatchSampler else loader.sampler
