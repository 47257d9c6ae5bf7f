"""Folders of jobs submitted from Python; other users cannot read them.

job.json             record of the job
ID_submitted.pkl     work,
ID_RANK_result.pkl   result of a rank, and
ID_RANK_log.out      its output, all by submitit: core/utils.py, submitit 1.5.4
ID.log               log of the batch script
"""

import contextlib
import json
import os
import pickle
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.errors import UsageError

__all__ = ["FOLDERS", "JobRecord", "Outcome", "find", "new_folder"]

#: Parent of the job folders, below the folder from which the jobs were submitted.
FOLDERS = Path("runs/.submitit")

_RECORD = "job.json"

#: ("success", value), ("error", traceback), or None if a rank has no result.
Outcome = tuple[str, Any] | None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Record of a job and its folder.

    Attributes:
        folder: folder of this job alone.
        id: Slurm's number.
        ranks: number of ranks.
        run_dir: run directory.
    """

    folder: Path
    id: str
    ranks: int
    run_dir: Path

    def write(self) -> None:
        """Write the record, so that a later process can find the job.

        Raises:
            OSError: the record could not be written.
        """
        rundir.replace(self.folder / _RECORD, json.dumps(asdict(self), default=os.fspath))

    def result(self, rank: int) -> Path:
        """Return the path of the result of a rank."""
        return self.folder / f"{self.id}_{rank}_result.pkl"

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of the work on each rank, in the order of ranks."""
        return [self._outcome(rank) for rank in range(self.ranks)]

    def _outcome(self, rank: int) -> Outcome:
        try:
            # The user's own file, in a folder in which no other user can write.
            kind, value = pickle.loads(self.result(rank).read_bytes())  # noqa: S301
        except FileNotFoundError:
            return None
        except Exception as error:  # __setstate__ may raise any exception
            return "error", f"its result cannot be read here: {type(error).__name__}: {error}"
        return kind, value

    def log(self, rank: int) -> str:
        """Return the output of a rank; before the rank runs, the output of the job."""
        for name in (f"{self.id}_{rank}_log.out", f"{self.id}.log"):
            if (self.folder / name).exists():
                return (self.folder / name).read_text(errors="replace")
        return ""


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """Create a folder that only its owner can read; remove it if the job is not accepted."""
    FOLDERS.mkdir(parents=True, exist_ok=True, mode=0o700)
    prefix = time.strftime("%Y%m%d-%H%M%S-")
    folder = Path(tempfile.mkdtemp(dir=FOLDERS.absolute(), prefix=prefix))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def find(job: str | int | os.PathLike[str]) -> JobRecord:
    """Return the record of a job, given by its folder or id; if several have the id, the newest.

    Raises:
        UsageError: there is no such job (the message lists the known ones), or others own its
            folder or can write in it.
    """
    name = os.fspath(job) if not isinstance(job, int) else str(job)
    known = []
    # The names of the folders begin with a time.
    for folder in (Path(name), *sorted(FOLDERS.glob("*"), reverse=True)):
        record = _read(folder.absolute())
        if record is not None and (record.id == name or folder == Path(name)):
            _refuse_other_users(record.folder)
            return record
        known += [record.id] if record is not None else []
    text = ", ".join(known[:10]) or "there are none"
    raise UsageError("HT818.unknown-submitit-job", name=name, known=text, folders=FOLDERS)


def _read(folder: Path) -> JobRecord | None:
    """Return the record in a folder; None if it has none."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        return JobRecord(
            folder,
            id=str(record["id"]),
            ranks=int(record["ranks"]),
            run_dir=Path(record["run_dir"]),
        )
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _refuse_other_users(folder: Path) -> None:
    """Raise UsageError if others can write in a folder, as reading a pickle can run code."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError("HT820.folder-not-private", folder=folder)
