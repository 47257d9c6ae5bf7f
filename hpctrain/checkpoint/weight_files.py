"""Weights in files: safetensors, also several with an index, and files of `torch.save`.

Source for the formats: `export` describes the safetensors format. What training scripts save beside
weights is read as data, without code of the file.
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from hpctrain.checkpoint.export import INDEX, SUFFIX, import_safetensors
from hpctrain.cluster.texts import first_line, listed
from hpctrain.errors import UsageError
from hpctrain.process.pytree import map_tensors

__all__ = ["Source", "Weight", "read_weights", "unreadable"]

Source = str | os.PathLike[str] | Mapping[str, Any]

_MAX_NAMED = 3
_FORMS = (
    "safetensors (a file, or a folder with an index), or a file of torch.save(model.state_dict(), "
    "FILE)"
)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight in a file, which is read when it is needed.

    Attributes:
        shape: shape of the weight.
        read: function that returns the rows of a slice; all of it for `...`.
    """

    shape: torch.Size
    read: Callable[[Any], Tensor]


def read_weights(source: Source) -> Any:
    """Return the content of a file or folder, with a `Weight` for each tensor.

    Raises:
        UsageError: it cannot be read, or the package that reads it is missing.
    """
    if isinstance(source, Mapping):
        return map_tensors(_in_memory, dict(source))
    path = Path(source)
    try:
        if path.is_dir():
            path = _in_folder(path)
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError("HT713.unreadable", path=path, error=error) from None
    if path.suffix in (SUFFIX, ".json"):
        import_safetensors(path)
    try:
        if path.suffix == ".json":
            names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            weights: dict[str, Any] = {}
            for name in names:
                if Path(name).name != name:
                    raise ValueError(f"the file {name!r} in another folder")
                weights |= _read_safetensors(path.parent / name)
            return weights
        if path.suffix == SUFFIX:
            return _read_safetensors(path)
        with torch.serialization.safe_globals(_plain_data()):
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        return map_tensors(_in_memory, content)
    except Exception as error:  # both raise errors of many types
        raise unreadable(str(path), path, error) from None


def _in_folder(folder: Path) -> Path:
    """Return the index of a folder of safetensors files, or the only one.

    Raises:
        UsageError: it has neither.
    """
    for name in (INDEX, f"model{SUFFIX}"):
        if (folder / name).exists():
            return folder / name
    files = listed(sorted(path.name for path in folder.iterdir()))
    raise UsageError("HT713.no-model-in-folder", folder=folder, files=files)


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Return the weights of a file by name."""
    file = importlib.import_module("safetensors").safe_open(str(path), "pt")

    def weight(name: str) -> Weight:
        part = file.get_slice(name)
        shape = torch.Size(part.get_shape())
        return Weight(shape, lambda rows: file.get_tensor(name) if rows is ... else part[rows])

    weights = {name: weight(name) for name in file.keys()}  # noqa: SIM118
    # For weights with two names, the file has one and the metadata have the other name.
    others = (file.metadata() or {}).items()
    return weights | {name: weights[other] for name, other in others if other in weights}


def _in_memory(tensor: Tensor) -> Weight:
    if tensor.is_meta:
        raise ValueError(
            "its tensors are in other files of a checkpoint; hpctrain export RUN_DIR FILE has all"
        )
    return Weight(tensor.shape, lambda rows: tensor if rows is ... else tensor[rows])


def unreadable(label: str, source: Source, error: Exception) -> UsageError:
    """Return the error for a file that cannot be read.

    Args:
        label: name of the file.
        source: file, or weights by name.
        error: what happened.
    """
    return UsageError("HT713.not-weights", label=label, reason=_why(source, error))


def _plain_data() -> list[Any]:
    """Return types that training scripts save beside weights; creating them runs no code."""
    kinds = [numpy.dtype(kind) for kind in ("f2", "f4", "f8", "i4", "i8", "u4", "u8", "u1", "?")]
    scalar = kinds[0].type(0).__reduce__()[0]  # type: ignore[call-overload]
    array = numpy.zeros(1).__reduce__()[0]
    # Other versions of NumPy and Python have the same in other modules, which files name.
    elsewhere = [(scalar, "numpy.core.multiarray.scalar")]
    elsewhere += [(array, "numpy.core.multiarray._reconstruct")]
    elsewhere += [(pathlib.PosixPath, "pathlib.PosixPath")]
    plain = [argparse.Namespace, pathlib.PosixPath, scalar, array, numpy.ndarray, numpy.dtype]
    return [*plain, *elsewhere, *map(type, kinds)]


def _why(source: Source, error: Exception) -> str:
    """Return the reason why a file cannot be read, as one line."""
    if not isinstance(source, Mapping):
        with contextlib.suppress(Exception), torch.serialization.safe_globals(_plain_data()):
            if refused := torch.serialization.get_unsafe_globals_in_checkpoint(source):
                classes = ", ".join(sorted(refused)[:_MAX_NAMED])
                return f"it has objects of {classes}, and code in a file is never run"
    reason = first_line(error)
    # torch's own message has many lines.
    return (
        "torch.save did not write it" if reason.startswith("Weights only load failed") else reason
    )
