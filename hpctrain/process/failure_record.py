"""Files that ranks write for their launcher: whether a session opened, when and how it failed.

    FOLDER/ranks-HOST       a line of JSON for each event of a rank of this host:
                                {"rank": R, "host": HOST}       it has opened a session
                                {"rank": R, "failure": {…}}     the fields of `Failure`
    FOLDER/fresh            a next attempt has to start new interpreters

FOLDER is on the rank's host where an agent reads it; else all hosts share it. Lines are appended,
so the ranks of a host need no lock. Whether a rank shows an error is decided
between all hosts, in the folder of the stop file:

    FOLDER/shown-ATTEMPT        process of the rank whose traceback is on standard error
    FOLDER/shown-ATTEMPT-HASH   process of the rank that has written an error with this text

Only the standard library is imported, because `hpctrain run` reads these files.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.cluster import env_vars
from hpctrain.errors import (
    HpctrainError,
    RankLostError,
    RankMissingError,
    ReplicaError,
    exit_codes,
)

__all__ = [
    "Failure",
    "failures",
    "fresh",
    "note_failure",
    "note_fresh",
    "note_session",
    "sessions",
    "shown",
    "shows",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a rank.

    Attributes:
        time: time of the failure, in seconds of the monotonic clock, the same for all processes
            of a host.
        caused_by_other_rank: whether the failure of another rank caused it.
        description: text for the user.
        pid: process id of the rank.
        exit_code: exit code with which the rank is about to end.
        traceback: traceback of the error; empty for an error of hpctrain and for SystemExit.
        date: the same time in seconds since the epoch, to compare failures of several hosts.
        error: code of an error of hpctrain, such as HT309; empty for another one.
    """

    time: float
    caused_by_other_rank: bool
    description: str
    pid: int
    exit_code: int = exit_codes.FAILED
    traceback: str = ""
    date: float = 0.0
    error: str = ""


def note_session(rank: int, env: Mapping[str, str]) -> None:
    """Record that this rank has opened a session."""
    _append(env, {"rank": rank, "host": _host(env)})


def note_failure(rank: int, error: BaseException, env: Mapping[str, str]) -> None:
    """Record the failure of this rank; later failures of the rank are ignored."""
    caused_by_other_rank = isinstance(error, (RankLostError, RankMissingError)) or (
        isinstance(error, HpctrainError) and error.reported_by_rank_0
    )
    if isinstance(error, ReplicaError):  # rank 0 reports it, and another rank may be the cause
        caused_by_other_rank = not error.at_fault
    text = f"{type(error).__name__}: {error}"
    failure = Failure(time.monotonic(), caused_by_other_rank, text, os.getpid(), date=time.time())
    if isinstance(error, HpctrainError):
        failure = replace(
            failure, description=error.found, exit_code=error.exit_code, error=error.code
        )
    elif not isinstance(error, SystemExit):
        failure = replace(failure, traceback="".join(traceback.format_exception(error)))
    elif isinstance(error.code, int):
        failure = replace(failure, exit_code=error.code)
    _append(env, {"rank": rank, "failure": asdict(failure)})


def note_fresh(env: Mapping[str, str]) -> None:
    """Record that the ranks of a next attempt have to be new interpreters."""
    if folder := env.get(env_vars.EVIDENCE):
        _create(Path(folder, "fresh"), "")


def fresh(folder: Path) -> bool:
    """Return whether the ranks of a next attempt have to be new interpreters."""
    return (folder / "fresh").exists()


def shows(env: Mapping[str, str], text: str = "") -> bool:
    """Check whether this rank shows its traceback, or an error with a text.

    The first rank of all hosts does that fails, or the first one with that text.
    """
    place = _shown(env, text)
    # Where nothing can be written, every rank shows it.
    return place is None or _create(place, process()) or not place.exists()


def shown(env: Mapping[str, str]) -> str:
    """Return the `process` whose traceback is on standard error; empty for none."""
    place = _shown(env)
    try:
        return place.read_text() if place else ""
    except OSError:
        return ""


def process(pid: int | None = None) -> str:
    """Return the name of a process of this host, different from those of other hosts."""
    return f"{platform.node()} {pid or os.getpid()}"


def _shown(env: Mapping[str, str], text: str = "") -> Path | None:
    stop_file, folder = env.get(env_vars.STOP_FILE), env.get(env_vars.EVIDENCE)
    if not folder:
        return None
    if stop_file and os.path.isdir(os.path.dirname(stop_file)):
        folder = os.path.dirname(stop_file)
    name = f"shown-{env.get(env_vars.START, '').rpartition('/')[2]}"
    if text:
        name += f"-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:16]}"
    return Path(folder, name)


def sessions(folder: Path) -> dict[int, str]:
    """Return the ranks that have opened a session, with the host of each."""
    return {line["rank"]: line["host"] for line in _lines(folder) if "host" in line}


def failures(folder: Path) -> dict[int, Failure]:
    """Return the first recorded failure of each rank that has one."""
    found: dict[int, Failure] = {}
    for line in _lines(folder):
        if "failure" in line:
            found.setdefault(line["rank"], Failure(**line["failure"]))
    return found


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of all hosts."""
    found = []
    for path in folder.glob("ranks-*"):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # empty, or incomplete after a kill
                    found.append(json.loads(line))
    return found


def _host(env: Mapping[str, str]) -> str:
    return env.get(env_vars.HOSTNAME) or platform.node().partition(".")[0]


def _append(env: Mapping[str, str], line: Mapping[str, Any]) -> None:
    if folder := env.get(env_vars.EVIDENCE):
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # The launch must not fail because of a full disk.
        with contextlib.suppress(OSError):
            file = os.open(Path(folder, f"ranks-{_host(env)}"), how, 0o600)
            try:
                # A rank that was killed may have left half a line.
                os.write(file, f"\n{json.dumps(line)}\n".encode())
            finally:
                os.close(file)


def _create(place: Path, text: str) -> bool:
    """Create a file that does not exist yet; return whether this process has created it."""
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # of a full disk; the name alone says enough
        os.write(descriptor, text.encode())
    os.close(descriptor)
    return True
