"""What a silent rank does, which tells a hang from slow work: its stack, and what it uses."""

import os
import re
import time
from dataclasses import dataclass

from hpctrain.cluster import proc

__all__ = ["Sample", "take", "verdict"]

# Frames of a rank that compiles, or that a person looks at. A compiled model runs in other frames
# of the same packages.
_TAKES_LONG = re.compile(
    r'/(_dynamo/convert_frame|_inductor/async_compile|pdb|bdb|code)\.py"|/pydevd'
    r'|/_inductor/compile_fx\.py", line \d+ in \w*compile|/triton/compiler/'
)
_IDLE = 0.1  # of one processor; threads that poll use less, as those of Horovod and of trackers
_BYTES = 1 << 16  # per second
# Python's main thread asks for the GIL every 5 ms while another thread holds it.
_ASKS_FOR_THE_GIL = 120, 210  # per second


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process and its children did until a moment.

    Attributes:
        time: `time.monotonic()` of the sample.
        stopped: whether the process is stopped (state T).
        stack: stack of the main thread, innermost frame first; empty if it is not known.
        takes_long: whether a thread compiles, or is under a debugger of Python.
        pids: process ids of the process and its children.
        processor: processor seconds of these processes.
        main: processor seconds of the main thread.
        waits: how often the main thread gave up its processor.
        transferred: bytes read and written by these processes.
        in_kernel: whether a thread waits in the kernel (state D): its file system or device may
            still respond.
    """

    time: float
    stopped: bool
    stack: str
    takes_long: bool
    pids: tuple[int, ...]
    processor: float
    main: float
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
    pids = tuple(one for one in proc.family(pid) if one != os.getpid())  # a rank starts the helper
    threads = proc.stats(thread for one in pids for thread in proc.threads(one))
    counted = "\n".join(proc.text(f"{one}/io") for one in pids)
    waits = re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", proc.text(f"{pid}/status"))
    return Sample(
        time.monotonic(),
        proc.stat(pid).state == "T",
        dump.rstrip().rpartition("\n\n")[2].partition("\n")[2],
        bool(_TAKES_LONG.search(dump)),
        pids,
        sum(stat.seconds for stat in proc.stats(pids)),
        proc.stat(f"{pid}/task/{pid}").seconds,
        int(waits[1]) if waits else 0,
        sum(map(int, re.findall(r"^[rw]char: (\d+)", counted, re.MULTILINE))),
        any(stat.state == "D" for stat in threads),
    )


def verdict(before: Sample, now: Sample) -> str:
    """Return "idle" for a process that hangs, "busy" for one that may, or nothing.

    A process that hangs has the same stack in both samples. It is idle if it and its children use
    no processor and transfer nothing, or if its main thread waits for the GIL all the time. A busy
    one computes, or waits in C code that polls: these look alike.
    """
    if before.stopped and now.stopped:
        return "idle"
    if not now.stack or now.stack != before.stack:
        return ""
    if now.takes_long or before.in_kernel or now.in_kernel:
        return ""
    seconds = now.time - before.time
    low, high = _ASKS_FOR_THE_GIL
    waits_for_gil = low <= (now.waits - before.waits) / seconds <= high
    used = now.main - before.main if waits_for_gil else now.processor - before.processor
    if used > _IDLE * seconds or now.transferred - before.transferred > _BYTES * seconds:
        return "busy"
    return "idle" if now.pids == before.pids else "busy"
