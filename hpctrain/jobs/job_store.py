"""What is kept of a job that was submitted from Python: a folder of its own, which no other reads.

job.json             what job this is
ID_submitted.pkl     the work, and
ID_RANK_result.pkl   what a rank returned, by submitit: core/utils.py, submitit 1.5.4
ID.log               of the batch script
rank-RANK.log        what a rank printed
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

__all__ = ["FOLDERS", "Kept", "Outcome", "find", "log_of", "new_folder", "read"]

#: The folders of the jobs that were submitted from a folder.
FOLDERS = Path("runs/.submitit")

_RECORD = "job.json"
# What submitit replaces in paths, by numbers of the job.
_TAG = re.compile("%[jtAa]")

#: ("success", value), ("error", traceback), or None where a rank has left nothing.
Outcome = tuple[str, Any] | None


@dataclass(frozen=True, slots=True)
class Kept:
    """A job and its folder.

    Attributes:
        folder: its own.
        id: Slurm's number; of a job of this machine a process, of one in this process a name.
        via: "slurm", "local" or "debug".
        ranks: how many.
        run: the run directory.
        title: the job's name.
        process: when the process of a job of this machine began, as the kernel counts.
    """

    folder: Path
    id: str
    via: str
    ranks: int
    run: Path
    title: str
    process: int | None = None

    def write(self) -> None:
        """Let a later process come back to the job.

        Raises:
            OSError: it could not be written.
        """
        rundir.replace(self.folder / _RECORD, json.dumps(asdict(self), default=os.fspath))

    def result(self, rank: int) -> Path:
        """The file with what a rank returned."""
        return self.folder / f"{self.id}_{rank}_result.pkl"

    def outcomes(self) -> list[Outcome]:
        """What became of the work on each rank, by rank."""
        return [self._outcome(rank) for rank in range(self.ranks)]

    def _outcome(self, rank: int) -> Outcome:
        try:
            # The user's own file, in a folder where nobody else can write.
            kind, value = pickle.loads(self.result(rank).read_bytes())  # noqa: S301
        except FileNotFoundError:
            return None
        except Exception as error:  # what __setstate__ of anything may raise
            return "error", f"its result cannot be read here: {type(error).__name__}: {error}"
        return kind, value

    def log(self, rank: int) -> str:
        """What a rank has printed; before it ran, what the job has."""
        for path in (
            log_of(self.folder, rank),
            self.folder / f"{self.id}_{rank}_log.err",
            self.folder / f"{self.id}.log",
        ):
            if path.exists():
                return path.read_text(errors="replace")
        return ""


def log_of(folder: Path, rank: int) -> Path:
    """The file in which a rank of a job keeps what it prints."""
    return folder / f"rank-{rank}.log"


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """A new folder, which only its owner reads; gone where the job in it is not accepted.

    Raises:
        UsageError: submitit would change its name.
    """
    FOLDERS.mkdir(parents=True, exist_ok=True, mode=0o700)
    prefix = time.strftime("%Y%m%d-%H%M%S-")
    folder = Path(tempfile.mkdtemp(dir=FOLDERS.absolute(), prefix=prefix))
    try:
        if _TAG.search(os.fspath(folder)):
            raise UsageError(f"the folder {folder}", "without %j, %t, %A and %a: submitit's own")
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def find(job: str | int | os.PathLike[str]) -> Path:
    """The folder of a job, by itself or by the job's id; of several with one id the newest.

    Raises:
        UsageError: there is none, with those that there are.
    """
    if not isinstance(job, int) and os.path.exists(os.path.join(job, _RECORD)):
        return Path(job)
    known = []
    for path in sorted(FOLDERS.glob(f"*/{_RECORD}"), reverse=True):  # their names begin with a time
        known.append(str((rundir.RunDirectory(path.parent).read(path) or {}).get("id")))
        if known[-1] == str(job):
            return path.parent
    _refuse_folder(job)
    raise UsageError(
        f"no job {str(job)!r} was submitted from this folder by hpctrain.submit",
        f"one of {', '.join(known[:10])}" if known else "the number of one, in its own folder",
        f"hpctrain.jobs.find('FOLDER/{FOLDERS}/DATE-TIME-…') finds one of another folder",
    )


def _refuse_folder(job: str | int | os.PathLike[str]) -> None:
    """Raise UsageError for a folder with jobs in or beside it, which are listed: which is meant?"""
    if isinstance(job, int) or not os.path.isdir(job):
        return
    path = Path(job).absolute()
    for folders in (path / FOLDERS, path, path.parent / FOLDERS.name):
        found = sorted(folders.glob(f"*/{_RECORD}"), reverse=True)
        if found:
            listed = [
                f"{(rundir.RunDirectory(one.parent).read(one) or {}).get('id')} in {one.parent}"
                for one in found[:10]
            ]
            raise UsageError(
                f"{os.fspath(job)!r} is not the folder of one job",
                f"one of {', '.join(listed)}",
                f"hpctrain.jobs.find({os.fspath(found[0].parent)!r})",
            )


def read(folder: Path) -> Kept:
    """The job of a folder.

    Raises:
        UsageError: it holds none, or is not one's own.
    """
    folder = folder.absolute()
    _refuse_strangers(folder)
    record = rundir.RunDirectory(folder).read(folder / _RECORD) or {}
    try:
        return Kept(
            folder,
            id=str(record["id"]),
            via=str(record["via"]),
            ranks=int(record["ranks"]),
            run=Path(record["run"]),
            title=str(record["title"]),
            process=record["process"],
        )
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"{folder} holds no job", f"a folder in {FOLDERS}", "hpctrain.jobs.find(ID)"
        ) from None


def _refuse_strangers(folder: Path) -> None:
    """Reading a pickle runs what its writer wanted."""
    try:
        facts = folder.stat()
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error}", f"a folder in {FOLDERS}") from None
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{folder} is not yours alone, and results read from it can run code",
            "a folder in which only you can write",
            f"chmod go-w {folder}    where it is yours",
        )
