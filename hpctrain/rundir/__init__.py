"""Names and formats of the files in a run directory, and their readers.

NAME/                       directory of a run with a name, such as session.run(name="fold-0")
run.json                    identity of the run: name, data, model, and the world of its first start
starts.jsonl                a line for each start: command, options, versions, commit, world
metrics.jsonl               a line for each logged step: step, epoch, time, then values
timings.jsonl               a line for each half minute: parts of the step time, by rank
events.jsonl                a line for each mark of `effective_time`
last-step.json              newest step, its time and the time to the end, while a start trains
checkpoints/step-00000042/  .pt and .bin files, and a manifest
logs/rank-0.log             log of each rank
profile/rank-0.json.gz      trace of --profile
track.json                  names of this run in the trackers of --track
summary.json                result of the run
stop                        created by the user: save a checkpoint and exit
.lock                       which start may write there, see `lock`
"""

import errno
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import CheckpointError, UsageError, exit_codes

__all__ = [
    "POSITIONS",
    "STOP_REASON",
    "RunDirectory",
    "append",
    "create",
    "default",
    "full_now",
    "given",
    "no_room",
    "open_regular",
    "replace",
]

#: Reason of a stop that a person asked for with the file `stop`; such a run is not started again.
STOP_REASON = "the file stop in the run directory"

#: Keys of a row of metrics.jsonl that give its position on a curve; all others are metrics.
POSITIONS = ("step", "epoch", "time")

_STEP = re.compile(r"step-(\d{8,})\Z", re.ASCII)
# Errors of the system with which a file system takes no more data, and the keys of their messages.
_NO_ROOM = {
    errno.ENOSPC: "HT715.disk-full",
    errno.EDQUOT: "HT715.quota",
    errno.EROFS: "HT715.read-only",
}
_LEAST_ROOM = 1 << 20  # bytes; no checkpoint is smaller by much


class RunDirectory:
    """Paths inside a run directory, with readers for its files.

    Args:
        path: run directory; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.identity = self.path / "run.json"
        self.starts = self.path / "starts.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.timings = self.path / "timings.jsonl"
        self.events = self.path / "events.jsonl"
        self.last_step = self.path / "last-step.json"
        self.profile = self.path / "profile"
        self.tracked = self.path / "track.json"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.summary = self.path / "summary.json"
        self.stop = self.path / "stop"
        self.lock = self.path / ".lock"

    def log(self, rank: int) -> Path:
        """Return the path of the log file of a rank."""
        return self.logs / f"rank-{rank}.log"

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a committed checkpoint, in ascending order."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP.match(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def read(self, path: Path) -> Any:
        """Return the content of a JSON file; None if the file does not exist.

        Raises:
            UsageError: the file cannot be read, or contains no JSON object.
        """
        try:
            with open(path, opener=open_regular) as file:
                content = json.loads(file.read())
            if not isinstance(content, dict):
                raise ValueError(f"a {type(content).__name__}")
            return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError("HT701.unreadable", path=path, error=error) from None

    def record_end(self, code: int, reason: str, **more: Any) -> None:
        """Record in summary.json how the run has ended; keep its other entries.

        Args:
            code: one of `hpctrain.errors.exit_codes`; any other counts as a failure.
            reason: one line for the user.
            more: other entries to renew.
        """
        entries = self.read(self.summary) or {"step": max(self.steps(), default=0)}
        status = exit_codes.STATUS.get(code, exit_codes.STATUS[exit_codes.FAILED])
        summary = {**entries, **more, "status": status, "reason": reason}
        replace(self.summary, json.dumps(summary, indent=1) + "\n")

    def runs(self) -> list["RunDirectory"]:
        """Return the run in this directory, and the named runs in folders of it, by their names."""
        try:
            folders = sorted(entry.path for entry in os.scandir(self.path) if entry.is_dir())
        except OSError:
            folders = []
        return [run for run in (self, *map(RunDirectory, folders)) if os.path.exists(run.identity)]

    def stops(self) -> list[Path]:
        """Return the files that stop this run: for one with a name also that of the folder around.

        Raises:
            UsageError: run.json is damaged.
        """
        inside = (self.read(self.identity) or {}).get("in_folder_of_name")
        return [self.stop, *([self.path.parent / self.stop.name] if inside else [])]

    def _of_script(self) -> list["RunDirectory"]:
        """Return the runs of the script that has this directory: not what else is in its folders.

        A program may put runs with directories of their own there, as `sbatch/acceptance.sh` does.
        """

        def belongs(run: RunDirectory) -> bool:
            try:
                return bool((run.read(run.identity) or {}).get("in_folder_of_name"))
            except UsageError:
                return False

        return [run for run in self.runs() if run.path == self.path or belongs(run)]

    def current(self) -> "RunDirectory":
        """Return which run of the script was launched last; this directory if it has none."""

        def launched(run: RunDirectory) -> float:
            try:
                return os.stat(run.starts).st_mtime
            except OSError:
                return 0.0

        return max(self._of_script(), key=launched, default=self)

    def furthest(self) -> int | None:
        """Return the sum of the newest saved steps of its runs; None without a checkpoint."""
        steps = [max(run.steps(), default=None) for run in self._of_script() or [self]]
        saved = [step for step in steps if step is not None]
        return sum(saved) if saved else None

    def missing(self) -> UsageError:
        """Return the error for a folder that has no run, or several."""
        if runs := self.runs():
            names = ", ".join(run.path.name for run in runs)
            return UsageError("HT655.several-runs", path=self.path, names=names, last=runs[-1].path)
        return UsageError("HT655.no-run", path=self.path)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        return self.lines(self.metrics)

    def columns(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return the steps and values of each key of metrics.jsonl, in the order of the file.

        Rows without a step and values that are no numbers are omitted; nan and infinity are kept.
        """
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.each(self.metrics):
            step = row.get("step")
            for name, value in row.items():
                if type(step) is int and type(value) in (int, float):
                    steps, values = columns.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(value)
        return columns

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """Return the lines of a .jsonl file, without incomplete lines."""
        return list(self.each(path))

    def each(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the lines of a .jsonl file one by one, because some files are long."""
        try:
            with open(path, errors="replace", opener=open_regular) as file:
                yield from filter(None, map(json_object, file))
        except (FileNotFoundError, NotADirectoryError):
            return


def no_room(folder: Path, what: str, error: object) -> CheckpointError | None:
    """Return the error for a file system that takes no more data; None for any other error.

    Args:
        folder: run directory, which need not exist.
        what: what could not be written there.
        error: error of the system.
    """
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    key = _NO_ROOM[error.errno]
    free, files = _room(folder)
    if error.errno == errno.ENOSPC and files == 0:
        key = "HT715.no-inodes"
    return CheckpointError(key, folder=folder, what=what, free=free or 0, error=error)


def full_now(folder: Path) -> str:
    """Return in a line that the disk of a folder is full now; empty if it is not, or unknown."""
    free, files = _room(folder)
    if files == 0 or (free is not None and free < _LEAST_ROOM):
        room = "0 inodes" if files == 0 else f"{free:,} bytes"
        return CheckpointError("HT715.full-now", folder=folder, room=room).found
    return ""


def _room(folder: Path) -> tuple[int | None, int | None]:
    """Return the bytes and the files that a file system can still take; None if it is unknown."""
    try:
        found = os.statvfs(next(one for one in (folder, *folder.parents) if one.exists()))
    except OSError:
        return None, None
    # Some file systems have no limit of files, and say 0 of 0.
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the text is no object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def open_regular(name: str, flags: int) -> int:
    """Open regular files only, because a read of a pipe or a device may never end.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", name)
    return descriptor


def default(name: str, label: str | None) -> str:
    """Return the default run directory: runs/NAME-LABEL, or runs/NAME-DATE-TIME without a label.

    Args:
        name: name of the run.
        label: label of the scheduler's job; None without a job.
    """
    path = first = os.path.join("runs", f"{name}-{label or time.strftime('%Y%m%d-%H%M%S')}")
    count = 1
    while label is None and os.path.exists(path):  # two starts within a second
        count += 1
        path = f"{first}-{count}"
    return path


def given(words: Sequence[str]) -> str:
    """Return the run directory that a command line sets by `--run-dir`; empty without one."""
    folders = [
        following if word == "--run-dir" else word.removeprefix("--run-dir=")
        for word, following in itertools.pairwise([*words, ""])
        if word == "--run-dir" or word.startswith("--run-dir=")
    ]
    return folders[-1] if folders else ""


def create(path: Path, text: str) -> None:
    """Write a new file completely or not at all; of two simultaneous writers one fails.

    Raises:
        FileExistsError: the file exists.
        OSError: the file could not be written.
    """
    _write(path, text.encode(), os.link)


def replace(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all: under a temporary name, then renamed.

    Raises:
        OSError: the file could not be written; the old file is unchanged.
    """
    _write(path, content if isinstance(content, bytes) else content.encode(), os.replace)


def _write(path: Path, content: bytes, commit: Callable[[Path, Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files are private: those of a run directory follow the user's umask.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        commit(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, line: str) -> None:
    """Append a line to a file completely or not at all, also after an incomplete line.

    Raises:
        OSError: the line could not be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        incomplete = size and os.pread(descriptor, 1, size - 1) != b"\n"
        text = (("\n" if incomplete else "") + line + "\n").encode()
        if os.write(descriptor, text) < len(text):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
