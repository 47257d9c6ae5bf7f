"""The names and formats of a run directory and of the verdict, and their readers.

run.json                    what run this is: name, data, model, and the world it started in
starts.jsonl                a line for each start: command, options, versions, commit, world
metrics.jsonl               a line for each logged step: step, epoch, time, then values
timings.jsonl               a line for each half minute: where the time of a step goes, by rank
checkpoints/step-00000042/  .pt files and a manifest
logs/rank-0.log             what each rank had to say
profile/rank-0.json.gz      what --profile has traced
track.json                  the names of this run in the trackers of --track
summary.json                how the run ended
stop                        made by a person: save, and leave
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
    "read_verdict",
    "replace",
    "slow_ranks",
    "write_verdict",
]

# The exit codes of the outermost hpctrain process, and the code of a verdict.
DONE = 0
FAILED = 1
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped at a safe point, run me again
GIVEN_UP = 76  # restarted too often without progress

# Starts in a row that may end without a checkpoint that is newer than the one before.
MOST_FRUITLESS = 3

STATUS = {DONE: "done", FAILED: "failed", STOPPED: "stopped", GIVEN_UP: "given-up"}

_STEP = re.compile(r"step-(\d{8,})\Z", re.ASCII)


class RunDirectory:
    """The places inside of a run directory.

    Args:
        path: the directory; it need not exist.
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
        """The log file of a rank."""
        return self.logs / f"rank-{rank}.log"

    def checkpoint(self, step: int) -> Path:
        """The directory of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a committed checkpoint, rising."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP.match(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def read(self, path: Path) -> Any:
        """The content of one of the JSON files; None where it is not there.

        Raises:
            UsageError: it cannot be read, or is not JSON.
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
                f"{path} cannot be read: {error}",
                "a file that hpctrain wrote",
                "mend or remove it, or choose another directory with --run DIR",
            ) from None

    def give_up(self, reason: str) -> None:
        """Say in summary.json that a run is not started any more, beside what is known of it.

        Args:
            reason: a line for people.
        """
        known = self.read(self.summary) or {"step": max(self.steps(), default=0)}
        summary = {**known, "status": STATUS[GIVEN_UP], "reason": reason}
        replace(self.summary, json.dumps(summary, indent=1) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return self.lines(self.metrics)

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """The lines of one of the .jsonl files; those that were cut off are left out."""
        return list(self.each(path))

    def each(self, path: Path) -> Iterator[dict[str, Any]]:
        """The same one by one, as some files are long."""
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
    """Open a regular file alone: a pipe would be waited for, and a device may have no end."""
    descriptor = os.open(name, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", name)
    return descriptor


def slow_ranks(seconds: Sequence[float], a_step: float) -> list[int]:
    """The ranks that are so much slower than the others that a person would want to know.

    More than half as slow again as the median (of two ranks, the quicker), by at least 2 ms and a
    twentieth of a step.

    Args:
        seconds: that each rank takes in a step for something the ranks do not wait for each other
            in, such as `data` and `forward` of timings.jsonl.
        a_step: seconds of all of it.
    """
    usual = statistics.median_low(seconds)
    least = max(1.5 * usual, usual + 0.002, usual + 0.05 * a_step)
    return [rank for rank, one in enumerate(seconds) if one > least]


def default(name: str, label: str | None) -> str:
    """The run directory where nobody named one: runs/NAME-LABEL, else runs/NAME-DATE-TIME.

    Args:
        name: of the run.
        label: of the scheduler's job; None without one.
    """
    path = first = os.path.join("runs", f"{name}-{label or time.strftime('%Y%m%d-%H%M%S')}")
    count = 1
    while label is None and os.path.exists(path):  # two starts within a second
        count += 1
        path = f"{first}-{count}"
    return path


def create(path: Path, text: str) -> None:
    """Write a file whole, only where there is none: of two writers at once one fails.

    Raises:
        FileExistsError: there is one.
        OSError: it could not be written.
    """
    _write(path, text, os.link)


def replace(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: under a temporary name, then renamed.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    _write(path, content, os.replace)


def _write(path: Path, content: str | bytes, commit: Callable[[str, Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            # mkstemp makes private files; a run directory is as open as its owner's umask says.
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
    """Add a line to a file, whole or not at all; also after one that was cut off.

    Raises:
        OSError: it could not be written.
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


def write_verdict(path: str, code: int, reason: str) -> None:
    """Tell whoever started the ranks how the run ended.

    Args:
        path: the value of $HPCTRAIN_VERDICT.
        code: one of the exit codes above.
        reason: one line for people.
    """
    replace(Path(path), json.dumps({"code": code, "reason": reason}) + "\n")


def read_verdict(path: str | os.PathLike[str]) -> tuple[int, str] | None:
    """The code and the reason; None where there is no verdict or it is not whole."""
    try:
        verdict = json.loads(Path(path).read_text())
        return int(verdict["code"]), str(verdict["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
