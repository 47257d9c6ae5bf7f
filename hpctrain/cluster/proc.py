"""Facts about processes of this host, from Linux's /proc. Source: proc(5)."""

import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Stat",
    "age",
    "environment",
    "family",
    "namespace",
    "private_memory",
    "start_time",
    "started",
    "stat",
    "stats",
    "text",
    "threads",
]


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that are used.

    Attributes:
        state: state letter, such as R, S, D or T; empty if the process has ended.
        parent: process id of the parent.
        started: start time in clock ticks since the boot; with the process id, it identifies the
            process.
        seconds: processor time in seconds, with that of children for which it has waited.
    """

    state: str
    parent: int
    started: int
    seconds: float = 0.0


def stat(pid: int | str) -> Stat:
    """Return facts about a process, or about a thread ("PID/task/TID").

    Raises:
        OSError: /proc does not show the process.
    """
    # The name, in parentheses, may contain any characters. It is cut at 15 bytes.
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        content = file.read()
    state, parent, *others = content.rpartition(")")[2].split()
    seconds = sum(map(int, others[9:13])) / os.sysconf("SC_CLK_TCK")
    return Stat("" if state in "ZX" else state, int(parent), int(others[17]), seconds)


def threads(pid: int) -> list[str]:
    """Return the threads of a process as paths below /proc; none if it has ended."""
    try:
        return [f"{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def stats(paths: Iterable[int | str]) -> list[Stat]:
    """Return facts about processes or threads, without those that have ended."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append(stat(path))
    return found


def family(pid: int) -> list[int]:
    """Return the ids of a process and of its children, and theirs."""
    found = [pid]
    for one in found:
        for thread in threads(one):
            found += map(int, text(f"{thread}/children").split())
    return found


def private_memory(pid: int) -> int:
    """Return the bytes of a process in memory that are of no file; 0 if it has ended.

    Pages that a forked process still shares with its parent are counted.
    """
    pages = text(f"{pid}/statm").split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def started(pid: int) -> int | None:
    """Return `Stat.started`; 0 if the process has ended, None if /proc does not show it."""
    try:
        found = stat(pid)
    except OSError:
        return None
    return found.started if found.state else 0


def start_time(pid: int) -> int | None:
    """Return when a process was started, in seconds since the epoch; None if it is not known."""
    boot = re.search(r"^btime ([0-9]+)", text("stat"), re.MULTILINE)
    ticks = started(pid)
    if not ticks or boot is None:
        return None
    return int(boot[1]) + ticks // os.sysconf("SC_CLK_TCK")


def age(pid: int) -> float | None:
    """Return the seconds since the start of a process, to 0.01; None if it is not known."""
    ticks = started(pid)
    if not ticks:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def environment(pid: int) -> dict[str, str] | None:
    """Return the environment with which a process was started; None if it is not readable."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def namespace() -> int:
    """Return the number of this process's pid namespace; 0 if the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def text(path: str) -> str:
    """Return the content of a file below /proc; empty if it is not readable."""
    try:
        with open(f"/proc/{path}", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
