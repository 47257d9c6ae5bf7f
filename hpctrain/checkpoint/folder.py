"""The folder of a checkpoint: written under a temporary name and renamed when it is complete.

    .step-00000042.HOST.PID.RANDOM   being written or removed by the process PID of HOST
    .step-00000042.old               being replaced, between two renames

A process may be killed, or the host may fail, between any two system calls. In every case a reader
finds the newest committed checkpoint.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.data_files import Team, collect, hand_over, tables, write_part
from hpctrain.checkpoint.durable_files import name_of, sync, write, write_bytes
from hpctrain.checkpoint.loading import (
    FORMAT,
    MANIFEST,
    best_of,
    digest,
    mistake_in,
    places,
    read_manifest,
    replaced,
)
from hpctrain.checkpoint.snapshot import Snapshot
from hpctrain.cluster import system
from hpctrain.errors import CheckpointError
from hpctrain.rundir import RunDirectory, no_room

__all__ = ["Folder", "process_name"]

_TEMPORARY = re.compile(r"\.step-\d{8,}\.(?P<host>[\w.-]*)\.(?P<pid>\d+)\.[0-9a-f]{16}\Z", re.ASCII)


class Folder:
    """The checkpoint folders of a run: writes, commits and removes them.

    Args:
        directory: run directory.
        keep: number of newest checkpoints to keep.
        best: name of a metric; the checkpoint with its best value is kept too.
        commit: context manager around renames and removals; see `Writer`.
        team: ranks that write together (default: this process alone).
    """

    def __init__(
        self,
        directory: RunDirectory,
        keep: int = 3,
        best: str | None = None,
        commit: Callable[[], AbstractContextManager[None]] = nullcontext,
        team: Team | None = None,
    ) -> None:
        self._directory = directory
        self._team = team or Team()
        self._keep = keep
        self._best = best
        self._commit = commit
        self._host = _here()
        self._saves = 0

    def save(
        self, step: int, snapshot: Snapshot, facts: Mapping[str, Any], temporary: Path
    ) -> None:
        """Write a checkpoint, commit it, then remove the checkpoints that are not kept.

        Args:
            step: optimizer steps done.
            snapshot: planned state to write; each part becomes a file.
            facts: additional entries for the manifest; JSON values.
            temporary: result of `temporary`, to which other ranks write, too.

        Raises:
            CheckpointError: the checkpoint could not be written, and earlier ones are unchanged;
                or `commit()` raised it.
        """
        final = self._directory.checkpoint(step)
        try:
            if not final.parent.is_dir():
                final.parent.mkdir(parents=True, exist_ok=True)
                sync(final.parent.parent)
            self._clear(False, temporary)
            self._write(temporary, step, snapshot, facts)
            with self._commit():
                self._settle()
                self._put(temporary, final)
                self._remove_old(step)
                self._clear(self._commit is not nullcontext, temporary)
        # torch raises RuntimeError for lack of memory.
        except (OSError, RuntimeError, MemoryError) as error:
            raise self._failed(step, error) from None
        finally:
            _remove(temporary)

    def clear(self) -> None:
        """Remove what other ranks have written for a checkpoint that was not committed."""
        with contextlib.suppress(OSError):
            self._clear(False)

    def save_part(self, step: int, snapshot: Snapshot, temporary: Path) -> None:
        """Write the part of a rank other than 0, which commits it.

        Args:
            step, snapshot, temporary: as for `save`.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            hand_over(temporary, self._team, snapshot)
        except (OSError, RuntimeError, MemoryError) as error:
            raise self._failed(step, error) from None

    def _write(self, folder: Path, step: int, snapshot: Snapshot, facts: Mapping[str, Any]) -> None:
        folder.mkdir(exist_ok=len(snapshot.writers) > 1)
        snapshot.ready()
        files = {
            f"{name}.pt": write(folder / f"{name}.pt", part.value())
            for name, part in snapshot.parts.items()
        }
        parts = {}
        if snapshot.pieces:
            parts[self._team.rank] = write_part(folder, self._team.rank, snapshot)
        parts |= collect(folder, self._team, snapshot)
        files |= {name_of(rank): table["file"] for rank, table in sorted(parts.items())}
        manifest = {**facts, "format": FORMAT, "step": step, "files": files}
        manifest["tensors"] = tables(snapshot, parts)
        manifest["sha256"] = digest(manifest)
        text = _lines(manifest) + "\n"  # one line for each file and tensor
        if mistake := mistake_in(manifest, step, len(text)):
            raise CheckpointError("HT705.refused-manifest", step=step, mistake=mistake)
        write_bytes(folder / MANIFEST, text.encode())
        sync(folder)

    def _put(self, temporary: Path, final: Path) -> None:
        """Commit by rename; remove what it replaces, or restore that after an error."""
        exists, old = os.path.lexists(final), replaced(final)
        if exists:
            final.rename(old)
        try:
            temporary.rename(final)
            sync(final.parent)
        except OSError:
            with contextlib.suppress(OSError):
                final.rename(temporary)
            if exists:
                old.rename(final)
            raise
        if exists:
            self._discard(old, temporary)

    def _settle(self) -> None:
        """Complete the replacement of a checkpoint after its process was killed."""
        for step, folder in places(self._directory).items():
            final = self._directory.checkpoint(step)
            if folder != final:
                folder.rename(final)
            elif os.path.lexists(replaced(final)):
                self._discard(replaced(final), self._name(step))

    def _remove_old(self, step: int) -> None:
        """Remove all but the newest checkpoints that seem complete, and the best one.

        Checkpoints of later steps stay. They were damaged, so the run resumed from an earlier step
        and will write them again.
        """
        found = {s: folder for s, folder in places(self._directory).items() if s <= step}
        best = None if self._best is None else best_of(self._directory, self._best)
        newest = 0
        for old in reversed(found):
            if newest >= self._keep and old != best:
                self._discard(found[old], self._name(old))
            newest += _seems_complete(found[old], old)

    def _discard(self, folder: Path, temporary: Path) -> None:
        """Rename a checkpoint folder before its files are removed, so that it counts no more."""
        with contextlib.suppress(OSError):
            folder.rename(temporary)
            _remove(temporary)

    def _clear(self, locked: bool, own: Path | None = None) -> None:
        """Remove the temporary folders of earlier starts that have ended.

        Args:
            locked: whether no other start can commit now, so that folders of other hosts can be
                removed too.
            own: folder that this process writes now.
        """
        for entry in self._directory.checkpoints.iterdir():
            match = _TEMPORARY.match(entry.name)
            if match is None or entry == own:
                continue
            if match["host"] == self._host:
                # This process writes only its current folder.
                pid = int(match["pid"])
                ended = pid == os.getpid() or not system.started(pid)
            else:
                ended = locked
            if ended:
                _remove(entry)

    def temporary(self, step: int) -> Path:
        """Return the folder to which a checkpoint is written: the same on all ranks of a team."""
        if not self._team.name:
            return self._name(step)
        self._saves += 1
        text = f"{self._team.nonce} {self._saves}"
        random = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._beside(step, self._team.name, random)

    def _name(self, step: int) -> Path:
        """Return a temporary path that no other process on any host uses."""
        return self._beside(step, process_name(), secrets.token_hex(8))

    def _beside(self, step: int, name: str, random: str) -> Path:
        final = self._directory.checkpoint(step)
        return final.with_name(f".{final.name}.{name}.{random}")

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        if full := no_room(self._directory.path, f"the checkpoint of step {step}", error):
            return full
        limited = isinstance(error, OSError) and error.errno == errno.EFBIG
        key = "HT705.file-size-limit" if limited else "HT705.not-written"
        return CheckpointError(key, step=step, folder=self._directory.checkpoints, error=error)


def _lines(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON, with a line for each file and tensor."""
    tables = {
        "files": {name: json.dumps(entry) for name, entry in manifest["files"].items()},
        "tensors": {
            name: _block("[]", map(json.dumps, those))
            for name, those in manifest["tensors"].items()
        },
    }
    texts = {name: json.dumps(value) for name, value in manifest.items() if name not in tables}
    return _members(texts | {name: _members(table) for name, table in tables.items()})


def _members(texts: Mapping[str, str]) -> str:
    return _block("{}", (f"{json.dumps(name)}: {text}" for name, text in texts.items()))


def _block(ends: str, lines: Iterable[str]) -> str:
    return ends[0] + "\n" + ",\n".join(lines) + "\n" + ends[1]


def _seems_complete(folder: Path, step: int) -> bool:
    """Return whether the manifest is valid and all files have the right size."""
    try:
        files = read_manifest(folder, step)["files"]
        return all(
            (folder / name).lstat().st_size == entry["size"] for name, entry in files.items()
        )
    except (CheckpointError, OSError):
        return False


def process_name() -> str:
    """Return host and process, as in the names of temporary folders."""
    return f"{_here()}.{os.getpid()}"


def _here() -> str:
    """Return host name and pid namespace, as a process id is unique only within both."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)
    return f"{host}.{system.namespace()}"


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible; remove a link or a file itself."""
    with contextlib.suppress(OSError):
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
