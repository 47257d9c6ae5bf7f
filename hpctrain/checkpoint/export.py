"""Export of a checkpoint's weights as safetensors, a format that runs no code when it is read.

Sources: https://huggingface.co/docs/safetensors: metadata are strings. Of tensors that share
memory, one is written and the other names go to the metadata, as in `safetensors.torch.save_model`.
Several files have an index, as `save_pretrained` of Hugging Face's transformers writes it.
"""

import importlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpctrain.checkpoint.durable_files import sync
from hpctrain.checkpoint.loading import (
    Opened,
    best_of,
    open_checkpoint,
    open_newest,
    places,
    read_manifest,
)
from hpctrain.checkpoint.stored import Stored
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

__all__ = ["INDEX", "SUFFIX", "export", "frozen", "import_safetensors"]

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
# Bytes of a file of several; the default of transformers.
_BYTES_OF_A_FILE = 5 * 10**9


def export(
    directory: RunDirectory,
    target: Path,
    *,
    step: int | None = None,
    best: str | None = None,
    file_bytes: int = _BYTES_OF_A_FILE,
) -> int:
    """Write the weights and buffers of a checkpoint, completely or not at all.

    The names of a single model are those of its state_dict(). With several models each name has a
    prefix, `model0.` and so on.

    Args:
        directory: run directory.
        target: file to write, if its name ends in `.safetensors`; an existing one is replaced.
            Otherwise a new folder, with several files and their index; no more than one of them is
            in memory at a time.
        step: step of the checkpoint (default: newest complete one).
        best: name of a metric; selects the checkpoint with its best value instead of `step`.
        file_bytes: bytes of the tensors in a file of a folder; a larger tensor has its own.

    Returns:
        Step of the checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        UsageError: safetensors is not installed, or the target cannot be written.
    """
    import_safetensors()
    one = target.suffix == SUFFIX
    if not one and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError("HT712.already-exists", target=target)
    step, opened = _find(directory, step, best)
    weights, others = _named(opened.state)
    run = directory.read(directory.identity) or {}
    metadata = {"format": "pt", "step": str(step), "run": str(run.get("name", directory.path.name))}
    if text := frozen(directory, step):
        metadata["frozen"] = text
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        if one:
            _write(temporary, opened, weights, metadata | others)
        else:
            temporary.mkdir()
            _write_folder(temporary, opened, weights, metadata, others, file_bytes)
            if target.is_dir():
                target.rmdir()  # empty
        temporary.replace(target)
        sync(target.parent)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors has its own error type
        raise UsageError("HT712.not-written", target=target, error=error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)
    return step


def import_safetensors(path: Path | None = None) -> Any:
    """Return the module `safetensors.torch`.

    Args:
        path: file that needs it, for the error message.

    Raises:
        UsageError: safetensors is not installed.
    """
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        key = "HT711.file-needs-safetensors" if path else "HT711.not-importable"
        raise UsageError(key, path=path, error=error) from None


def _write(
    path: Path, opened: Opened, weights: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """Read tensors, and write them to a file, with the mode of a file that Python creates."""
    writer = import_safetensors()
    path.touch(exist_ok=False)
    mode = path.stat().st_mode & 0o777
    writer.save_file(opened.tensors(weights), str(path), dict(metadata))
    path.chmod(mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_folder(
    folder: Path,
    opened: Opened,
    weights: Mapping[str, Any],
    metadata: Mapping[str, str],
    others: Mapping[str, str],
    most: int,
) -> None:
    """Write files of at most so many bytes, and their index.

    Args:
        folder: empty folder.
        opened: checkpoint with the tensors.
        weights: tensors to write by name.
        metadata: metadata of each file.
        others: names of tensors that share memory, each with the name that is written.
        most: bytes of the tensors in a file.
    """
    groups: list[dict[str, Any]] = [{}]
    room = most
    for name, tensor in weights.items():
        if groups[-1] and tensor.nbytes > room:
            groups.append({})
            room = most
        groups[-1][name] = tensor
        room -= tensor.nbytes
    files = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}"
        own = {other: stored for other, stored in others.items() if stored in group}
        _write(folder / name, opened, group, {**metadata, **own})
        files.update(dict.fromkeys(group, name))
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size, **metadata}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    sync(folder)


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


def _find(directory: RunDirectory, step: int | None, best: str | None) -> tuple[int, Opened]:
    """Return the step and the models of the selected checkpoint."""
    parts = {"model"}
    found = places(directory)
    if best is not None:
        step = best_of(directory, best)
        if step is None:
            raise CheckpointError("HT709.no-such-metric", directory=directory, metric=best)
    if step is not None:
        if step not in found:
            steps = ", ".join(map(str, found)) or "none"
            raise CheckpointError("HT709.no-such-step", step=step, directory=directory, steps=steps)
        return step, open_checkpoint(found[step], step, parts)
    newest = open_newest(directory, parts)
    if newest is None:
        raise CheckpointError("HT709.no-checkpoint", directory=directory)
    return newest


def _named(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors by name, without shared memory, and the removed names of shared tensors."""
    models: Sequence[Mapping[str, Any]] = state["model"]
    weights: dict[str, Any] = {}
    others: dict[str, str] = {}
    first: dict[Any, str] = {}
    for number, model in enumerate(models):
        prefix = f"model{number}." if len(models) > 1 else ""
        for name, value in model.items():
            if isinstance(value, Stored):
                where: Any = value
            elif isinstance(value, Tensor):
                where = (value.data_ptr(), value.dtype, value.shape, value.stride())
            else:
                logger.warning("%s is no tensor and is left out", prefix + name)
                continue
            stored = first.setdefault(where, prefix + name) if value.nbytes else prefix + name
            if stored != prefix + name:
                others[prefix + name] = stored
            else:
                weights[prefix + name] = value
    return weights, others
