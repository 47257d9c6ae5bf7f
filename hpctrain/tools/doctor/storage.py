"""Checks of directories for writing: space, inodes, file system type, quota, and a test write."""

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.cluster.texts import printable
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.subprocesses import SECONDS, ask, within

__all__ = [
    "Place",
    "cache",
    "examine",
    "judge",
    "judge_quota",
    "kind_of",
    "nearest",
    "quotas",
    "read_quota",
    "run",
]

_GIB = 2**30
_LITTLE_BYTES, _NO_BYTES = 10 * _GIB, _GIB
_FEW_INODES = 10_000
_TRIAL_BYTES = 1 << 16
_HANGS_SECONDS = 10.0
_NEARLY = 0.95
_ESCAPE = re.compile(r"\\([0-7]{3})")  # escape in mountinfo; source: proc(5)


def run(given: str | None, env: Mapping[str, str]) -> Path:
    """Return the run directory: the given one, else $HPCTRAIN_RUN_DIR, else the default `runs`."""
    return Path(given or env.get(env_vars.RUN_DIR) or "runs").absolute()


def cache(env: Mapping[str, str]) -> Path:
    """Return the cache folder; its contents can be created again at any time."""
    return Path(env.get(env_vars.CACHE) or os.path.expanduser("~/.cache/hpctrain")).absolute()


def nearest(path: Path) -> Path:
    """Return the directory itself, or the nearest existing directory above it."""
    return next((folder for folder in (path, *path.parents) if os.path.isdir(folder)), Path("/"))


@dataclass(frozen=True, slots=True)
class Place:
    """State of a directory.

    Attributes:
        path: path of the directory, which may not exist yet.
        kind: type of the file system, such as "ext4", "nfs4", "lustre"; "" where unknown.
        free: bytes that this user may still write.
        inodes: number of files that may still be created; None where the file system has no count.
        error: error of the test write, which writes, syncs and removes a small file; "" if none.
    """

    path: Path
    kind: str
    free: int
    inodes: int | None
    error: str = ""


def examine(subject: str, path: Path) -> list[Finding]:
    """Check one directory; a file system that does not respond is a finding as well."""
    place = within(_HANGS_SECONDS, lambda: _read(path))
    if place is None:
        found = f"{printable(path)}: no answer within {_HANGS_SECONDS:.0f} s"
        fix = f"ls {printable(path)}, which hangs as well: the file server is down or overloaded"
        return [Finding(subject, PROBLEM, found, (fix,))]
    return [judge(subject, place)]


def _read(path: Path) -> Place:
    folder = nearest(path)
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return Place(path, "", 0, None, error.strerror or str(error))
    return Place(
        path=path,
        kind=kind_of(folder.resolve(), _mounts()),
        free=facts.f_bavail * facts.f_frsize,
        inodes=facts.f_favail if facts.f_files else None,
        error=_try(path, folder),
    )


def _try(path: Path, folder: Path) -> str:
    """Write a small file to the disk and remove it; return the error, or "" if there is none."""
    if os.path.exists(path) and not os.path.isdir(path):
        return "it is not a directory"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hpctrain-doctor-") as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def kind_of(folder: Path, mounts: str) -> str:
    """Return the file system type of a directory; "" where it is not listed.

    Args:
        folder: path of the directory, without symbolic links.
        mounts: content of /proc/self/mountinfo, whose format is in proc(5).
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        front, _, back = line.partition(" - ")
        fields = front.split()
        if len(fields) < 5 or not back:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of several mounts on one mount point, the last is the visible one.
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), back.split()[0]
    return kind


def judge(subject: str, place: Place) -> Finding:
    """Return a finding on whether a training can write to a directory and has enough space."""
    where = f"{printable(place.path)} ({place.kind or 'unknown file system'})"
    run_directory = subject == "run directory"
    fix = "--run-dir DIR" if run_directory else f"export {env_vars.CACHE}=DIR"
    if place.error:
        level = PROBLEM if run_directory else WARNING
        found = f"{where}: cannot be written: {place.error}"
        return Finding(subject, level, found, (f"{fix}, a directory that can be written",))
    inodes = "" if place.inodes is None else f", {place.inodes} inodes"
    found = f"{where}: writable, {place.free / _GIB:.1f} GiB{inodes} free"
    few = place.inodes is not None and place.inodes < _FEW_INODES
    if place.free < _LITTLE_BYTES or few:
        level = PROBLEM if run_directory and place.free < _NO_BYTES else WARNING
        what = "few inodes left" if few else "little space left"
        return Finding(subject, level, f"{found}: {what}", (f"{fix} on another file system",))
    if run_directory and place.kind in ("tmpfs", "ramfs"):
        found = f"{found}: in memory, not on a disk"
        return Finding(
            subject, WARNING, found, (f"{fix} on a disk that keeps the files after the job",)
        )
    return Finding(subject, OK, found)


def quotas(places: Sequence[Path]) -> list[Finding]:
    """Return the findings on this user's quotas, from the tools of the file systems."""
    answers = [ask(["quota", "-w", "-p"])]
    if shutil.which("lfs") is not None:
        folders = within(SECONDS, lambda: {str(nearest(place)) for place in places})
        answers += [
            ask(["lfs", "quota", "-q", "-u", _user(), folder]) for folder in sorted(folders or ())
        ]
    return judge_quota([answer[1].splitlines() for answer in answers if answer])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without this user
        return str(os.getuid())


def read_quota(lines: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """Read the limits in the output of `quota -w -p` or `lfs quota -q`.

    Both print nine columns: the file system, then used, quota, limit and grace of KiB, and the
    same four of files. Sources: quota(1), lfs-quota(1).

    Returns:
        File system, kind ("KiB" or "files"), used and limit, for each limit that is set.
    """
    columns = " ".join(line for line in lines if not line.startswith("Disk quotas for")).split()
    if "Filesystem" in columns:
        columns = columns[columns.index("Filesystem") + 9 :]  # skip the nine titles
    found = []
    for start in range(0, len(columns) - 8, 9):
        row = columns[start : start + 9]
        for kind, used, soft, hard in (("KiB", *row[1:4]), ("files", *row[5:8])):
            numbers = [text.strip("*[]") for text in (used, soft, hard)]
            if not all(number.isascii() and number.isdecimal() for number in numbers):
                continue
            limit = min((int(n) for n in numbers[1:] if int(n)), default=0)
            if limit:
                found.append((row[0], kind, int(numbers[0]), limit))
    return found


def judge_quota(outputs: Sequence[Sequence[str]]) -> list[Finding]:
    """Return a finding for each limit that is near, else one for the limit that is nearest.

    Args:
        outputs: lines that each tool printed; without limits in them there is no finding.
    """
    rows = list(dict.fromkeys(row for lines in outputs for row in read_quota(lines)))
    near = [
        Finding(
            "quota",
            PROBLEM if used >= limit else WARNING,
            f"{printable(system)}: {used} of {limit} {kind} used",
            (
                "remove what is not needed",
                "--run-dir DIR on another file system",
                f"export {env_vars.CACHE}=DIR on another file system",
            ),
        )
        for system, kind, used, limit in rows
        if used >= _NEARLY * limit
    ]
    if near or not rows:
        return near
    system, kind, used, limit = max(rows, key=lambda row: row[2] / row[3])
    return [Finding("quota", OK, f"{printable(system)}: {used} of {limit} {kind} used")]
