"""Facts about a script's own loaders: batch size, sampler, and the first batch of each rank."""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hpctrain.arguments import Batches, Options
from hpctrain.cluster.texts import ranks_text
from hpctrain.data.libraries import begin_pipelines
from hpctrain.errors import UsageError
from hpctrain.process import seeds
from hpctrain.process.pytree import tensors_in

__all__ = [
    "batch_size",
    "begin_own",
    "check_own",
    "divided",
    "fingerprint",
    "length_of",
    "sampler_of",
    "samples",
    "split_themselves",
    "without_bar",
]


def check_own(loader: Any, options: Options, batches: Batches, parts: int) -> None:
    """Check the batch size of a DataLoader, before its first batch.

    Args:
        loader: any iterable of batches; only a DataLoader is checked.
        options: options of the session.
        batches: batch sizes of the session.
        parts: number of micro-batches that a batch is cut into.

    Raises:
        UsageError: the batch size differs from that of the session, or is missing.
    """
    if not isinstance(loader, DataLoader):
        return
    size = batch_size(loader, parts)
    size_given = options.batch_size is not None or options.global_batch is not None
    whole = isinstance(loader.sampler, BatchSampler)  # then an index is a list of them
    if loader.batch_size is None and loader.batch_sampler is None and not (size_given or whole):
        raise UsageError("HT509.no-batch-size")
    if size_given and isinstance(size, int) and size != batches.batch_size:
        whole_steps = size == batches.global_batch
        key = "HT509.global-batches" if whole_steps else "HT509.batch-size-differs"
        raise UsageError(key, size=size, batches=batches)


def batch_size(loader: DataLoader[Any], parts: int) -> int | None:
    """Return the number of samples of a micro-batch; None if it is not known before the batches.

    Args:
        loader: DataLoader of the script.
        parts: number of micro-batches that a batch is cut into.

    Raises:
        UsageError: a batch cannot be cut into equal parts.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return None
    if size % parts:
        below, above = size // parts * parts, -(-size // parts) * parts
        fixes = [f"batch_size={fitting}" for fitting in (below, above) if fitting]
        raise UsageError("HT505.split-batches", size=size, parts=parts, fixes=fixes)
    return size // parts


def divided(loader: DataLoader[Any], world_size: int) -> bool:
    """Return whether the sampler of a DataLoader gives each rank its part, as DistributedSampler.

    Args:
        loader: DataLoader of the script.
        world_size: number of ranks.
    """
    return any(
        getattr(owner, "num_replicas", None) == world_size and hasattr(owner, "rank")
        for owner in (loader.batch_sampler, sampler_of(loader))
    )


def begin_own(loader: Any, epoch: int, seed: int) -> None:
    """Prepare a loader for an epoch, so that a resumed run gets the same batches.

    A sampler with `set_epoch`, such as DistributedSampler, gets the epoch, and an IterableDataset
    with it too; those of MosaicML Streaming and webdataset have a counter. A generator of the
    loader or sampler is seeded from the run's seed, the generator's first seed and the epoch.

    Args:
        loader: any iterable of batches.
        epoch: number of the epoch, from 0.
        seed: seed of the run.
    """
    begin_pipelines(loader, epoch, seed)
    if not isinstance(loader, DataLoader):
        if isinstance(loader, IterableDataset) and callable(getattr(loader, "set_epoch", None)):
            loader.set_epoch(epoch)  # type: ignore[attr-defined]
        return
    sampler = sampler_of(loader)
    streams = isinstance(loader.dataset, IterableDataset)
    for owner in (sampler, loader.batch_sampler, loader.dataset if streams else None):
        if callable(set_epoch := getattr(owner, "set_epoch", None)):
            set_epoch(epoch)
    if streams and hasattr(loader.dataset, "next_epoch"):  # of MosaicML Streaming
        loader.dataset.next_epoch = epoch
    owners = {getattr(owner, "generator", None): owner for owner in (loader, sampler)}
    for generator, owner in owners.items():
        if isinstance(generator, torch.Generator):
            first = vars(owner).setdefault(_FIRST_SEED, generator.initial_seed())
            generator.manual_seed(seeds.derive("generator", seed, first, epoch))


_FIRST_SEED = "_hpctrain_seed"


def samples(batch: Any) -> int | None:
    """Return the number of samples of a batch: the length of its first tensor; None without one."""
    tensors = tensors_in(batch)
    return tensors[0].shape[:1].numel() if tensors else None


def fingerprint(batch: Any) -> str:
    """Return a digest of a batch's tensors, or of the batch; empty if it has none of a value."""
    digest, tensors = hashlib.blake2b(digest_size=16), tensors_in(batch)
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        digest.update(repr((tensor.dtype, tensor.shape)).encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    if not tensors:
        try:
            digest.update(pickle.dumps(batch))
        except (pickle.PicklingError, TypeError, AttributeError):
            return ""
    return digest.hexdigest()


def split_themselves(fingerprints: Sequence[str]) -> bool:
    """Return whether the ranks begin with different batches, or with the same one.

    Args:
        fingerprints: fingerprint of each rank's first batch; empty if unknown.

    Raises:
        UsageError: some ranks have the same batch, and others another one.
    """
    different = set(fingerprints)
    if "" in different or len(different) == len(fingerprints):
        return True
    if len(different) > 1:
        twice = next(digest for digest in fingerprints if fingerprints.count(digest) > 1)
        same = [rank for rank, digest in enumerate(fingerprints) if digest == twice]
        raise UsageError("HT508.same-batch-on-some-ranks", ranks=ranks_text(same))
    return False


def length_of(source: Any) -> int | None:
    """Return the length of a sampler or loader; None if it has none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):  # the data set of a DataLoader may have no length
        return None


def without_bar(loader: Any) -> Any:
    """Return the loader inside of a tqdm bar, or the loader itself."""
    return getattr(loader, "iterable", loader)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of single samples, also from inside of a plain BatchSampler."""
    batched = loader.batch_sampler
    return batched.sampler if type(batched) is BatchSampler else loader.sampler
