"""Checkpoints that are whole or not there.

    checkpoints/step-00000042/model.pt …      one file for each part of the state
                              manifest.json   step, sizes and hashes of the files, world, versions

A checkpoint is written under a name that begins with a dot, flushed to the disk, and renamed: the
rename commits it. A reader checks the hashes and takes only weights and plain values from the
files, never code.
"""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.rundir import RunDirectory
from hpctrain.speech import logger

__all__ = ["load_newest", "save"]

FORMAT = 2
_MANIFEST = "manifest.json"
_KEEP = 3
# Parts below this many bytes are read back at once: a state that torch refuses to load is found
# when it is written, not when it is needed.
_SMALL = 1 << 20


def save(
    directory: RunDirectory, step: int, state: Mapping[str, Any], facts: Mapping[str, Any]
) -> Path:
    """Commit a checkpoint, then remove all but the newest three.

    Args:
        directory: of the run.
        step: optimizer steps done.
        state: part by part what `torch.save` takes; each part is a file.
        facts: more for the manifest; JSON values.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: it could not be written; those before it are untouched.
        UsageError: a state holds what cannot be loaded again.
    """
    final = directory.checkpoint(step)
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    replaced = final.with_name(f".{final.name}.old")
    _clear(directory)  # a start before may have been killed while it wrote
    try:
        temporary.mkdir(parents=True)
        files = {
            f"{part}.pt": _write(temporary / f"{part}.pt", value) for part, value in state.items()
        }
        manifest = {"format": FORMAT, "step": step, "files": files, **facts}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        _sync(temporary / _MANIFEST)
        _sync(temporary)
        if final.exists():
            # The same step at another place of the loop, such as the end of its epoch.
            final.rename(replaced)
        temporary.rename(final)
        _sync(final.parent)
    # torch.save turns the OSError of a full disk into a RuntimeError.
    except (OSError, RuntimeError) as error:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {final.parent}: {error}",
            "a file system with room",
            f"df -h {final.parent}",
        ) from None
    finally:
        _clear(directory)
    for old in directory.steps()[:-_KEEP]:
        shutil.rmtree(directory.checkpoint(old), ignore_errors=True)
    return final


def _clear(directory: RunDirectory) -> None:
    """Remove what is not committed, or was replaced."""
    for left in directory.checkpoints.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def load_newest(directory: RunDirectory) -> tuple[int, dict[str, Any]] | None:
    """The newest whole checkpoint: its step and state; None when there is none at all.

    One that is damaged is named and the one before it is taken.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    steps = directory.steps()
    for step in reversed(steps):
        try:
            return step, _load(directory.checkpoint(step))
        except CheckpointError as error:
            logger.error("%s; trying the one before", error.found)
    if steps:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {directory.checkpoints} is whole",
            "at least one",
            "start over in another directory with --run DIR",
        )
    return None


def _write(path: Path, value: Any) -> dict[str, Any]:
    """Write one part and describe it for the manifest."""
    torch.save(value, path)
    _sync(path)
    if path.stat().st_size < _SMALL:
        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UsageError(
                f"the state of {path.stem!r} holds what no checkpoint can give back: "
                f"{str(error).splitlines()[0]}",
                "tensors and plain values in every state_dict()",
                "float(x) for a number of NumPy's; strings and lists for objects",
            ) from None
    return {"size": path.stat().st_size, "sha256": _hash(path)}


def _load(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = dict(manifest["files"])
        known = manifest["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} has no readable manifest ({error})") from None
    if not known:
        raise CheckpointError(f"{folder} has format {manifest['format']}, not {FORMAT}")
    state = {}
    for name, said in files.items():
        path = folder / name
        try:
            if path.stat().st_size != said["size"] or _hash(path) != said["sha256"]:
                raise CheckpointError(f"{path} is not what was written")
            state[path.stem] = torch.load(path, map_location="cpu", weights_only=True)
        except (
            OSError,
            RuntimeError,
            ValueError,
            LookupError,
            TypeError,
            pickle.UnpicklingError,
        ) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from None
    return state


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
