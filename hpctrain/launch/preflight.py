"""Check of a host before its ranks start: what a training would find out late, or not at all.

It takes a tenth of a second, and with GPUs the second that nvidia-smi needs. A session then checks
a computation and a sum on each rank's device (`training/setup`).
"""

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster import commands, system

__all__ = ["check"]

_SECONDS_FOR_GPUS = 8.0
_MEBIBYTE = 1 << 20
_LEAST_DISK = 100 * _MEBIBYTE
_LEAST_MEMORY = 512 * _MEBIBYTE  # a rank with torch needs as much
_PATTERN = bytes(range(256)) * (4 * _MEBIBYTE // 256)
_DIGEST = "2b07811057df887086f06a67edc6ebf911de8b67"


def check(folder: Path, env: Mapping[str, str]) -> str:
    """Return what is wrong with this host; empty if nothing was found.

    Args:
        folder: folder that all hosts share.
        env: environment of the agent.
    """
    return _gpus(env) or _memory() or _disks(folder, env) or _computation()


def _gpus(env: Mapping[str, str]) -> str:
    """Compare the GPUs that Slurm has given to the job with those that the driver shows."""
    expected = env.get("SLURM_GPUS_ON_NODE", "0")
    if not expected.isdecimal() or not int(expected):
        return ""
    try:
        done = commands.run(["nvidia-smi", "--list-gpus"], _SECONDS_FOR_GPUS, env)
    except commands.LateAnswerError as error:
        return f"the driver of the GPUs does not answer: {error}"
    except commands.NoAnswerError:
        return ""  # GPUs of another kind
    if done.returncode:
        return f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())[:200]}"
    seen = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return "" if seen >= int(expected) else f"{seen} of the {expected} GPUs of the job"


def _memory() -> str:
    available = system.meminfo("MemAvailable")
    if available is None or available >= _LEAST_MEMORY:
        return ""
    return f"{available // _MEBIBYTE} MiB of memory are free"


def _disks(folder: Path, env: Mapping[str, str]) -> str:
    """Write and read a file in the shared folder, and in that for temporary files."""
    temporary = env.get("TMPDIR") or tempfile.gettempdir()
    try:
        for place in (str(folder), temporary):
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(_PATTERN[:4096])
                file.seek(0)
                if file.read() != _PATTERN[:4096]:
                    return f"{place} does not keep what is written to it"
        disk = os.statvfs(temporary)
    except OSError as error:
        if place == str(folder) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""  # not the fault of this host
        return f"{place} cannot be written: {error.strerror}"
    free = disk.f_bavail * disk.f_frsize
    return "" if free >= _LEAST_DISK else f"{free // _MEBIBYTE} MiB are free in {temporary}"


def _computation() -> str:
    digest = hashlib.sha256(_PATTERN).hexdigest()[:40]
    return "" if digest == _DIGEST else f"the processor computes {digest} and not {_DIGEST}"
