"""Output of the ranks: forwarded line by line with the rank in front; the last lines are kept."""

import contextlib
import io
import os
import re
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Protocol, TextIO

from hpctrain.process.logging import abandon

__all__ = ["TRACEBACK", "Output", "Tail", "announce"]

_CHUNK = 1 << 16
# With several ranks, a line is held until it ends, up to this many bytes.
_LONGEST_LINE = 1 << 20
# Limits for the kept output of a rank, and for the part that is shown.
_TAIL_BYTES = 1 << 16
_TAIL_LINE = 1 << 12
_FEW_LINES = 20
_MANY_LINES = 200
TRACEBACK = "Traceback (most recent call last)"  # first line of Python's
_ERROR = b"hpctrain: error: "
# Message of C++ when it ends a process, or of an exception of torch or Horovod, with messages of
# gloo, NCCL and Horovod about other ranks.
_ABORTED = re.compile(
    rb"(what\(\):|^[\w.]+: .*(gloo|NCCL|c10d|TCPStore)|HorovodInternalError:).*"
    rb"(Connection (was likely )?(closed|reset)|Broken pipe|[Tt]imed out|EnforceNotMet"
    rb"|remote process|shut down)"
)
# First lines of a traceback; that of a SyntaxError in a script has no title.
_BEGINS = (TRACEBACK.encode(), b'  File "')
_LABEL_OF_TORCH = re.compile(rb"^\[rank\d+\]: ")
_LONGEST_TRACEBACK = 1000
_HELD_SECONDS = 1.0
# A traceback after one of these lines belongs to the traceback before it.
_CHAINED = (
    b"During handling of the above exception",
    b"The above exception was the direct cause",
    b"Exception ignored",
)


def announce(text: str) -> None:
    """Write a message of the launcher to standard error, if it is open."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"hpctrain: {text}\n")
            sys.stderr.flush()


class Tail:
    """Last lines of a rank, and the time of its last error.

    Attributes:
        failed: time of its last traceback or error, in seconds of the monotonic clock; infinity
            without one.
        caused_by_other_rank: whether a library has aborted the process because another rank has
            ended or does something else.
    """

    def __init__(self) -> None:
        self.failed = float("inf")
        self.caused_by_other_rank = False
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._count = 0
        self._cause = 0
        self._previous = b""

    def add(self, line: bytes) -> None:
        """Add a line, and drop the oldest lines over the limit."""
        # torch puts the rank before each line of an error, if a process group was opened.
        line = _LABEL_OF_TORCH.sub(b"", line.rstrip(b"\r\n")[:_TAIL_LINE])
        begins = line.startswith(TRACEBACK.encode()) and not self._previous.startswith(_CHAINED)
        if begins or line.startswith(_ERROR):
            self.failed, self._cause = time.monotonic(), self._count
        self.caused_by_other_rank = self.caused_by_other_rank or _ABORTED.search(line) is not None
        self._previous = line or self._previous
        self._lines.append(line)
        self._count += 1
        self._size += len(line) + 1
        while self._size > _TAIL_BYTES:
            self._size -= len(self._lines.popleft()) + 1

    def text(self) -> str:
        """Return the lines from the last traceback on, and at least the last few lines."""
        lines = [line.decode(errors="replace") for line in self._lines]
        first = max(0, min(len(lines) - _FEW_LINES, self._cause - self._count + len(lines)))
        lines = lines[first:]
        if len(lines) > _MANY_LINES:
            left_out = f"… {len(lines) - _MANY_LINES} lines are left out here"
            lines = [*lines[:_FEW_LINES], left_out, *lines[_FEW_LINES - _MANY_LINES :]]
        return "\n".join(lines)


class _Sink:
    """Standard output or error of this process; in a notebook, it accepts only text."""

    def __init__(self, target: TextIO | None) -> None:
        self._target = target

    def write(self, data: bytes) -> None:
        """Write data, or drop it if the reader has ended; a rank with a full pipe would hang."""
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
        """Write without the buffer, so that waiting for a slow reader holds no lock."""
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
            except BlockingIOError:  # ssh and others may set a terminal to non-blocking
                select.select([], [descriptor], [])


@dataclass(slots=True)
class _Source:
    """Output stream of a rank.

    Attributes:
        held: traceback after which nothing has come yet. If the rank ends with it, it is left out
            if another rank has ended with the same one.
    """

    stream: IO[bytes]
    sink: _Sink
    label: bytes
    tail: Tail | None
    shows: Callable[[str], bool]
    rest: bytearray = field(default_factory=bytearray)
    held: list[bytes] = field(default_factory=list)

    def feed(self, data: bytes) -> None:
        """Forward the complete lines; without a label, forward all data at once."""
        if not self.label:
            self.sink.write(data)
        self.rest += data
        # A progress bar ends its lines with \r. A \r at the end of the data may be half of a \r\n.
        last = len(self.rest) - self.rest.endswith(b"\r")
        fresh = max(0, len(self.rest) - len(data) - 1)
        end = 1 + max(self.rest.rfind(b"\n", fresh), self.rest.rfind(b"\r", fresh, last))
        if end:
            self._forward(bytes(self.rest[:end]).splitlines(keepends=True))
            del self.rest[:end]
        if len(self.rest) > _LONGEST_LINE:
            self.end()

    def end(self, complete: bool = False) -> None:
        """Forward the rest as a line, so that another rank's output begins on a new line.

        Args:
            complete: whether the stream has ended.
        """
        if self.rest:
            self._forward([bytes(self.rest) + b"\n"])
            self.rest.clear()
        if self.held and complete and not self.shows(b"".join(self.held).decode(errors="replace")):
            self.held.clear()
        self.release()

    def release(self) -> None:
        """Forward what is held back."""
        if self.held:
            self.sink.write(b"".join(self.label + line for line in self.held))
            self.held.clear()

    def _forward(self, lines: list[bytes]) -> None:
        if self.tail is not None:
            for line in lines:
                self.tail.add(line)
        if not self.label:
            return
        if self.tail is not None:
            lines, self.held = _split([*self.held, *lines])
        if lines:
            self.sink.write(b"".join(self.label + line for line in lines))


def _split(lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the lines before a traceback with which they end, and those of the traceback."""
    before: list[bytes] = []
    held: list[bytes] = []
    for line in lines:
        if held and not _continues(held, line):
            before += held
            held = []
        (held if held or line.startswith(_BEGINS) else before).append(line)
    return before, held


def _continues(traceback: list[bytes], line: bytes) -> bool:
    """Check whether a line may belong to the traceback before it.

    Its lines are indented, except the first and the last one. With an empty line and a sentence,
    another one may follow.
    """
    if len(traceback) >= _LONGEST_TRACEBACK:
        return False
    if line.startswith((b" ", b"\n", *_BEGINS, *_CHAINED)):
        return True
    return traceback[-1].startswith((b" ", *_BEGINS))


class Streams(Protocol):
    """The output streams of a rank; the attributes are those of `rank_processes.Rank`."""

    number: int
    stdout: IO[bytes] | None
    stderr: IO[bytes]
    tail: Tail


class Output:
    """Thread that forwards the output of ranks until all their streams have ended.

    Args:
        ranks: ranks to read from.
        labelled: whether each line begins with the rank; otherwise data are forwarded unchanged.
        done: function called in that thread when all output has been forwarded.
        shows: returns whether a traceback is to be shown with which a rank has ended; not called
            for unchanged data.
    """

    def __init__(
        self,
        ranks: Iterable[Streams],
        labelled: bool,
        done: Callable[[], None],
        shows: Callable[[str], bool],
    ) -> None:
        self._done = done
        self._selector = selectors.DefaultSelector()
        self._stop, self._wake = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ)
        out, err = _Sink(sys.stdout), _Sink(sys.stderr)
        for rank in ranks:
            label = f"{rank.number}: ".encode() if labelled else b""
            for stream, sink, tail in (
                (rank.stdout, out, None),
                (rank.stderr, err, rank.tail),
            ):
                if stream is None:  # the rank writes to the terminal itself
                    continue
                source = _Source(stream, sink, label, tail, shows)
                self._selector.register(stream, selectors.EVENT_READ, source)
        threading.Thread(target=self._copy, name="hpctrain output", daemon=True).start()

    def stop(self) -> None:
        """Forward the output that is there, and wait for no more."""
        os.close(self._wake)

    def _copy(self) -> None:
        try:
            while len(self._selector.get_map()) > 1:
                sources = [key.data for key in self._selector.get_map().values() if key.data]
                held = any(source.held for source in sources)
                events = self._selector.select(_HELD_SECONDS if held else None)
                ready = [key.data for key, _ in events if key.data]
                for source in ready:
                    self._read(source)
                if not events:
                    for source in sources:
                        source.release()
                elif not ready:
                    break  # `stop` was called, and no more data are there
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
            source.end(complete=True)
            self._selector.unregister(source.stream)
            source.stream.close()
