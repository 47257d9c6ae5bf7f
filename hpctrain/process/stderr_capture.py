"""What libraries written in C++ print on standard error, in a file as well."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

__all__ = ["StderrCapture"]

_END_SECONDS = 2.0
# Signals to all processes of a job are for the rank; what it then prints is wanted.
_COMMAND = 'trap "" HUP INT QUIT TERM USR1 USR2; exec tee -a -- "$0"'


class StderrCapture:
    """A process between file descriptor 2 and what it was, until `close`.

    A process, and no thread, so that the last words of a rank that crashes are not lost. What
    Python writes to `sys.stderr` goes its own way: the rank's log has it already.

    Args:
        path: the file, to which it is appended.
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
        except OSError:  # no shell: the screen alone has it
            return
        if _writes_to_2(self._python):
            self._python.flush()
            # Stays open: a logging handler that is made meanwhile keeps it.
            self._own = sys.stderr = os.fdopen(self._before, "w", 1, errors="backslashreplace")
        assert self._process.stdin is not None
        os.dup2(self._process.stdin.fileno(), 2)
        self._process.stdin.close()

    def close(self) -> None:
        """Leave file descriptor 2 and `sys.stderr` as they were."""
        if sys.stderr is self._own:
            sys.stderr = self._python
        os.dup2(self._before, 2)
        if self._own is None:
            os.close(self._before)
        if self._process is not None:
            # It ends with the last process that has its pipe, such as a loader worker.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)


def _writes_to_2(stream: object) -> bool:
    try:
        return stream.fileno() == 2  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError, ValueError):  # a notebook's, or one that is closed
        return False
