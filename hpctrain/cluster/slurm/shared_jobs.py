"""The user's jobs, of which one query to Slurm is enough for all processes that watch them.

Many `hpctrain submit --wait` and a `hpctrain top` would each ask every few seconds. The answers are
in a file of a folder that is private to the user and local to the machine, so that no lock has to
work over a network. Without such a folder, each process asks by itself.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.slurm.asking import SECONDS_TO_ANSWER
from hpctrain.cluster.slurm.job_list import QueuedJob, jobs

# An answer counts for so long: at most nine queries in a minute, of all processes.
_SECONDS = 7.0
_SECONDS_BETWEEN_LOOKS = 0.1
# Variables on which the answer depends, besides the user.
_VARIABLES = ("PATH", "SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True, slots=True)
class Listing:
    """An answer of Slurm.

    Attributes:
        taken: time before the query, in seconds since the epoch.
        writer: process that has asked: its id, and a random text.
        error: why there is no answer; empty if there is one.
        jobs: the user's jobs.
    """

    taken: float
    writer: str
    error: str
    jobs: Sequence[QueuedJob]


class SharedJobs:
    """Reader of the user's jobs, for a process that asks again and again.

    A process that is alone gets a new answer each time. With others, an answer may be some seconds
    old, also older than this reader.

    Args:
        env: environment of Slurm's commands.
        clock: returns seconds since the epoch; tests replace it.

    Attributes:
        began: time at which this reader was made.
    """

    def __init__(self, env: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        self._env, self._clock = env, clock
        self._me, self.began = f"{os.getpid()} {secrets.token_hex(8)}", clock()
        self._file = _file(env)

    def look(self) -> Listing:
        """Return the newest answer.

        Raises:
            NoAnswerError: Slurm did not answer.
        """
        listing = self._fresh()
        if listing is None:
            with self._turn():
                listing = self._fresh() or self._ask()
        if listing.error:
            raise NoAnswerError(listing.error)
        return listing

    def _fresh(self) -> Listing | None:
        """Return the answer in the file, if it is young enough for this process."""
        listing, now = self._read(), self._clock()
        if listing is None or not 0 <= now - listing.taken < _SECONDS:
            return None
        if listing.writer != self._me:
            self._mark(now)
            return listing if _lives(listing.writer) else None
        return listing if now - self._marked() < _SECONDS else None

    def _ask(self) -> Listing:
        taken, found, error = self._clock(), list[QueuedJob](), ""
        try:
            found = jobs(self._env, uid=os.getuid())
        except NoAnswerError as reason:
            error = str(reason)
        listing = Listing(taken, self._me, error, found)
        if self._file is not None:
            text = json.dumps(asdict(listing))
            unfinished = self._file.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                unfinished.write_text(text)
                unfinished.replace(self._file)
        return listing

    def _read(self) -> Listing | None:
        if self._file is None:
            return None
        try:
            content = json.loads(self._file.read_text())
            return Listing(**{**content, "jobs": [QueuedJob(**one) for one in content["jobs"]]})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    # The mark says that another process than the writer reads the file.

    def _mark(self, now: float) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                mark = self._file.with_suffix(".read")
                mark.touch()
                os.utime(mark, (now, now))

    def _marked(self) -> float:
        try:
            return self._file.with_suffix(".read").stat().st_mtime if self._file else 0.0
        except OSError:
            return 0.0

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one process ask at a time; one that was suspended meanwhile stops no other one."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                if self._file is not None:
                    lock = stack.enter_context(self._file.with_suffix(".lock").open("w"))
                    _wait(lock.fileno())
            yield


def _lives(writer: str) -> bool:
    """Return whether the process of an answer still watches; else the next one asks at once."""
    try:
        os.kill(int(writer.partition(" ")[0]), 0)
    except (OSError, ValueError):
        return False
    return True


def _wait(lock: int) -> None:
    end = time.monotonic() + SECONDS_TO_ANSWER
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _file(env: Mapping[str, str]) -> Path | None:
    """Return the file for the answers; None without a folder that only this user can write."""
    name = hashlib.sha256("\0".join(env.get(one, "") for one in _VARIABLES).encode(
        errors="surrogateescape")).hexdigest()[:16]  # fmt: skip
    own = env.get("XDG_RUNTIME_DIR") or os.path.join(
        tempfile.gettempdir(), f"hpctrain-{os.geteuid()}"
    )
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(own, 0o700)
        facts = os.lstat(own)
    except OSError:
        return None
    private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return Path(own, f"hpctrain-jobs-{name}") if private and not facts.st_mode & 0o022 else None
