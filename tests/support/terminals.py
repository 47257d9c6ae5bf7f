"""A pseudo-terminal in which a command of hpctrain runs."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios

from processes import until


class Terminal:
    """A terminal of 24 lines and 80 columns, with a command that has a session of its own.

    Args:
        words: command of hpctrain, and its arguments.

    Attributes:
        process: process of the command.
        text: all that it has written.
    """

    def __init__(self, *words):
        self._words, self.text = words, ""

    def __enter__(self):
        self._ours, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._before = termios.tcgetattr(self._theirs)
        env = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        command = ["setsid", "--ctty", sys.executable, "-m", "hpctrain", *self._words]
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=env,
            # Where the tests run in the background of a script, Ctrl-C is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
        )
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self):
        for descriptor in (self._ours, self._theirs):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def shows(self, words):
        """Wait until the command has written some words."""
        until(lambda: words in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._read()))

    def press(self, keys):
        os.write(self._ours, keys)

    def is_as_before(self):
        """Return whether the screen and the settings are those before the command."""
        return "\x1b[?1049l" in self._read() and termios.tcgetattr(self._theirs) == self._before

    def _read(self):
        with contextlib.suppress(OSError):
            while select.select([self._ours], [], [], 0.05)[0]:
                self.text += os.read(self._ours, 65536).decode(errors="replace")
        return self.text
