"""Weights that a training begins with, from a file of this or another program.

Source for the forms: `torch.save(model.state_dict())`; the reference scripts of torchvision keep it
under "model", those of timm under "state_dict"; torch's DistributedDataParallel puts `module.`
before each name; `export` describes its safetensors.
"""

import argparse
import contextlib
import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["check_weights", "fill_weights"]

_SAFETENSORS = ".safetensors"
_MOST_NAMED = 3
_FORMS = "a file of hpctrain export, or of torch.save(model.state_dict(), FILE)"


def check_weights(path: Path) -> None:
    """Look whether a file can be read at all, before the ranks meet.

    Raises:
        UsageError: there is no such file, or no package that reads it.
    """
    try:
        with path.open("rb"):
            pass
    except IsADirectoryError:
        raise UsageError(
            f"--init-from {path} is a folder", _FORMS, f"hpctrain export {path} FILE{_SAFETENSORS}"
        ) from None
    except OSError as error:
        raise UsageError(
            f"--init-from {path}: {error.strerror}",
            _FORMS,
            "--init-from FILE; leave it out where a run goes on from a checkpoint of its own",
        ) from None
    if path.suffix == _SAFETENSORS:
        try:
            importlib.import_module("safetensors")
        except ImportError as error:
            raise UsageError(
                f"--init-from {path}, and safetensors cannot be imported ({error})",
                "the package safetensors",
                "python -m pip install safetensors",
            ) from None


def fill_weights(path: Path, model: nn.Module, number: int) -> None:
    """Give a model the weights and buffers in a file; all of them or none.

    Args:
        path: of the file.
        model: as the script made it.
        number: of the model, from 0; a file may have those of several.

    Raises:
        UsageError: the file cannot be read, or has other names or shapes than the model.
    """
    own = {name: value for name, value in model.state_dict().items() if _is_data(value)}
    found = _of_model(_read(path), number, own.keys())
    if found is None:
        logger.warning("%s has no model %d; it begins as the script made it", path, number)
        return
    weights = {name: value for name, value in found.items() if _is_data(value)}
    wrong = [f"has no {name}" for name in own if name not in weights]
    wrong += [f"has {name}, which the model has not" for name in weights if name not in own]
    wrong += [
        f"has {name} of shape {tuple(weights[name].shape)}, the model's is {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and not is_lazy(value) and weights[name].shape != value.shape
    ]
    if wrong:
        more = len(wrong) - _MOST_NAMED
        raise UsageError(
            f"{path} {'; '.join(wrong[:_MOST_NAMED])}" + (f"; and {more} more" if more > 0 else ""),
            "the names and shapes of model.state_dict()",
            "the file of such a model; or, for a part of one, model.load_state_dict(…, "
            "strict=False) before session.prepare()",
        )
    model.load_state_dict(found, strict=False)
    logger.info("model %d begins with the weights of %s", number, path)


def _read(path: Path) -> Any:
    """What a file holds, on the CPU."""
    try:
        if path.suffix != _SAFETENSORS:
            with torch.serialization.safe_globals(_plain_data()):
                return torch.load(path, map_location="cpu", weights_only=True)
        with importlib.import_module("safetensors").safe_open(str(path), "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            # Of weights with two names one is written, and the other name is in the metadata.
            others = (file.metadata() or {}).items()
        return held | {name: held[known] for name, known in others if known in held}
    except Exception as error:  # both raise whatever they come upon
        raise UsageError(
            f"{path} cannot be read as weights: {_why(path, error)}", _FORMS, "--init-from FILE"
        ) from None


def _plain_data() -> list[Any]:
    """What the scripts of torchvision and timm save beside weights; to make it runs no code."""
    kinds = [numpy.dtype(kind) for kind in ("f2", "f4", "f8", "i4", "i8", "?")]
    scalar = kinds[0].type(0).__reduce__()[0]  # type: ignore[call-overload]
    return [argparse.Namespace, scalar, numpy.dtype, *map(type, kinds)]


def _why(path: Path, error: Exception) -> str:
    """Why a file cannot be read, in a line."""
    with contextlib.suppress(Exception), torch.serialization.safe_globals(_plain_data()):
        if refused := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return (
                f"it needs {', '.join(sorted(refused)[:_MOST_NAMED])}, and may run code of its own"
            )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # torch's way to say so goes on over many lines.
    return "it is none of torch.save" if reason.startswith("Weights only load failed") else reason


def _of_model(content: Any, number: int, own: Collection[str]) -> dict[str, Any] | None:
    """The state of one model by its own names; None where the file has that of fewer models.

    Args:
        content: of the file.
        number: of the model.
        own: the names of its weights and buffers.
    """
    if isinstance(content, Mapping):
        inner = [content[key] for key in ("model", "state_dict") if key in content]
        content = next((one for one in inner if isinstance(one, (Mapping, list))), content)
    states = content if isinstance(content, list) else [content]  # a list in our checkpoints
    models = [_named(one) for one in states] or [{}]
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
