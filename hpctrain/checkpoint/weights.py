"""Initial weights of a training, from a file or folder of hpctrain or another program.

Source for the formats: `torch.save(model.state_dict())`; the reference scripts of torchvision store
it under "model", those of timm under "state_dict"; torch's DistributedDataParallel adds `module.`
before each name; `export` describes the safetensors format, and folders of it.
"""

import argparse
import contextlib
import fnmatch
import glob
import importlib
import json
import shlex
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.checkpoint.export import INDEX, SUFFIX, import_safetensors
from hpctrain.cluster.texts import first_line
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger
from hpctrain.process.pytree import map_tensors

__all__ = ["Weight", "check_weights", "covering", "fill_weights"]

_MOST_NAMED = 3
_FORMS = "a file or folder of hpctrain export, or of torch.save(model.state_dict(), FILE)"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight in a file, which is read when it is needed.

    Attributes:
        shape: shape of the weight.
        read: function that returns the rows of a slice; all of it for `...`.
    """

    shape: torch.Size
    read: Callable[[Any], Tensor]


def check_weights(path: Path) -> None:
    """Check whether a file can be opened, before the rendezvous of the ranks.

    Raises:
        UsageError: the file cannot be opened, or the package to read it is missing.
    """
    try:
        folder = stat.S_ISDIR(path.stat().st_mode)
        if folder and not (path / INDEX).exists():
            raise UsageError(
                "HT713",
                f"--init-from {path} is a folder without {INDEX}",
                _FORMS,
                f"hpctrain export {path} FILE{SUFFIX}",
            )
        with (path / INDEX if folder else path).open("rb"):
            pass
    except OSError as error:
        raise UsageError(
            "HT713",
            f"--init-from {path}: {error.strerror}",
            _FORMS,
            "--init-from FILE",
            "leave it out if the run continues from its own checkpoint",
        ) from None
    if folder or path.suffix in (SUFFIX, ".json"):
        import_safetensors(f"--init-from {path}, but ")


def fill_weights(
    path: Path,
    model: nn.Module,
    number: int,
    skip: Sequence[str] = (),
    read: Callable[[Weight, Tensor], Tensor] = lambda weight, _: weight.read(...),
) -> None:
    """Load the weights and buffers in a file into a model; all of them or none.

    A name that the file lacks is filled if it shares its memory with one that the file has.

    Args:
        path: file with the weights.
        model: model as the script created it.
        number: number of the model, from 0; a file may contain several models.
        skip: patterns of names that stay as they are in the model, in the syntax of fnmatch.
        read: function of a weight in the file and of the model's tensor, which returns the tensor
            to load, for models that are divided among the ranks.

    Raises:
        UsageError: the file cannot be read, its names or shapes differ from the model's, or a
            pattern fits no name.
    """
    own = {name: value for name, value in model.state_dict().items() if _is_data(value)}
    content = _read(path)
    found = _of_model(content, number, own.keys())
    if found is None:
        logger.warning(
            "%s has no model %d; the model keeps the weights from the script", path, number
        )
        return
    weights = {name: value for name, value in found.items() if _is_data(value)}
    names = {*own, *weights}
    unused = [pattern for pattern in skip if not fnmatch.filter(names, pattern)]
    # Of several models, a pattern may be for another one.
    if unused and _of_model(content, 1, ()) is None:
        raise UsageError(
            "HT714",
            f"--init-skip {shlex.quote(unused[0])} fits no name of the model or of {path}",
            f"patterns of names such as {next(iter(own), 'fc.weight')}",
            "--init-skip 'fc.*'",
        )
    kept = {name for pattern in skip for name in fnmatch.filter(names, pattern)}
    wrong = _differences(model, own, weights)
    left = {name: text for name, text in wrong.items() if name not in kept}
    if left:
        texts, more = list(left.values()), len(left) - _MOST_NAMED
        # Where most names differ, it is the file of another model.
        line = ",".join([*skip, *covering(left.keys(), names)])
        raise UsageError(
            "HT714",
            f"{path} {'; '.join(texts[:_MOST_NAMED])}" + (f"; and {more} more" if more > 0 else ""),
            "the names and shapes of model.state_dict()",
            "the file of such a model",
            f"--init-skip {shlex.quote(line)}, to keep what the script made of them"
            if 2 * len(left) <= len(names)
            else "",
        )
    loaded = {
        name: read(value, own[name]) if name in own and _is_data(value) else value
        for name, value in found.items()
        if name not in kept
    }
    try:
        model.load_state_dict(loaded, strict=False)
    except (RuntimeError, OSError) as error:
        raise _unreadable(path, error) from None
    skipped = [name for name in own if name in kept]
    more = len(skipped) - _MOST_NAMED
    logger.info(
        "model %d begins with the weights of %s%s",
        number,
        path,
        f", but not {', '.join(skipped[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")
        if skipped
        else "",
    )


def _differences(
    model: nn.Module, own: Mapping[str, Tensor], weights: Mapping[str, Weight]
) -> dict[str, str]:
    """Return what is wrong with a file for a model, by name.

    Args:
        model: model to fill.
        own: weights and buffers of the model.
        weights: those in the file.
    """
    # The memory of lazy parameters does not exist yet.
    there = {name: value for name, value in own.items() if not is_lazy(value)}
    place = _places(model, own)
    filled = {place[name] for name in there if name in weights}
    missing = [name for name in own if name not in weights]
    return {
        **{n: f"has no {n}" for n in missing if n not in there or place[n] not in filled},
        **{n: f"has {n}, which the model does not have" for n in weights if n not in own},
        **{
            n: f"has {n} of shape {tuple(weights[n].shape)}, the model's is {tuple(value.shape)}"
            for n, value in there.items()
            if n in weights and weights[n].shape != value.shape
        },
    }


def _places(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the memory of each tensor of a model; equal for two names of one weight."""
    known: dict[str, int] = {
        name: id(tensor)
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    # A model may give its state other names.
    return {
        name: known[name] if name in known else (value.data_ptr(), value.shape)
        for name, value in own.items()
    }


def _read(path: Path) -> Any:
    """Return the content of a file or folder, with a `Weight` for each tensor."""
    try:
        index = path / INDEX if path.is_dir() else path
        if index.suffix == ".json":
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            found: dict[str, Any] = {}
            for name in files:
                if Path(name).name != name:
                    raise ValueError(f"the file {name!r} in another folder")
                found |= _read_safetensors(index.parent / name)
            return found
        if path.suffix == SUFFIX:
            return _read_safetensors(path)
        with torch.serialization.safe_globals(_plain_data()):
            content = torch.load(path, map_location="cpu", weights_only=True)
        return map_tensors(_in_memory, content)
    except Exception as error:  # both raise errors of many types
        raise _unreadable(path, error) from None


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


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        "HT713",
        f"{path} cannot be read as weights: {_why(path, error)}",
        _FORMS,
        "--init-from FILE",
    )


def _plain_data() -> list[Any]:
    """Return types that torchvision and timm save beside weights; creating them runs no code."""
    kinds = [numpy.dtype(kind) for kind in ("f2", "f4", "f8", "i4", "i8", "?")]
    scalar = kinds[0].type(0).__reduce__()[0]  # type: ignore[call-overload]
    return [argparse.Namespace, scalar, numpy.dtype, *map(type, kinds)]


def _why(path: Path, error: Exception) -> str:
    """Return the reason why a file cannot be read, as one line."""
    with contextlib.suppress(Exception), torch.serialization.safe_globals(_plain_data()):
        if refused := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return f"it needs {', '.join(sorted(refused)[:_MOST_NAMED])}, and may run its own code"
    reason = first_line(error)
    # torch's own message has many lines.
    return (
        "torch.save did not write it" if reason.startswith("Weights only load failed") else reason
    )


def _of_model(content: Any, number: int, own: Collection[str]) -> dict[str, Any] | None:
    """Return the state of one model by the model's names; None if the file has fewer models.

    Args:
        content: content of the file.
        number: number of the model, from 0.
        own: names of the model's weights and buffers.
    """
    if isinstance(content, Mapping):
        inner = [content[key] for key in ("model", "state_dict") if key in content]
        content = next((value for value in inner if isinstance(value, (Mapping, list))), content)
    states = content if isinstance(content, list) else [content]  # checkpoints contain a list
    models = [_named(state) for state in states] or [{}]
    if number == 0 and not models[0].keys().isdisjoint(own):
        return models[0]
    if all(any(name.startswith(f"model{n}.") for name in models[0]) for n in (0, 1)):
        return _below(f"model{number}.", models[0]) or None
    if number >= len(models):
        return None
    # Programs that wrap a model save the names with a prefix: model.fc.weight.
    some = next(iter(own), "")
    prefixes = [name.removesuffix(some) for name in models[number] if name.endswith(f".{some}")]
    for prefix in ("module.", *prefixes):
        within = _below(prefix, models[number])
        if not within.keys().isdisjoint(own):
            return within
    return models[number]


def _named(state: Any) -> dict[str, Any]:
    return {str(name): value for name, value in state.items()} if isinstance(state, Mapping) else {}


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _is_data(value: Any) -> bool:
    return isinstance(value, (Tensor, Weight))


def covering(chosen: Collection[str], names: Collection[str]) -> list[str]:
    """Return as few patterns for fnmatch as fit all chosen names and none of the others.

    A pattern is the name of the outermost module whose names are all chosen, such as `layer1.*`,
    or a single name.

    Args:
        chosen: names to cover.
        names: all names, with the chosen ones; their parts are separated by dots.
    """
    outside = {prefix for name in names if name not in chosen for prefix in _prefixes(name)}
    found = {
        next((f"{glob.escape(p)}*" for p in _prefixes(name) if p not in outside), glob.escape(name))
        for name in chosen
    }
    return sorted(found)


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a name, the outermost first, each with its dot."""
    parts = name.split(".")
    return [".".join(parts[:length]) + "." for length in range(1, len(parts))]
