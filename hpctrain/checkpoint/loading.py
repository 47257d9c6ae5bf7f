"""Reading of checkpoints, with checks of names, sizes and contents."""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Collection, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from hpctrain.errors import CheckpointError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory, open_regular

__all__ = [
    "FORMAT",
    "MANIFEST",
    "best_of",
    "digest",
    "load",
    "load_newest",
    "places",
    "read_manifest",
    "replaced",
]

FORMAT = 3
MANIFEST = "manifest.json"
# No state needs more; hpctrain did not write a manifest above these limits.
_MOST_BYTES = 1 << 24
_MOST_FILES = 1000
_FILE = re.compile(r"[^\W.][\w.-]*\.pt\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_REPLACED = re.compile(r"\.step-(\d{8,})\.old\Z", re.ASCII)


def replaced(folder: Path) -> Path:
    """Return the temporary path of a checkpoint while two renames replace it."""
    return folder.with_name(f".{folder.name}.old")


def places(directory: RunDirectory) -> dict[int, Path]:
    """Return the folder of each committed checkpoint by step, in ascending order.

    A process may have been killed between the two renames that replace a checkpoint. Then the old
    checkpoint still counts.
    """
    found = {}
    if directory.checkpoints.is_dir():
        matches = (_REPLACED.match(entry.name) for entry in directory.checkpoints.iterdir())
        for step in (int(match[1]) for match in matches if match):
            found[step] = replaced(directory.checkpoint(step))
    found.update({step: directory.checkpoint(step) for step in directory.steps()})
    return dict(sorted(found.items()))


def load_newest(
    directory: RunDirectory,
    run: Mapping[str, Any] | None = None,
    parts: Collection[str] | None = None,
) -> tuple[int, dict[str, Any]] | None:
    """Return step and state of the newest complete checkpoint; None if there is no checkpoint.

    A checkpoint that is damaged or belongs to another run is logged, and the one before it is
    tried.

    Args:
        directory: run directory.
        run: required value of `run` in the manifests (default: any).
        parts: names of the parts to read, if they exist (default: all).

    Raises:
        CheckpointError: there are checkpoints, but none of them is complete.
    """
    found = places(directory)
    for step in reversed(found):
        try:
            return step, load(found[step], step, parts, run)
        except CheckpointError as error:
            logger.error("%s; trying the previous one", error.found)
    if found:
        raise CheckpointError(
            "HT707",
            f"none of the {len(found)} checkpoints in {directory.checkpoints} is complete",
            "at least one",
            "start over in another directory with --run-dir DIR",
        )
    return None


def load(
    folder: Path,
    step: int,
    parts: Collection[str] | None = None,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state in a checkpoint by name of the part, on the CPU.

    Args:
        folder: folder of the checkpoint.
        step: required step of the checkpoint.
        parts: names of the parts to read, if they exist (default: all).
        run: required value of `run` in the manifest (default: any).

    Raises:
        CheckpointError: the checkpoint has changed since it was written, or belongs to another run.
    """
    state = {}
    manifest = read_manifest(folder, step)
    if run is not None and manifest.get("run") != run:
        raise CheckpointError(
            "HT708", f"{folder} is of another run, {manifest.get('run')}, not {run}"
        )
    for name, entry in manifest["files"].items():
        part = name.removesuffix(".pt")
        if parts is not None and part not in parts:
            continue
        path = folder / name
        try:
            with _open(path) as file:
                if (
                    os.fstat(file.fileno()).st_size != entry["size"]
                    or _hash(file) != entry["sha256"]
                ):
                    raise CheckpointError("HT707", f"{path} has changed since it was written")
                file.seek(0)
                state[part] = torch.load(file, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # torch.load raises errors of many types
            raise CheckpointError("HT707", f"{path} cannot be read ({error})") from None
    return state


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint after a check of its hash and step.

    Raises:
        CheckpointError: the manifest is missing, unreadable or changed.
    """
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise ValueError("it is no folder, or a link to one")
        with _open(folder / MANIFEST) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        manifest = json.loads(content)
        _check(manifest, step)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("HT707", f"{folder} has no readable manifest ({error})") from None
    assert isinstance(manifest, dict)
    return manifest


def _check(manifest: Any, step: int) -> None:
    """Raise ValueError if a manifest is not valid in this format."""
    if not isinstance(manifest, dict):
        raise ValueError(f"a {type(manifest).__name__}")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"format {manifest.get('format')!r}, not {FORMAT}")
    if manifest.get("sha256") != digest(manifest):
        raise ValueError("it has changed since it was written")
    if manifest.get("step") != step:
        raise ValueError(f"it is of step {manifest.get('step')!r}")
    files = manifest.get("files")
    if not isinstance(files, dict) or len(files) > _MOST_FILES:
        raise ValueError(f"no list of at most {_MOST_FILES} files")
    for name, entry in files.items():
        size, sha256 = (
            (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (0, 0)
        )
        if not (
            _FILE.match(name)
            and type(size) is int
            and isinstance(sha256, str)
            and _HASH.match(sha256)
        ):
            raise ValueError(f"a file {name!r}: {entry!r}")


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its `sha256` entry."""
    entries = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def best_of(directory: RunDirectory, metric: str) -> int | None:
    """Return the step of the best checkpoint; the newer one of two equal ones; None without any.

    Args:
        directory: run directory.
        metric: name of a metric in the `metrics` of the manifest. Higher is better, lower if the
            name ends in "loss". A value that is not a number is never the best.
    """
    sign = -1 if metric.endswith("loss") else 1
    values = {}
    for step, folder in places(directory).items():
        try:
            metrics = read_manifest(folder, step).get("metrics")
        except CheckpointError:
            continue
        value = metrics.get(metric) if isinstance(metrics, dict) else None
        if isinstance(value, (int, float)) and not math.isnan(value):
            values[step] = sign * value
    return max(values, key=lambda step: (values[step], step), default=None)


def _open(path: Path) -> BufferedReader:
    """Open a regular file that is no link, because a read of a pipe or device may never end.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    return open(path, "rb", opener=lambda name, flags: open_regular(name, flags | os.O_NOFOLLOW))


def _hash(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
