"""Reading of checkpoints, with checks of names, sizes and contents."""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.durable_files import BLOCK, name_of
from hpctrain.checkpoint.snapshot import filled, tensors_in
from hpctrain.checkpoint.stored import DataReader, Stored, dtype_of, open_file
from hpctrain.errors import CheckpointError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Opened",
    "best_of",
    "damages",
    "digest",
    "mistake_in",
    "open_checkpoint",
    "open_newest",
    "places",
    "read_manifest",
    "refuse_damaged",
    "replaced",
]

FORMAT = 4
MANIFEST = "manifest.json"
# No state needs more; hpctrain writes no manifest above these limits.
_MOST_BYTES = 1 << 30
_MOST_FILES = 1 << 17
_FILE = re.compile(r"[^\W.][\w.-]*\.(pt|bin)\Z")
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


def open_newest(
    directory: RunDirectory, parts: Collection[str] | None = None
) -> "tuple[int, Opened] | None":
    """Return step and content of the newest checkpoint that is not damaged; None without any.

    All of its files are read once, to check them. One that is damaged is logged, and the one before
    it is tried.

    Args:
        directory: run directory.
        parts: names of the parts to read, if they exist (default: all).

    Raises:
        CheckpointError: there are checkpoints, but none of them is complete.
    """
    found = places(directory)
    for step in reversed(found):
        try:
            if damage := damages(found[step], step):
                raise CheckpointError.of_text("HT707", damage[0])
            return step, open_checkpoint(found[step], step, parts)
        except CheckpointError as error:
            logger.error("%s; trying the previous one", error.found)
    if found:
        refuse_damaged(directory, len(found))
    return None


def damages(folder: Path, step: int) -> list[str]:
    """Read all files of a checkpoint, and return what is wrong with them."""
    try:
        files = read_manifest(folder, step)["files"]
    except CheckpointError as error:
        return [error.found]
    found = []
    for name, entry in files.items():
        path = folder / name
        try:
            with open_file(path) as file:
                if not _unchanged(file, entry):
                    found.append(f"{path} has changed since it was written")
        except OSError as error:
            found.append(f"{path} cannot be read ({error})")
    return found


def _unchanged(file: BufferedReader, entry: Mapping[str, Any]) -> bool:
    """Return whether a file has the size and the hashes of its entry in the manifest."""
    if os.fstat(file.fileno()).st_size != entry["size"]:
        return False
    if "sha256" in entry:
        return bool(hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"])
    blocks = iter(lambda: file.read(BLOCK), b"")
    return bool([hashlib.sha256(block).hexdigest() for block in blocks] == entry["blocks"])


def refuse_damaged(directory: RunDirectory, count: int) -> None:
    """Raise the error of a run that has checkpoints, none of them complete."""
    raise CheckpointError("HT707.none-complete", count=count, directory=directory)


@dataclass
class Opened:
    """A checkpoint whose tensors in the data files are not read yet.

    Attributes:
        state: value by name of the part, with a `Stored` for each of those tensors.
        manifest: manifest of the checkpoint.
    """

    state: dict[str, Any]
    manifest: Mapping[str, Any]
    _structures: Mapping[str, tuple[bytes, list[Any]]]
    _reader: DataReader

    def read(self) -> dict[str, Any]:
        """Read the tensors, and return the state with them.

        Raises:
            CheckpointError: a data file has changed since it was written, or cannot be read.
        """
        stored = {
            one: one.tensor()
            for _, those in self._structures.values()
            for one in those
            if isinstance(one, Stored)
        }
        self._reader.read()
        values: dict[Any, Any] = {one: one.converted(memory) for one, memory in stored.items()}
        return {
            name: filled(structure, [values[t] if isinstance(t, Stored) else t for t in those])
            for name, (structure, those) in self._structures.items()
        }

    def tensors(self, some: Mapping[str, "Stored | Tensor"]) -> dict[str, Tensor]:
        """Read some tensors alone, and return each by its name, as a contiguous copy.

        Raises:
            CheckpointError: as for `read`.
        """
        memory = {
            name: one.tensor() if isinstance(one, Stored) else one.detach().clone()
            for name, one in some.items()
        }
        self._reader.read()
        return {name: tensor.contiguous() for name, tensor in memory.items()}


def open_checkpoint(
    folder: Path,
    step: int,
    parts: Collection[str] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Opened:
    """Load a checkpoint, but for the tensors in its data files.

    Args:
        folder: folder of the checkpoint.
        step: required step of the checkpoint.
        parts: names of the parts to read, if they exist (default: all).
        run: required values in `run` of the manifest, which may have more (default: any).

    Raises:
        CheckpointError: the checkpoint has changed since it was written, or belongs to another run.
    """
    manifest = read_manifest(folder, step)
    recorded = manifest.get("run")
    if run is not None and not (isinstance(recorded, dict) and run.items() <= recorded.items()):
        raise CheckpointError("HT708.another-run", folder=folder, recorded=recorded, run=run)
    reader = DataReader(folder, manifest["files"])
    structures = {}
    for name, entry in manifest["files"].items():
        part = name.removesuffix(".pt")
        if part == name or (parts is not None and part not in parts):
            continue
        path = folder / name
        try:
            with open_file(path) as file:
                if not _unchanged(file, entry):
                    raise CheckpointError("HT707.changed", path=path)
                file.seek(0)
                value = torch.load(file, map_location="cpu", weights_only=True)
            structure, tensors = tensors_in(value)
            for one in manifest["tensors"].get(part, ()):
                tensors[one["number"]] = (
                    tensors[one["same"]] if "same" in one else Stored(reader, one)
                )
            structures[part] = structure, tensors
        except CheckpointError:
            raise
        except Exception as error:  # torch.load raises errors of many types
            raise CheckpointError("HT707.unreadable", path=path, error=error) from None
    state = {part: filled(structure, those) for part, (structure, those) in structures.items()}
    return Opened(state, manifest, structures, reader)


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint after a check of its hash and step.

    Raises:
        CheckpointError: the manifest is missing, unreadable or changed.
    """
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise ValueError("it is no folder, or a link to one")
        with open_file(folder / MANIFEST) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        manifest = json.loads(content)
        _check(manifest, step)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("HT707.no-manifest", folder=folder, error=error) from None
    assert isinstance(manifest, dict)
    return manifest


def mistake_in(manifest: Mapping[str, Any], step: int, size: int) -> str:
    """Return why a manifest of some bytes would not be read; empty if it would."""
    if size > _MOST_BYTES:
        return f"{size} bytes, more than {_MOST_BYTES}"
    try:
        _check(manifest, step)
    except ValueError as error:
        return str(error)
    return ""


def _check(manifest: Any, step: int) -> None:
    """Raise ValueError if a manifest is not valid in this format."""
    if not isinstance(manifest, dict):
        raise ValueError(f"a {type(manifest).__name__}")
    form = manifest.get("format")
    if type(form) is not int or form != FORMAT:
        raise ValueError(f"format {form!r}, not {FORMAT}")
    if manifest.get("sha256") != digest(manifest):
        raise ValueError("it has changed since it was written")
    if manifest.get("step") != step:
        raise ValueError(f"it is of step {manifest.get('step')!r}")
    files = manifest.get("files")
    if not isinstance(files, dict) or len(files) > _MOST_FILES:
        raise ValueError(f"no list of at most {_MOST_FILES} files")
    for name, entry in files.items():
        if not (_FILE.match(name) and isinstance(entry, dict) and type(entry.get("size")) is int):
            raise ValueError(f"a file {name!r}: {entry!r}")
        one = name.endswith(".pt")
        hashes = [entry.get("sha256")] if one else entry.get("blocks")
        count = 1 if one else -(-entry["size"] // BLOCK)
        if not (
            isinstance(hashes, list)
            and len(hashes) == count
            and all(isinstance(sha256, str) and _HASH.match(sha256) for sha256 in hashes)
        ):
            raise ValueError(f"a file {name!r} with other hashes")
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(one, list) for one in tensors.values()):
        raise ValueError("no table of tensors")
    for table in tensors.values():
        whole: set[int] = set()
        for one in table:
            _check_tensor(one, files, whole)


def _check_tensor(one: Any, files: Mapping[str, Any], whole: set[int]) -> None:
    """Raise ValueError if the pieces of a tensor are not all of it, or not in the files.

    Args:
        one: entry of the table.
        files: files of the manifest.
        whole: numbers of the earlier tensors that have pieces; updated here.
    """
    try:
        shape, item = one["shape"], dtype_of(one["dtype"]).itemsize
        if not all(type(number) is int and number >= 0 for number in [one["number"], *shape]):
            raise ValueError(f"a tensor {one!r}")
        if sorted(one.get("order", range(len(shape)))) != list(range(len(shape))):
            raise ValueError(f"a tensor with dimensions {one['order']!r}")
        if "same" in one:
            if one["same"] not in whole:
                raise ValueError(f"a tensor like {one['same']!r}")
            return
        at = 0
        for piece in one["pieces"]:
            rank, offset, start, count = piece
            if (
                not all(type(number) is int and number >= 0 for number in piece)
                or start != at
                or offset + count * item > files[name_of(rank)]["size"]
            ):
                raise ValueError(f"a piece {piece!r} after {at} elements")
            at += count
        if at != math.prod(shape):
            raise ValueError(f"{at} elements of a tensor of shape {shape!r}")
        whole.add(one["number"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a tensor {one!r} ({error})") from None


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
