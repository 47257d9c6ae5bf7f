"""What a silent rank does, which tells a hang from slow work: its stack, and what it uses."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from time import monotonic

from hpctrain.cluster import system

__all__ = ["POLLING", "Sample", "conclusion", "never_ran", "processor_seconds", "take"]

# Frames of a rank that compiles, or that a person looks at. A compiled model runs in other frames
# of the same packages.
_TAKES_LONG = re.compile(
    r'/(_dynamo/convert_frame|_inductor/async_compile|pdb|bdb|code)\.py"|/pydevd'
    r'|/_inductor/compile_fx\.py", line \d+ in \w*compile|/triton/compiler/'
)
_IDLE = 0.1  # of one processor; threads that poll use less, as those of Horovod and of trackers
_BYTES = 1 << 20  # per second; Horovod's thread sends and receives a tenth of it without end
POLLING = 0.05  # of one processor for each rank, of a job in which nothing happens
# Python's main thread asks for the GIL every 5 ms while another thread holds it, or less often on a
# machine with more threads that compute than processors.
_ASKS_FOR_THE_GIL = 40, 210  # per second


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process and its children did until a moment.

    Attributes:
        time: `time.monotonic()` of the sample.
        stopped: whether the process is stopped (state T).
        stack: stack of the main thread, innermost frame first; empty if it is not known.
        takes_long: whether a thread compiles, or is under a debugger of Python.
        pids: process ids of the process and its children.
        children: processor seconds of the children.
        process: processor seconds of the process.
        main: processor seconds of its main thread.
        on_lock: whether the main thread waits for a lock.
        waits: how often the main thread has waited.
        transferred: bytes read and written by these processes.
        in_kernel: whether a thread waits in the kernel (state D): its file system or device may
            still respond.
    """

    time: float
    stopped: bool
    stack: str
    takes_long: bool
    pids: tuple[int, ...]
    children: float
    process: float
    main: float
    on_lock: bool
    waits: int
    transferred: int
    in_kernel: bool

    @property
    def frame(self) -> str:
        """Innermost frame of the main thread, such as "wait (train.py, line 12)"."""
        found = re.match(r'  File "(?:.*/)?(.*)", line (\d+) in (.*)', self.stack)
        return f"{found[3]} ({found[1]}, line {found[2]})" if found else ""


def take(pid: int, dump: str) -> Sample:
    """Return what a process and its children do now.

    Args:
        pid: process id of the rank.
        dump: stacks of its threads, as `faulthandler` writes them; the main thread is the last.

    Raises:
        OSError: the process has ended.
    """
    dump = dump[: dump.rfind("\n") + 1]  # the rank may still write the last line
    pids = tuple(
        one for one in system.family(pid) if one != os.getpid()
    )  # a rank starts the helper
    process = system.stat(pid)
    return Sample(
        monotonic(),
        process.state == "T",
        dump.rstrip().rpartition("\n\n")[2].partition("\n")[2],
        bool(_TAKES_LONG.search(dump)),
        pids,
        sum(stat.seconds for stat in system.stats(pids[1:])),
        process.seconds,
        system.main_thread(pid).seconds,
        "futex" in system.kernel_function(pid),
        system.waits(pid),
        system.transferred(pids),
        any(stat.state == "D" for one in pids for stat in system.threads(one)),
    )


def conclusion(before: Sample, now: Sample) -> str:
    """Return "idle" for a process that hangs, "busy" for one that may, or nothing.

    A process that hangs has the same stack in both samples. It is idle if it and its children use
    no processor and transfer nothing. Another thread may use one while it holds the GIL, for which
    the main thread waits. A busy process computes, or waits in C code that polls: these look alike.
    """
    if before.stopped and now.stopped:
        return "idle"
    if not now.stack or now.stack != before.stack:
        return ""
    if now.takes_long or before.in_kernel or now.in_kernel:
        return ""
    seconds = now.time - before.time
    asks, (low, high) = (now.waits - before.waits) / seconds, _ASKS_FOR_THE_GIL
    without_gil = (before.on_lock or now.on_lock) and low <= asks <= high
    used = now.main - before.main if without_gil else now.process - before.process
    used += now.children - before.children
    if used > _IDLE * seconds or now.transferred - before.transferred > _BYTES * seconds:
        return "busy"
    return "idle" if now.pids == before.pids else "busy"


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a rank and its children, without the helper."""
    return sum(stat.seconds for stat in system.stats(set(system.family(pid)) - {os.getpid()}))


def never_ran(pid: int) -> list[int]:
    """Return the children of a rank that have not run since their fork.

    They sleep on a lock, have one thread and no processor time, and have not left the call of
    `multiprocessing` that forks. A healthy process that waits for its first task has left it.

    Args:
        pid: process id of the rank.
    """

    def asleep(child: int) -> bool:
        stats = [(one.parent, one.state, one.seconds) for one in system.stats([child])]
        return stats == [(pid, "S", 0.0)] and "futex" in system.kernel_function(child)

    return [
        child
        for child in system.family(pid)[1:]
        if asleep(child) and len(system.threads(child)) == 1 and _in_fork(pid, child)
    ]


def _in_fork(parent: int, child: int) -> bool:
    """Return whether a child has not done the first lines of a process of `multiprocessing`.

    These close the ends of two pipes that belong to the parent, and open a new standard input,
    which Python would close at an exec.
    """
    of_parent, of_child = system.descriptors(parent), system.descriptors(child)
    if any(system.closes_at_exec(pid, 0) is not False for pid in (parent, child)):
        return False
    pipes, child_pipes = Counter(of_parent.values()), Counter(of_child.values())
    both_ends = [
        number
        for number, file in of_parent.items()
        if file.startswith("pipe:") and pipes[file] == 1
        if of_child.get(number) == file and child_pipes[file] == 2
    ]
    return len(both_ends) >= 2
