"""The folder of a checkpoint: written under a temporary name and renamed when it is complete.

    .step-00000042.HOST.PID.RANDOM   being written or removed by the process PID of HOST
    .step-00000042.old               being replaced, between two renames

A process may be killed, or the host may fail, between any two system calls. In every case a reader
finds the newest committed checkpoint.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.durable_files import sync, write
from hpctrain.checkpoint.loading import (
    FORMAT,
    MANIFEST,
    best_of,
    digest,
    places,
    read_manifest,
    replaced,
)
from hpctrain.checkpoint.snapshot import Snapshot
from hpctrain.cluster import proc
from hpctrain.errors import CheckpointError
from hpctrain.rundir import RunDirectory

__all__ = ["Folder"]

_TEMPORARY = re.compile(r"\.step-\d{8,}\.(?P<host>[\w.-]*)\.(?P<pid>\d+)\.[0-9a-f]{16}\Z", re.ASCII)
# By error number: what is missing, then commands for the user.
_FIXES = {
    errno.ENOSPC: ("a file system with room", "df -h {0}; df -i {0}"),
    errno.EDQUOT: ("room in the quota", "quota -s", "lfs quota -h {0} (on Lustre)"),
    errno.EFBIG: ("no limit on the size of a file", "ulimit -f unlimited"),
}


class Folder:
    """The checkpoint folders of a run: writes, commits and removes them.

    Args:
        directory: run directory.
        keep: number of newest checkpoints to keep.
        best: name of a metric; the checkpoint with its best value is kept too.
        commit: context manager around renames and removals; see `Writer`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        keep: int = 3,
        best: str | None = None,
        commit: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._best = best
        self._commit = commit
        self._host = _here()
        self._temporary: Path | None = None  # temporary folder being written

    def save(self, step: int, snapshot: Snapshot, facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint, commit it, then remove the checkpoints that are not kept.

        Args:
            step: optimizer steps done.
            snapshot: state to write; each part becomes a file.
            facts: additional entries for the manifest; JSON values.

        Raises:
            CheckpointError: the checkpoint could not be written, and earlier ones are unchanged;
                or `commit()` raised it.
        """
        final = self._directory.checkpoint(step)
        self._temporary = self._name(step)
        try:
            if not final.parent.is_dir():
                final.parent.mkdir(parents=True, exist_ok=True)
                sync(final.parent.parent)
            self._clear(locked=False)
            self._write(self._temporary, step, snapshot, facts)
            with self._commit():
                self._settle()
                self._put(self._temporary, final)
                self._remove_old(step)
                self._clear(locked=self._commit is not nullcontext)
        # torch.save raises RuntimeError for a file that it cannot write.
        except (OSError, RuntimeError, MemoryError) as error:
            raise self._failed(step, error) from None
        finally:
            _remove(self._temporary)
            self._temporary = None
        return final

    def _write(self, folder: Path, step: int, snapshot: Snapshot, facts: Mapping[str, Any]) -> None:
        folder.mkdir()
        snapshot.ready()
        files = {
            f"{name}.pt": write(folder / f"{name}.pt", part.value())
            for name, part in snapshot.parts.items()
        }
        manifest = {**facts, "format": FORMAT, "step": step, "files": files}
        manifest = {**manifest, "sha256": digest(manifest)}
        with open(folder / MANIFEST, "w") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
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

    def _clear(self, locked: bool) -> None:
        """Remove the temporary folders of earlier starts that have ended.

        Args:
            locked: whether no other start can commit now, so that folders of other hosts can be
                removed too.
        """
        for entry in self._directory.checkpoints.iterdir():
            match = _TEMPORARY.match(entry.name)
            if match is None or entry == self._temporary:
                continue
            if match["host"] == self._host:
                # This process writes only its current folder.
                pid = int(match["pid"])
                ended = pid == os.getpid() or not proc.started(pid)
            else:
                ended = locked
            if ended:
                _remove(entry)

    def _name(self, step: int) -> Path:
        """Return a temporary path that no other process on any host uses."""
        final = self._directory.checkpoint(step)
        return final.with_name(f".{final.name}.{self._host}.{os.getpid()}.{secrets.token_hex(8)}")

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        parent = self._directory.checkpoints
        number = error.errno if isinstance(error, OSError) and error.errno is not None else 0
        expected, *fixes = _FIXES.get(number, ("a file system that can store it", "df -h {0}"))
        return CheckpointError(
            "HT705",
            f"the checkpoint of step {step} could not be written to {parent}: {error}",
            expected,
            *(fix.format(parent) for fix in fixes),
        )


def _seems_complete(folder: Path, step: int) -> bool:
    """Return whether the manifest is valid and all files have the right size."""
    try:
        files = read_manifest(folder, step)["files"]
        return all(
            (folder / name).lstat().st_size == entry["size"] for name, entry in files.items()
        )
    except (CheckpointError, OSError):
        return False


def _here() -> str:
    """Return host name and pid namespace, as a process id is unique only within both."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)
    return f"{host}.{proc.namespace()}"


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible; remove a link or a file itself."""
    with contextlib.suppress(OSError):
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
