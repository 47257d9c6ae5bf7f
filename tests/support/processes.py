"""Processes that a test starts, finds in /proc, and waits for."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import launches

PATIENCE = 60.0  # seconds until a hang is an error; all that works takes much less


def until(condition, meanwhile=lambda: None):
    """Wait for a condition; call `meanwhile` between the checks."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition does not hold"
        meanwhile()
        time.sleep(0.01)


def having(text, file="cmdline"):
    """Return the ids of processes with a text in their command line, or in their environ."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):  # the process has ended
            if os.fsencode(text) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def started_here(text):
    """Return the ids of processes with a text in their command line that run in this folder."""
    found = []
    for number in having(text):
        with contextlib.suppress(OSError):  # the process has ended
            if os.readlink(f"/proc/{number}/cwd") == os.getcwd():
                found.append(number)
    return found


def lines(text, file="cmdline"):
    """Return the command lines of processes with a text in their command line, or environ."""
    found = {}
    for number in having(text, file):
        with contextlib.suppress(OSError):  # the process has ended
            words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
            found[number] = os.fsdecode(b" ".join(words))
    return found


@contextlib.contextmanager
def background():
    """Yield a function that starts commands; those that still run at the end are killed."""
    running = []

    def begin(command, **more):
        running.append(
            subprocess.Popen(
                command,
                env=launches.environ(**more),
                process_group=0,
                # Where the tests run in the background of a script, Ctrl-C is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return running[-1]

    try:
        yield begin
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=PATIENCE)
