"""Initial weights of a training, from a file of hpctrain or another program.

Source for the formats: `torch.save(model.state_dict())`; the reference scripts of torchvision store
it under "model", those of timm under "state_dict"; torch's DistributedDataParallel adds `module.`
before each name; `export` describes the safetensors format.
"""

import argparse
import contextlib
import fnmatch
import importlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.checkpoint.name_patterns import covering
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["check_weights", "fill_weights"]

_SAFETENSORS = ".safetensors"
_MOST_NAMED = 3
_FORMS = "a file of hpctrain export, or of torch.save(model.state_dict(), FILE)"


def check_weights(path: Path) -> None:
    """Check whether a file can be opened, before the rendezvous of the ranks.

    Raises:
        UsageError: the file cannot be opened, or the package to read it is missing.
    """
    try:
        with path.open("rb"):
            pass
    except IsADirectoryError:
        raise UsageError(
            "HT713",
            f"--init-from {path} is a folder",
            _FORMS,
            f"hpctrain export {path} FILE{_SAFETENSORS}",
        ) from None
    except OSError as error:
        raise UsageError(
            "HT713",
            f"--init-from {path}: {error.strerror}",
            _FORMS,
            "--init-from FILE",
            "leave it out if the run continues from its own checkpoint",
        ) from None
    if path.suffix == _SAFETENSORS:
        try:
            importlib.import_module("safetensors")
        except ImportError as error:
            raise UsageError(
                "HT711",
                f"--init-from {path}, but safetensors cannot be imported ({error})",
                "the package safetensors",
                "python -m pip install safetensors",
            ) from None


def fill_weights(path: Path, model: nn.Module, number: int, skip: Sequence[str] = ()) -> None:
    """Load the weights and buffers in a file into a model; all of them or none.

    A name that the file lacks is filled if it shares its memory with one that the file has.

    Args:
        path: file with the weights.
        model: model as the script created it.
        number: number of the model, from 0; a file may contain several models.
        skip: patterns of names that stay as they are in the model, in the syntax of fnmatch.

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
    wrong = _differences(own, weights)
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
    model.load_state_dict(
        {name: value for name, value in found.items() if name not in kept}, strict=False
    )
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


def _differences(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what is wrong with a file for a model, by name.

    Args:
        own: weights and buffers of the model.
        weights: those in the file.
    """
    # The memory of lazy parameters does not exist yet.
    there = {name: value for name, value in own.items() if not is_lazy(value)}
    filled = {_place(value) for name, value in there.items() if name in weights}
    missing = [name for name in own if name not in weights]
    return {
        **{n: f"has no {n}" for n in missing if n not in there or _place(own[n]) not in filled},
        **{n: f"has {n}, which the model does not have" for n in weights if n not in own},
        **{
            n: f"has {n} of shape {tuple(weights[n].shape)}, the model's is {tuple(value.shape)}"
            for n, value in there.items()
            if n in weights and weights[n].shape != value.shape
        },
    }


def _place(value: Tensor) -> tuple[Any, ...]:
    """Return the memory of a tensor; equal for two names of one weight."""
    return (value.data_ptr(), value.shape) if value.numel() else (id(value),)


def _read(path: Path) -> Any:
    """Return the content of a file, on the CPU."""
    try:
        if path.suffix != _SAFETENSORS:
            with torch.serialization.safe_globals(_plain_data()):
                return torch.load(path, map_location="cpu", weights_only=True)
        with importlib.import_module("safetensors").safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            # For weights with two names, the file has one and the metadata have the other name.
            others = (file.metadata() or {}).items()
        return tensors | {name: tensors[other] for name, other in others if other in tensors}
    except Exception as error:  # both raise errors of many types
        raise UsageError(
            "HT713",
            f"{path} cannot be read as weights: {_why(path, error)}",
            _FORMS,
            "--init-from FILE",
        ) from None


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
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
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
    within = _below("module.", models[number])
    return within if not within.keys().isdisjoint(own) else models[number]


def _named(state: Any) -> dict[str, Any]:
    return {str(name): value for name, value in state.items()} if isinstance(state, Mapping) else {}


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor)
