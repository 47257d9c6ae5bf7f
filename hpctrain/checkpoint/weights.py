"""Weights that a training begins with, from a file of this or another program.

Source for the forms: `torch.save(model.state_dict())`; the reference scripts of torchvision keep it
under "model", those of timm under "state_dict"; torch's DistributedDataParallel puts `module.`
before each name; `export` describes its safetensors.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.speech import logger

__all__ = ["check_weights", "fill_weights"]

_SAFETENSORS = ".safetensors"
_MOST_NAMED = 3
_FORMS = "a file of hpctrain export, or of torch.save(model.state_dict(), FILE)"


def check_weights(path: Path) -> None:
    """Look whether a file can be read at all, before the ranks meet.

    Raises:
        UsageError: there is no such file, or no package that reads it.
    """
    if path.is_dir():
        raise UsageError(
            f"--init-from {path} is a folder", _FORMS, f"hpctrain export {path} FILE{_SAFETENSORS}"
        )
    try:
        with path.open("rb"):
            pass
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
    found = _of_model(_read(path), number)
    if found is None:
        logger.warning("%s has no model %d; it begins as the script made it", path, number)
        return
    own = model.state_dict()
    weights = {name: value for name, value in found.items() if name in own or _is_data(value)}
    wrong = [f"has no {name}" for name in own if name not in weights and _is_data(own[name])]
    wrong += [f"has {name}, which the model has not" for name in weights if name not in own]
    wrong += [
        f"has {name} of shape {tuple(weights[name].shape)}, the model's is {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and _is_data(value) and weights[name].shape != value.shape
    ]
    if wrong:
        more = len(wrong) - _MOST_NAMED
        raise UsageError(
            f"{path} {'; '.join(wrong[:_MOST_NAMED])}" + (f"; and {more} more" if more > 0 else ""),
            "the names and shapes of model.state_dict()",
            "the file of such a model; or, for a part of one, model.load_state_dict(…, "
            "strict=False) before session.prepare()",
        )
    model.load_state_dict(weights, strict=False)
    logger.info("model %d begins with the weights of %s", number, path)


def _read(path: Path) -> Any:
    """What a file holds, on the CPU."""
    try:
        if path.suffix != _SAFETENSORS:
            return torch.load(path, map_location="cpu", weights_only=True)
        with importlib.import_module("safetensors").safe_open(str(path), "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            # Of weights with two names one is written, and the other name is in the metadata.
            others = (file.metadata() or {}).items()
        return held | {name: held[known] for name, known in others if known in held}
    except Exception as error:  # both raise whatever they come upon
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{path} cannot be read as weights: {reason}", _FORMS, "--init-from FILE"
        ) from None


def _of_model(content: Any, number: int) -> dict[str, Any] | None:
    """The state of one model by its own names; None where the file has that of fewer models."""
    if isinstance(content, Mapping):
        inner = [content[key] for key in ("model", "state_dict") if key in content]
        content = next((one for one in inner if isinstance(one, (Mapping, list))), content)
    states = content if isinstance(content, list) else [content]  # a list in our checkpoints
    models = [_named(one) for one in states] or [{}]
    if all(any(name.startswith(f"model{n}.") for name in models[0]) for n in (0, 1)):
        return _below(f"model{number}.", models[0]) or None
    if number >= len(models):
        return None
    within = _below("module.", models[number])
    return within if len(within) == len(models[number]) else models[number]


def _named(state: Any) -> dict[str, Any]:
    return {str(name): value for name, value in state.items()} if isinstance(state, Mapping) else {}


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor)
