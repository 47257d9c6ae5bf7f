"""Weights in the format of torch.distributed.checkpoint, as torchtitan and others save them.

Source: the documentation of `torch.distributed.checkpoint`. Its index is a pickle, which may run
code: read only what you trust. The package is imported when it is used, as that takes long.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["INDEX", "find", "load", "save"]

INDEX = ".metadata"


def find(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and type of each tensor of a checkpoint, by its name.

    Raises:
        Exception: it is no such checkpoint; of many types.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load(folder: Path, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Read a tensor, on this rank alone."""
    from torch.distributed.checkpoint import state_dict_loader

    state = {name: torch.empty(shape, dtype=dtype, device="cpu")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    return state[name]


def save(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors to a folder, on this rank alone."""
    from torch.distributed.checkpoint import state_dict_saver

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process
        state_dict_saver.save(dict(weights), checkpoint_id=folder, no_dist=True)
