"""A copy of standard error in a file, for the output of C++ libraries."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

__all__ = ["StderrCapture"]

_END_SECONDS = 2.0
# tee ignores signals to all processes of a job, to record what the rank prints after them.
_COMMAND = 'trap "" HUP INT QUIT TERM USR1 USR2; exec tee -a -- "$0"'


class StderrCapture:
    """A process that copies file descriptor 2 to a file and to the original stream until `close`.

    It is a process and not a thread, so that the last output of a crashing rank is not lost.
    Python's output to `sys.stderr` is not copied, because the rank's log already has it.

    Args:
        path: file to which the output is appended.
    """

    def __init__(self, path: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._python = sys.stderr
        self._own: TextIO | None = None
        self._before = os.dup(2)
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", _COMMAND, str(path)],
                stdin=subprocess.PIPE,
                stdout=self._before,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # without a shell, the output is only on the screen
            return
        if _writes_to_2(self._python):
            self._python.flush()
            # Not closed in `close`: a logging handler created in between may still use it.
            self._own = sys.stderr = os.fdopen(self._before, "w", 1, errors="backslashreplace")
        assert self._process.stdin is not None
        os.dup2(self._process.stdin.fileno(), 2)
        self._process.stdin.close()

    def close(self) -> None:
        """Restore file descriptor 2 and `sys.stderr`."""
        if sys.stderr is self._own:
            sys.stderr = self._python
        os.dup2(self._before, 2)
        if self._own is None:
            os.close(self._before)
        if self._process is not None:
            # It ends after the last process with its pipe, which may be a loader worker.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)


def _writes_to_2(stream: object) -> bool:
    try:
        return stream.fileno() == 2  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError, ValueError):  # in a notebook, or a closed stream
        return False
