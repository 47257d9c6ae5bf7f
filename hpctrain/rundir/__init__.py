"""Names and formats of the files in a run directory and of the exit status file, and their readers.

run.json                    identity of the run: name, data, model, and the world of its first start
starts.jsonl                a line for each start: command, options, versions, commit, world
metrics.jsonl               a line for each logged step: step, epoch, time, then values
timings.jsonl               a line for each half minute: parts of the step time, by rank
checkpoints/step-00000042/  .pt files and a manifest
logs/rank-0.log             log of each rank
profile/rank-0.json.gz      trace of --profile
track.json                  names of this run in the trackers of --track
summary.json                result of the run
stop                        created by the user: save a checkpoint and exit
"""

import errno
import json
import os
import re
import stat
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError

__all__ = [
    "DONE",
    "FAILED",
    "GIVEN_UP",
    "MOST_FRUITLESS",
    "STATUS",
    "STOPPED",
    "RunDirectory",
    "append",
    "create",
    "default",
    "read_exit_status",
    "replace",
    "slow_ranks",
    "write_exit_status",
]

# The exit codes of the outermost hpctrain process, and the codes in the exit status file.
DONE = 0
FAILED = 1
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped at a safe point, can be resumed
GIVEN_UP = 76  # restarted too often without progress

# Consecutive starts that may end without a new checkpoint.
MOST_FRUITLESS = 3

STATUS = {DONE: "done", FAILED: "failed", STOPPED: "stopped", GIVEN_UP: "given-up"}

_STEP = re.compile(r"step-(\d{8,})\Z", re.ASCII)


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
        self.profile = self.path / "profile"
        self.tracked = self.path / "track.json"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.summary = self.path / "summary.json"
        self.stop = self.path / "stop"

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
            with open(path, opener=_open) as file:
                content = json.loads(file.read())
            if not isinstance(content, dict):
                raise ValueError(f"a {type(content).__name__}")
            return content
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(
                "HT701",
                f"{path} cannot be read: {error}",
                "a file that hpctrain wrote",
                "mend or remove it",
                "--run-dir DIR for another directory",
            ) from None

    def give_up(self, reason: str) -> None:
        """Record in summary.json that the run is not started again; keep its other entries.

        Args:
            reason: one line for the user.
        """
        known = self.read(self.summary) or {"step": max(self.steps(), default=0)}
        summary = {**known, "status": STATUS[GIVEN_UP], "reason": reason}
        replace(self.summary, json.dumps(summary, indent=1) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        return self.lines(self.metrics)

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """Return the lines of a .jsonl file, without incomplete lines."""
        return list(self.each(path))

    def each(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the lines of a .jsonl file one by one, because some files are long."""
        try:
            with open(path, errors="replace", opener=_open) as file:
                for line in file:
                    try:
                        content = json.loads(line)
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(content, dict):
                        yield content
        except FileNotFoundError:
            return


def _open(name: str, flags: int) -> int:
    """Open regular files only, because a read of a pipe or a device may never end."""
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", name)
    return descriptor


def slow_ranks(seconds: Sequence[float], a_step: float) -> list[int]:
    """Return the ranks that are much slower than the others.

    A slow rank takes more than 1.5 times the median (of two ranks, the time of the faster one), and
    exceeds the median by more than 2 ms and more than 5 % of a step.

    Args:
        seconds: time of each rank in a step for work in which ranks do not wait for each other,
            such as `data` and `forward` of timings.jsonl.
        a_step: seconds of the whole step.
    """
    usual = statistics.median_low(seconds)
    least = max(1.5 * usual, usual + 0.002, usual + 0.05 * a_step)
    return [rank for rank, one in enumerate(seconds) if one > least]


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


def create(path: Path, text: str) -> None:
    """Write a new file completely or not at all; of two simultaneous writers one fails.

    Raises:
        FileExistsError: the file exists.
        OSError: the file could not be written.
    """
    _write(path, text, os.link)


def replace(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all: under a temporary name, then renamed.

    Raises:
        OSError: the file could not be written; the old file is unchanged.
    """
    _write(path, content, os.replace)


def _write(path: Path, content: str | bytes, commit: Callable[[str, Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            # mkstemp creates private files; files in a run directory follow the user's umask.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        commit(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def append(path: Path, line: str) -> None:
    """Append a line to a file completely or not at all, also after an incomplete line.

    Raises:
        OSError: the line could not be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
        text = (("\n" if torn else "") + line + "\n").encode()
        if os.write(descriptor, text) < len(text):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def write_exit_status(path: str, code: int, reason: str) -> None:
    """Write the exit status file for the process that started the ranks.

    Args:
        path: value of $HPCTRAIN_EXIT_STATUS_FILE.
        code: one of the exit codes above.
        reason: one line for the user.
    """
    replace(Path(path), json.dumps({"code": code, "reason": reason}) + "\n")


def read_exit_status(path: str | os.PathLike[str]) -> tuple[int, str] | None:
    """Return code and reason of an exit status file; None if it is missing or incomplete."""
    try:
        exit_status = json.loads(Path(path).read_text())
        return int(exit_status["code"]), str(exit_status["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
