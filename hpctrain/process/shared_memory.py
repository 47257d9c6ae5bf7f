"""Folder in the memory of a host, for copies of the state that outlive the ranks of an attempt.

    /dev/shm/hpctrain-UID-LAUNCH/HOST-RUN/checkpoints/step-00000042/

Hosts that are simulated on one machine share memory, so the name of the host is in the path. A
process that needs the folder holds a lock on it as long as it lives.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from pathlib import Path

from hpctrain.cluster import system

__all__ = ["folder_of", "hold", "keep", "make", "place_in", "remove", "remove_abandoned"]

_TOP = Path(system.shared_folder())

# Between two attempts no process of a launch may be on the host.
_SECONDS_BETWEEN_ATTEMPTS = 300.0

_held: list[int] = []  # file descriptors with locks


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
    hold(folder)


def hold(folder: Path) -> None:
    """Let no other launch remove a folder as long as this process lives; it may not be there."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        _held.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


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
    """Remove the folders of this user's launches that no process on this host holds any more.

    A folder that was made or marked in the last five minutes stays: its next attempt may follow.

    Args:
        own: folder of this launch, which stays; empty for none.
    """
    before = time.time() - _SECONDS_BETWEEN_ATTEMPTS
    for path in _TOP.glob(f"hpctrain-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < before and str(path) != own and not _is_held(path):
                remove(path)


def _is_held(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
