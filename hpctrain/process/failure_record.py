"""What ranks leave for whoever started them: that they have a session; when and how they failed.

    FOLDER/session-RANK     the rank has opened a session
    FOLDER/failure-RANK     JSON: when, whether it only repeats what befell another rank, and what
    FOLDER/shown            made by the rank whose traceback is on standard error

Standard library alone: `hpctrain run` reads it.
"""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.errors import HpctrainError, RankLostError

__all__ = ["Failure", "failures", "note_failure", "note_session", "sessions", "shown", "shows"]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed.

    Attributes:
        time: when, in seconds of the monotonic clock, which all processes of a host share.
        follows: whether it comes of the failure of another rank.
        words: one line for people.
        pid: of the process.
        traceback: of an error that is none of hpctrain's; else empty.
    """

    time: float
    follows: bool
    words: str
    pid: int
    traceback: str = ""


def note_session(rank: int, env: Mapping[str, str]) -> None:
    """This rank has a session."""
    _write(env, f"session-{rank}", "")


def note_failure(rank: int, error: BaseException, env: Mapping[str, str]) -> None:
    """This rank fails; only the first failure counts."""
    follows = isinstance(error, RankLostError) or (
        isinstance(error, HpctrainError) and error.told_by_rank_0
    )
    words, text = f"{type(error).__name__}: {error}", ""
    if isinstance(error, HpctrainError):
        words = error.found
    elif not isinstance(error, SystemExit):
        text = "".join(traceback.format_exception(error))
    failure = Failure(time.monotonic(), follows, words, os.getpid(), text)
    _write(env, f"failure-{rank}", json.dumps(asdict(failure)))


def shows(env: Mapping[str, str]) -> bool:
    """Whether this rank shows its traceback: the first one does, and one that is on its own."""
    return env_vars.EVIDENCE not in env or _write(env, "shown", str(os.getpid()))


def shown(folder: Path) -> int | None:
    """The process whose traceback is on standard error."""
    try:
        return int((folder / "shown").read_text())
    except (OSError, ValueError):
        return None


def sessions(folder: Path) -> bool:
    """Whether any rank had a session."""
    return any(folder.glob("session-*"))


def failures(folder: Path) -> dict[int, Failure]:
    """By rank, what it left."""
    found = {}
    for path in folder.glob("failure-*"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # cut off as it was killed
            found[int(path.name.rpartition("-")[2])] = Failure(**json.loads(path.read_text()))
    return found


def _write(env: Mapping[str, str], name: str, text: str) -> bool:
    """Make a file that is not there yet; whether this process has made it."""
    folder = env.get(env_vars.EVIDENCE)
    if not folder:
        return False
    try:
        descriptor = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return True
