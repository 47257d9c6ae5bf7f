"""Folder in the memory of a host, for copies of the state that outlive the ranks of an attempt.

    /dev/shm/hpctrain-UID-LAUNCH/HOST-RUN/checkpoints/step-00000042/

Hosts that are simulated on one machine share /dev/shm, so the name of the host is in the path.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from pathlib import Path

from hpctrain.cluster import env_vars, proc

__all__ = ["folder_of", "keep", "make", "place_in", "remove", "remove_abandoned"]

_TOP = Path("/dev/shm")  # noqa: S108, as `make` checks the folder in it

# Between two attempts no process of a launch may be on the host.
_SECONDS_BETWEEN_ATTEMPTS = 300.0


def folder_of(launch: str) -> Path:
    """Return the folder for all attempts of a launcher's run."""
    return _TOP / f"hpctrain-{os.getuid()}-{launch}"


def place_in(folder: Path, host: str, run: Path) -> Path:
    """Return the place of a run directory's copies on a host."""
    digest = hashlib.blake2b(os.fsencode(run), digest_size=8).hexdigest()
    name = re.sub(r"[^\w.-]", "_", host, flags=re.ASCII)
    return folder / f"{name}-{digest}"


def make(folder: Path) -> None:
    """Make a folder that only this user can read, unless it is there already.

    Raises:
        OSError: it cannot be made, or the name is that of a link, a file or another user's folder.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not _is_own(status) or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{folder} is no folder of this user alone")


def remove(folder: Path) -> None:
    """Remove a folder of this user as far as possible."""
    with contextlib.suppress(OSError):
        if _is_own(folder.lstat()):
            shutil.rmtree(folder, ignore_errors=True)


def keep(folder: str) -> None:
    """Mark a folder as in use by a launch whose attempt ends now; there may be none."""
    with contextlib.suppress(OSError):
        os.utime(folder, follow_symlinks=False)


def remove_abandoned(own: str) -> None:
    """Remove the folders of this user's launches that have no process on this host any more.

    A folder that was made or marked in the last five minutes stays: its next attempt may follow.

    Args:
        own: folder of this launch, which stays; empty for none.
    """
    before = time.time() - _SECONDS_BETWEEN_ATTEMPTS
    found = set()
    for path in _TOP.glob(f"hpctrain-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < before:
                found.add(str(path))
    found.discard(own)
    if not found:
        return
    for name in os.listdir("/proc"):
        if name.isdecimal():
            found.discard((proc.environment(int(name)) or {}).get(env_vars.MEMORY, ""))
    for left in found:
        remove(Path(left))


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
