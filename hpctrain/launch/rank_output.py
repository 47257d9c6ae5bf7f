"""What ranks say: passed on line by line with the rank in front, and remembered for the end."""

import contextlib
import io
import os
import re
import select
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Protocol, TextIO

from hpctrain.process.logging import abandon

__all__ = ["Output", "Tail", "say"]

_CHUNK = 1 << 16
# A line of several ranks is held until it ends, but no more of it than this.
_LONGEST_LINE = 1 << 20
# What is remembered of a rank, and how much of that is shown.
_TAIL_BYTES = 1 << 16
_TAIL_LINE = 1 << 12
_FEW_LINES = 20
_MANY_LINES = 200
_TRACEBACK = b"Traceback (most recent call last)"
_ERROR = b"hpctrain: error: "
# What C++ says as it ends a process, with what gloo, NCCL and Horovod say of other ranks.
_ABORTED = re.compile(
    rb"what\(\):.*(Connection (closed|reset)|Broken pipe|[Tt]imed out|EnforceNotMet|remote process)"
)
# A traceback that follows one of these lines belongs to what went before it.
_GOES_ON = (
    b"During handling of the above exception",
    b"The above exception was the direct cause",
    b"Exception ignored",
)


def say(text: str) -> None:
    """To people, where there is somebody to hear it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


class Tail:
    """The last lines of a rank, and when it began to say what went wrong.

    Attributes:
        failed: when its last traceback or error came, in seconds of the monotonic clock; infinity
            without one.
        follows: whether a library has aborted the process because another rank is gone or does
            something else.
    """

    def __init__(self) -> None:
        self.failed = float("inf")
        self.follows = False
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._count = 0
        self._cause = 0
        self._previous = b""

    def add(self, line: bytes) -> None:
        """Remember a line, and forget the first ones where they are too many."""
        line = line.rstrip(b"\r\n")[:_TAIL_LINE]
        begins = line.startswith(_TRACEBACK) and not self._previous.startswith(_GOES_ON)
        if begins or line.startswith(_ERROR):
            self.failed, self._cause = time.monotonic(), self._count
        self.follows = self.follows or _ABORTED.search(line) is not None
        self._previous = line or self._previous
        self._lines.append(line)
        self._count += 1
        self._size += len(line) + 1
        while self._size > _TAIL_BYTES:
            self._size -= len(self._lines.popleft()) + 1

    def text(self) -> str:
        """The last lines from the beginning of the last traceback on, and at least a few."""
        lines = [line.decode(errors="replace") for line in self._lines]
        first = max(0, min(len(lines) - _FEW_LINES, self._cause - self._count + len(lines)))
        lines = lines[first:]
        if len(lines) > _MANY_LINES:
            left_out = f"… {len(lines) - _MANY_LINES} lines are left out here"
            lines = [*lines[:_FEW_LINES], left_out, *lines[_FEW_LINES - _MANY_LINES :]]
        return "\n".join(lines)


class _Sink:
    """Standard output or error of this process; a notebook's takes text alone."""

    def __init__(self, target: TextIO | None) -> None:
        self._target = target

    def write(self, data: bytes) -> None:
        """Pass on; where the reader has left, drop: a rank whose pipe nobody empties hangs."""
        if self._target is None:
            return
        try:
            self._target.flush()
            if hasattr(self._target, "buffer"):
                self._as_bytes(self._target, data)
            else:
                self._target.write(data.decode(errors="replace"))
                self._target.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                abandon(self._target)
            self._target = None

    def _as_bytes(self, target: TextIO, data: bytes) -> None:
        """Past the buffer: whoever waits for a slow reader holds none of its locks."""
        try:
            descriptor = target.fileno()
        except io.UnsupportedOperation:
            target.buffer.write(data)
            target.flush()
            return
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # ssh and others leave terminals so
                select.select([], [descriptor], [])


@dataclass(slots=True)
class _Source:
    """One stream of one rank."""

    stream: IO[bytes]
    sink: _Sink
    label: bytes
    tail: Tail | None
    rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        """Pass on the lines that are whole; without a label all that came."""
        if not self.label:
            self.sink.write(data)
        self.rest += data
        # A progress bar ends its lines with \r. One at the very end may be half of a \r\n.
        last = len(self.rest) - self.rest.endswith(b"\r")
        fresh = max(0, len(self.rest) - len(data) - 1)
        end = 1 + max(self.rest.rfind(b"\n", fresh), self.rest.rfind(b"\r", fresh, last))
        if end:
            self._pass_on(bytes(self.rest[:end]).splitlines(keepends=True))
            del self.rest[:end]
        if len(self.rest) > _LONGEST_LINE:
            self.end()

    def end(self) -> None:
        """Pass on the rest, as a line: that of another rank would follow on it."""
        if self.rest:
            self._pass_on([bytes(self.rest) + b"\n"])
            self.rest.clear()

    def _pass_on(self, lines: list[bytes]) -> None:
        if self.label and lines:
            self.sink.write(b"".join(self.label + line for line in lines))
        if self.tail is not None:
            for line in lines:
                self.tail.add(line)


class Speaker(Protocol):
    """What `Output` takes of a rank."""

    number: int
    process: "subprocess.Popen[bytes]"
    tail: Tail


class Output:
    """Passes on what ranks say, in a thread of its own, until they say no more.

    Args:
        ranks: which ones.
        labelled: whether each line gets the rank in front; else all comes as it is.
        done: called in that thread when all has been passed on.
    """

    def __init__(self, ranks: Iterable[Speaker], labelled: bool, done: Callable[[], None]) -> None:
        self._done = done
        self._selector = selectors.DefaultSelector()
        self._stop, self._wake = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ)
        out, err = _Sink(sys.stdout), _Sink(sys.stderr)
        for rank in ranks:
            label = f"{rank.number}: ".encode() if labelled else b""
            for stream, sink, tail in (
                (rank.process.stdout, out, None),
                (rank.process.stderr, err, rank.tail),
            ):
                assert stream is not None
                source = _Source(stream, sink, label, tail)
                self._selector.register(stream, selectors.EVENT_READ, source)
        threading.Thread(target=self._copy, name="hpctrain output", daemon=True).start()

    def stop(self) -> None:
        """Pass on what is there, and wait for no more."""
        os.close(self._wake)

    def _copy(self) -> None:
        try:
            while len(self._selector.get_map()) > 1:
                ready = [key.data for key, _ in self._selector.select() if key.data]
                for source in ready:
                    self._read(source)
                if not ready:
                    break  # told to stop, and nothing more is there
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data:
                    key.data.end()
                    key.data.stream.close()
            self._selector.close()
            os.close(self._stop)
            self._done()

    def _read(self, source: _Source) -> None:
        data = os.read(source.stream.fileno(), _CHUNK)
        if data:
            source.feed(data)
        else:
            source.end()
            self._selector.unregister(source.stream)
            source.stream.close()
