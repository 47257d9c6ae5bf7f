"""Export of a checkpoint's weights as safetensors, a format that runs no code when it is read.

Source: https://huggingface.co/docs/safetensors: metadata are strings. Of tensors that share memory,
one is written and the other names go to the metadata, as in `safetensors.torch.save_model`.
"""

import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpctrain.checkpoint.durable_files import sync
from hpctrain.checkpoint.loading import best_of, load, load_newest, places, read_manifest
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

__all__ = ["export", "frozen"]


def export(
    directory: RunDirectory,
    target: Path,
    *,
    step: int | None = None,
    best: str | None = None,
    ema: bool = False,
) -> int:
    """Write the weights and buffers of a checkpoint to a file, completely or not at all.

    The names of a single model are those of its state_dict(). With several models each name has a
    prefix, `model0.` and so on.

    Args:
        directory: run directory.
        target: file to write; an existing file is replaced.
        step: step of the checkpoint (default: newest complete one).
        best: name of a metric; selects the checkpoint with its best value instead of `step`.
        ema: whether to write the averages of `--ema` in place of the weights.

    Returns:
        Step of the checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        UsageError: safetensors is not installed, there are no averages, or the file cannot be
            written.
    """
    try:
        writer = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise UsageError(
            "HT711",
            f"safetensors cannot be imported ({error})",
            "the package safetensors",
            "python -m pip install safetensors",
        ) from None
    step, state = _find(directory, step, best, ema)
    weights, metadata = _named(state, ema, directory)
    metadata |= {"format": "pt", "step": str(step), "run": _name_of(directory)}
    if text := frozen(directory, step):
        metadata["frozen"] = text
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        # Python creates the file, so that its mode follows the umask whatever safetensors does.
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode & 0o777
        writer.save_file(weights, str(temporary), metadata)
        temporary.chmod(mode)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
        sync(target.parent)
    except Exception as error:  # safetensors has its own error type
        raise UsageError(
            "HT712",
            f"{target} could not be written: {error}",
            "a file in a folder with room, and dense tensors",
            f"df -h {target.parent}",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return step


def frozen(directory: RunDirectory, step: int, most: int | None = None) -> str:
    """Return how many parameters were frozen in a checkpoint, and patterns of their names.

    Args:
        directory: run directory.
        step: step of the checkpoint.
        most: patterns to name (default: all).

    Returns:
        A text such as `60 of 62 parameters: conv1.*, layer1.*`; empty if none was frozen, or if the
        checkpoint does not say it.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    entry = read_manifest(places(directory)[step], step).get("frozen") or {}
    if not entry.get("count"):
        return ""
    names = entry["parameters"]
    more = [f"and {len(names) - most} more"] if most is not None and len(names) > most else []
    return f"{entry['count']} of {entry['of']} parameters: {', '.join([*names[:most], *more])}"


def _find(
    directory: RunDirectory, step: int | None, best: str | None, ema: bool
) -> tuple[int, dict[str, Any]]:
    """Return the step and the required parts of the selected checkpoint."""
    parts = {"model", "ema"} if ema else {"model"}
    found = places(directory)
    if best is not None:
        step = best_of(directory, best)
        if step is None:
            raise CheckpointError(
                "HT709",
                f"no checkpoint in {directory.checkpoints} has a number for {best!r}",
                "the name of a metric that the checkpoints contain",
                "--step N",
                "a run with --keep-best NAME",
            )
    if step is not None:
        if step not in found:
            raise CheckpointError(
                "HT709",
                f"no checkpoint of step {step} in {directory.checkpoints}",
                "one of " + (", ".join(map(str, found)) or "none"),
                "--step N",
            )
        return step, load(found[step], step, parts)
    newest = load_newest(directory, parts=parts)
    if newest is None:
        raise CheckpointError(
            "HT709",
            f"no complete checkpoint in {directory.checkpoints}",
            "the directory of a run that has saved a checkpoint",
            f"ls {directory.path}",
        )
    return newest


def _named(
    state: Mapping[str, Any], ema: bool, directory: RunDirectory
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors by name, without shared memory, and the removed names of shared tensors."""
    models: Sequence[Mapping[str, Any]] = state["model"]
    if ema and "ema" not in state:
        raise UsageError(
            "HT710",
            f"the checkpoints of {directory.path} have no averages of the weights",
            "a run with --ema",
            "leave out --ema",
        )
    weights: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    first: dict[Any, str] = {}
    for number, model in enumerate(models):
        averages = state["ema"]["averages"][number] if ema else {}
        prefix = f"model{number}." if len(models) > 1 else ""
        for name, value in model.items():
            tensor = averages.get(name, value)
            if not isinstance(tensor, Tensor):
                logger.warning("%s is no tensor and is left out", prefix + name)
                continue
            where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            stored = first.setdefault(where, prefix + name) if tensor.numel() else prefix + name
            if stored != prefix + name:
                others[prefix + name] = stored
            else:
                # Without the clone, a view would write its whole storage or be refused.
                weights[prefix + name] = tensor.detach().clone().contiguous()
    return weights, others


def _name_of(directory: RunDirectory) -> str:
    return str((directory.read(directory.identity) or {}).get("name", directory.path.name))
