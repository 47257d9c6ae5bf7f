"""Ends what the ranks left running, also when the process that started them was killed.

    python guard.py PARENT_PID MARKER [FOLDER]

A program of its own, which needs nothing but the standard library, in a session of its own. It
reads the ids of the ranks, one a line, from its standard input, and `end` at a regular end. When
that comes, or its input ends, or its parent is gone, it kills the process group of each rank, and
every process of this user that has MARKER (`NAME=VALUE`) in the environment it was started with:
that finds what left a rank's group. What did both, leave the group and clean its environment, is
not found. Without an `end` FOLDER is removed too. With PARENT_PID 0 the parent does not matter, as
where ssh started it.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time

# A process that is being killed may still start others.
_SECONDS_TO_SWEEP = 5.0
_SECONDS_BETWEEN_LOOKS = 1.0


def main() -> None:
    """Wait for the end, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, marker, folders = int(sys.argv[1]), os.fsencode(sys.argv[2]), sys.argv[3:]
    lines = _listen(parent).split(b"\n")[:-1]  # one that was cut off does not count
    for group in lines:
        if group != b"end":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(group), signal.SIGKILL)
    end = time.monotonic() + _SECONDS_TO_SWEEP
    while _kill_marked(marker) and time.monotonic() < end:
        time.sleep(0.01)
    if b"end" not in lines:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _listen(parent: int) -> bytes:
    """All that the parent had to say."""
    heard = b""
    while True:
        # Another child of the parent may hold the pipe open, so its end is not all there is.
        ready, _, _ = select.select([0], [], [], _SECONDS_BETWEEN_LOOKS)
        data = os.read(0, 1 << 16) if ready else b""
        heard += data
        over = heard.endswith(b"end\n") or (ready and not data)
        if over or (parent and not ready and os.getppid() != parent):
            return heard


def _kill_marked(marker: bytes) -> bool:
    """Kill all that carry the marker; whether there was one."""
    found = False
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            # It may be gone, or another user's.
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    marked = marker in file.read().split(b"\0")
                if marked:
                    found = True
                    os.kill(int(name), signal.SIGKILL)
    return found


if __name__ == "__main__":
    main()
