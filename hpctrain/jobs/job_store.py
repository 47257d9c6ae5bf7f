"""Records of jobs submitted from Python: each job has a folder that other users cannot read.

job.json             record of the job
ID_submitted.pkl     work, and
ID_RANK_result.pkl   result of a rank, both by submitit: core/utils.py, submitit 1.5.4
ID.log               log of the batch script
rank-RANK.log        output of a rank
"""

import contextlib
import json
import os
import pickle
import re
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

__all__ = ["FOLDERS", "JobRecord", "Outcome", "find", "log_of", "new_folder", "read"]

#: Parent of the job folders, below the folder from which the jobs were submitted.
FOLDERS = Path("runs/.submitit")

_RECORD = "job.json"
# Patterns that submitit replaces in paths by numbers of the job.
_TAG = re.compile("%[jtAa]")

#: ("success", value), ("error", traceback), or None if a rank has no result.
Outcome = tuple[str, Any] | None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Record of a job and its folder.

    Attributes:
        folder: folder of this job alone.
        id: Slurm's number; process id of a local job; name of a job in this process.
        via: "slurm", "local" or "debug".
        ranks: number of ranks.
        run_dir: run directory.
        title: name of the job.
        process: start time of a local job's process, as the kernel counts it.
    """

    folder: Path
    id: str
    via: str
    ranks: int
    run_dir: Path
    title: str
    process: int | None = None

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
        for path in (
            log_of(self.folder, rank),
            self.folder / f"{self.id}_{rank}_log.err",
            self.folder / f"{self.id}.log",
        ):
            if path.exists():
                return path.read_text(errors="replace")
        return ""


def log_of(folder: Path, rank: int) -> Path:
    """Return the path of the file with the output of a rank."""
    return folder / f"rank-{rank}.log"


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """Create a folder that only its owner can read; remove it if the job is not accepted.

    Raises:
        UsageError: submitit would change its name.
    """
    FOLDERS.mkdir(parents=True, exist_ok=True, mode=0o700)
    prefix = time.strftime("%Y%m%d-%H%M%S-")
    folder = Path(tempfile.mkdtemp(dir=FOLDERS.absolute(), prefix=prefix))
    try:
        if _TAG.search(os.fspath(folder)):
            raise UsageError(
                "HT807", f"the folder {folder}", "without %j, %t, %A and %a: submitit's own"
            )
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def find(job: str | int | os.PathLike[str]) -> Path:
    """Return the folder of a job, given by path or id; if several have the id, the newest.

    Raises:
        UsageError: there is no such job; the message lists the known ones.
    """
    if not isinstance(job, int) and os.path.exists(os.path.join(job, _RECORD)):
        return Path(job)
    ids = []
    for path in sorted(FOLDERS.glob(f"*/{_RECORD}"), reverse=True):  # the names begin with a time
        ids.append(str((rundir.RunDirectory(path.parent).read(path) or {}).get("id")))
        if ids[-1] == str(job):
            return path.parent
    _refuse_folder(job)
    raise UsageError(
        "HT818",
        f"no job {str(job)!r} was submitted from this folder by hpctrain.submit",
        f"one of {', '.join(ids[:10])}"
        if ids
        else "the id of a job, in the folder from which it was submitted",
        f"hpctrain.jobs.find('FOLDER/{FOLDERS}/DATE-TIME-…') finds a job of another folder",
    )


def _refuse_folder(job: str | int | os.PathLike[str]) -> None:
    """Raise UsageError for a folder with jobs in or beside it; the message lists these."""
    if isinstance(job, int) or not os.path.isdir(job):
        return
    given = Path(job).absolute()
    for folders in (given / FOLDERS, given, given.parent / FOLDERS.name):
        records = sorted(folders.glob(f"*/{_RECORD}"), reverse=True)
        if records:
            listed = [
                f"{(rundir.RunDirectory(path.parent).read(path) or {}).get('id')} in {path.parent}"
                for path in records[:10]
            ]
            raise UsageError(
                "HT818",
                f"{os.fspath(job)!r} is not the folder of one job",
                f"one of {', '.join(listed)}",
                f"hpctrain.jobs.find({os.fspath(records[0].parent)!r})",
            )


def read(folder: Path) -> JobRecord:
    """Return the record of the job in a folder.

    Raises:
        UsageError: the folder has no job, or other users own it or can write in it.
    """
    folder = folder.absolute()
    _refuse_other_users(folder)
    record = rundir.RunDirectory(folder).read(folder / _RECORD) or {}
    try:
        return JobRecord(
            folder,
            id=str(record["id"]),
            via=str(record["via"]),
            ranks=int(record["ranks"]),
            run_dir=Path(record["run_dir"]),
            title=str(record["title"]),
            process=record["process"],
        )
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            "HT818", f"{folder} contains no job", f"a folder in {FOLDERS}", "hpctrain.jobs.find(ID)"
        ) from None


def _refuse_other_users(folder: Path) -> None:
    """Raise UsageError if others can write in a folder, as reading a pickle can run code."""
    try:
        status = folder.stat()
    except OSError as error:
        raise UsageError(
            "HT818", f"{folder} cannot be read: {error}", f"a folder in {FOLDERS}"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            "HT820",
            f"other users can write in {folder}, and results read from it can run code",
            "a folder in which only you can write",
            f"chmod go-w {folder} (if it is yours)",
        )
