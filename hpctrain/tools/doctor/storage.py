"""Places that a training writes to: room, inodes, kind of file system, quota, and a real write."""

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding, plain
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
_ESCAPE = re.compile(r"\\([0-7]{3})")  # of mountinfo: proc(5)


def run(given: str | None, env: Mapping[str, str]) -> Path:
    """The run directory: the one given, else $HPCTRAIN_RUN, else where runs go by default."""
    return Path(given or env.get(env_vars.RUN) or "runs").absolute()


def cache(env: Mapping[str, str]) -> Path:
    """The folder for everything that can be made again."""
    return Path(env.get(env_vars.CACHE) or os.path.expanduser("~/.cache/hpctrain")).absolute()


def nearest(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    return next((one for one in (path, *path.parents) if os.path.isdir(one)), Path("/"))


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of a directory.

    Attributes:
        path: as it was asked for.
        kind: of the file system, such as "ext4", "nfs4", "lustre"; "" where it is not known.
        free: bytes that this user may still write.
        inodes: files that may still be made; None where the file system does not count them.
        error: why a small file could not be written, synced and removed; "" where it could.
    """

    path: Path
    kind: str
    free: int
    inodes: int | None
    error: str = ""


def examine(subject: str, path: Path) -> list[Finding]:
    """The findings of one place; a file system that does not answer is a finding as well."""
    place = within(_HANGS_SECONDS, lambda: _read(path))
    if place is None:
        found = f"{plain(path)}: no answer within {_HANGS_SECONDS:.0f} s"
        fix = f"ls {plain(path)}    hangs as well: the file server is gone or overloaded"
        return [Finding(subject, PROBLEM, found, fix)]
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
    """Write a small file to the disk and remove it; the error, or ""."""
    if os.path.exists(path) and not os.path.isdir(path):
        return "it is no directory"
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
    """The type of the file system that a directory lies on; "" where it is not listed.

    Args:
        folder: without symbolic links.
        mounts: the content of /proc/self/mountinfo, whose format is in proc(5).
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        front, _, back = line.partition(" - ")
        fields = front.split()
        if len(fields) < 5 or not back:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of several on one point the last one lies on top.
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), back.split()[0]
    return kind


def judge(subject: str, place: Place) -> Finding:
    """Can a training write there, and for how long?"""
    where = f"{plain(place.path)} ({place.kind or 'file system not known'})"
    run_directory = subject == "run directory"
    fix = "--run DIR" if run_directory else f"export {env_vars.CACHE}=DIR"
    if place.error:
        level = PROBLEM if run_directory else WARNING
        found = f"{where}: cannot be written: {place.error}"
        return Finding(subject, level, found, f"{fix}    with a directory that can be written")
    inodes = "" if place.inodes is None else f", {place.inodes} inodes"
    found = f"{where}: writable, {place.free / _GIB:.1f} GiB{inodes} free"
    few = place.inodes is not None and place.inodes < _FEW_INODES
    if place.free < _LITTLE_BYTES or few:
        level = PROBLEM if run_directory and place.free < _NO_BYTES else WARNING
        what = "few inodes left" if few else "little room"
        return Finding(subject, level, f"{found}: {what}", f"{fix}    on another file system")
    if run_directory and place.kind in ("tmpfs", "ramfs"):
        found = f"{found}: in memory, and gone with it"
        return Finding(subject, WARNING, found, f"{fix}    on a disk that outlives the job")
    return Finding(subject, OK, found)


def quotas(places: Sequence[Path]) -> list[Finding]:
    """What the tools of the file systems say of this user's limits; nothing where none is there."""
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
    """File system, kind, used and limit of what has a limit, as `quota -w -p` or `lfs quota -q`.

    Both print nine columns: the file system, then used, quota, limit and grace of KiB, and the
    same of files. Sources: quota(1), lfs-quota(1).
    """
    words = " ".join(line for line in lines if not line.startswith("Disk quotas for")).split()
    if "Filesystem" in words:
        words = words[words.index("Filesystem") + 9 :]  # nine titles
    found = []
    for start in range(0, len(words) - 8, 9):
        row = words[start : start + 9]
        for kind, used, soft, hard in (("KiB", *row[1:4]), ("files", *row[5:8])):
            numbers = [text.strip("*[]") for text in (used, soft, hard)]
            if not all(number.isascii() and number.isdecimal() for number in numbers):
                continue
            limit = min((int(n) for n in numbers[1:] if int(n)), default=0)
            if limit:
                found.append((row[0], kind, int(numbers[0]), limit))
    return found


def judge_quota(said: Sequence[Sequence[str]]) -> list[Finding]:
    """A finding for each limit that is near, and one for all that are not; none without limits.

    Args:
        said: the lines that each tool printed.
    """
    rows = list(dict.fromkeys(row for lines in said for row in read_quota(lines)))
    near = [
        Finding(
            "quota",
            PROBLEM if used >= limit else WARNING,
            f"{plain(system)}: {used} of {limit} {kind} used",
            "remove what is not needed, or take another file system: --run DIR, "
            f"export {env_vars.CACHE}=DIR",
        )
        for system, kind, used, limit in rows
        if used >= _NEARLY * limit
    ]
    if near or not rows:
        return near
    system, kind, used, limit = max(rows, key=lambda row: row[2] / row[3])
    return [Finding("quota", OK, f"{plain(system)}: {used} of {limit} {kind} used")]
