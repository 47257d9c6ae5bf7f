"""Program that ends the ranks and their child processes, also if their launcher was killed.

    python guard.py PARENT_PID MARKER [FOLDER]

It needs only the standard library, and runs in a separate session. It reads the process ids of the
ranks from its standard input, one per line, and `end` at a regular end. After `end`, or when its
input or its parent ends, it kills the process group of each rank, and every process of this user
that was started with MARKER (`NAME=VALUE`) in its environment. The marker finds processes that left
a rank's group. It does not find processes that left the group and also removed the marker. Without
an `end`, the guard also removes FOLDER.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time

# A process that is being killed may still start other processes.
_SECONDS_TO_SWEEP = 5.0
_SECONDS_BETWEEN_CHECKS = 1.0


def main() -> None:
    """Wait for the end, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, marker, folders = int(sys.argv[1]), os.fsencode(sys.argv[2]), sys.argv[3:]
    lines = _read_input(parent).split(b"\n")[:-1]  # without an incomplete last line
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


def _read_input(parent: int) -> bytes:
    """Return the input, once `end` is read, the input is closed or the parent has ended."""
    received = b""
    while True:
        # Another child of the parent may hold the pipe open, so check the parent as well.
        ready, _, _ = select.select([0], [], [], _SECONDS_BETWEEN_CHECKS)
        data = os.read(0, 1 << 16) if ready else b""
        received += data
        ended = received.endswith(b"end\n") or (ready and not data)
        if ended or (not ready and os.getppid() != parent):
            return received


def _kill_marked(marker: bytes) -> bool:
    """Kill all processes with the marker, and return whether there was one."""
    found = False
    # Not with cluster.proc: this program cannot import hpctrain (python -S -P).
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            # The process may have ended, or belong to another user.
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    marked = marker in file.read().split(b"\0")
                if marked:
                    found = True
                    os.kill(int(name), signal.SIGKILL)
    return found


if __name__ == "__main__":
    main()
