"""How far a run is, for people: lines of the log, and on a terminal one that moves."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hpctrain.process.logging import logger

__all__ = ["Bar", "Course", "Lines", "open_progress"]

# People cannot read more.
_SECONDS_BETWEEN_LINES = 1.0
_SECONDS_BETWEEN_FRAMES = 0.5
_WIDTH_OF_BAR = 24


class Course:
    """Where in its epochs a run is, and how long the rest will take.

    Attributes:
        step: steps done.
        epoch: under way, from 0.
        epochs: how many there are; None where only a number of steps ends the run.
        length: steps of an epoch; None where nobody knows.
        end: steps of the run; None where nobody knows.
        first: step at which the epoch begins.
    """

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self.step = self.epoch = self.first = 0
        self.epochs: int | None = None
        self.length: int | None = None
        self.end = max_steps
        self._since: tuple[int, float] | None = None  # a step of this start, and when it was

    def begin(
        self, step: int, epoch: int, epoch_step: int, epochs: int | None, length: int | None
    ) -> None:
        """The batches of an epoch begin.

        Args:
            step: steps done.
            epoch: from 0.
            epoch_step: steps of it that are done.
            epochs, length: as above.
        """
        self.step, self.epoch, self.epochs, self.length = step, epoch, epochs, length
        self.first = step - epoch_step
        ends = [] if self._max_steps is None else [self._max_steps]
        if epochs is not None and length is not None:
            ends.append(self.first + (epochs - epoch) * length)
        self.end = min(ends, default=None)

    def seconds_left(self, step: int) -> float | None:
        """Until the end of the run, as fast as this start has been after its first row.

        Args:
            step: steps done.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = step, now
        before, then = self._since
        if self.end is None or step <= before:
            return None
        return max(0, self.end - step) * (now - then) / (step - before)


def said(row: Mapping[str, Any], course: Course) -> list[str]:
    """The values of a row of metrics, as people write them.

    Args:
        row: as in metrics.jsonl.
        course: of the run.
    """
    known = {
        "samples_per_second": lambda value: f"{value:,.0f} images/s",
        "data_wait": lambda value: f"data wait {100 * value:.0f} %",
        "gpu_memory": lambda value: f"{value / 1e9:.1f} GB",
    }
    words = [
        known[name](value) if name in known and math.isfinite(value) else f"{name} {value:.5g}"
        for name, value in row.items()
        if name not in ("step", "epoch", "time")
    ]
    left = course.seconds_left(row["step"]) if "samples_per_second" in row else None
    return words if left is None else [*words, f"to the end {clock(left)}"]


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:23:45."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Lines:
    """Rows of metrics as lines of the log, of those of training at most one a second.

    Args:
        course: of the run.
    """

    screen = True  # whether the lines of training are for it

    def __init__(self, course: Course) -> None:
        self.course = course
        self._next = 0.0

    def row(self, row: Mapping[str, Any], training: bool) -> None:
        """A row of metrics is written."""
        now = time.monotonic()
        if training and now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LINES if training else self._next
        course = self.course
        epochs = "" if course.epochs is None else f"/{course.epochs}"
        steps = "" if course.end is None else f"/{course.end:,}"
        where = f"epoch {row['epoch'] + 1}{epochs}  step {row['step']:,}{steps}"
        text = "  ".join([where, *said(row, course)])
        logger.info("%s", text, extra={"screen": self.screen or not training})

    def step(self, step: int) -> None:
        """A step is done."""

    def evaluates(self) -> None:
        """A batch of an evaluation comes."""

    def end_epoch(self, step: int) -> None:
        """The batches of an epoch are at their end, at this step."""

    def close(self) -> None:
        """Leave the screen as it was."""


class Bar(Lines):
    """A line at the bottom of a terminal that shows the epoch under way; lines go above it.

    It is drawn by the loop itself, a few times a second: there is no thread. The cursor is never
    hidden, so a process that dies leaves a terminal that works. A terminal that dies first takes
    the bar with it, and what follows is lines.

    Args:
        course: of the run.

    Raises:
        ImportError: rich is not there.
    """

    def __init__(self, course: Course) -> None:
        super().__init__(course)
        from rich.console import Console
        from rich.live import Live

        class Plain(Console):
            """Leaves the cursor, and long lines, such as a command to copy, as they are."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

            def print(self, *objects: Any, **options: Any) -> None:
                super().print(*objects, **{"soft_wrap": True, "markup": False, **options})

        self._values: list[str] = []
        self._evaluated = 0
        self._due = 0.0
        self._live = Live(
            console=Plain(file=sys.stderr, highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._gone = self.screen = False
        with self._drawing():
            self._live.start()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Around all that writes to the terminal."""
        try:
            yield
        except OSError as error:
            self._gone = self.screen = True
            self._due = math.inf
            with suppress(OSError):  # gives back the standard streams before it writes
                self._live.stop()
            logger.info("no progress bar any more, as the terminal has gone: %s", error)

    def row(self, row: Mapping[str, Any], training: bool) -> None:
        """A row of metrics is written."""
        super().row(row, training)
        if training:
            self._values = said(row, self.course)

    def step(self, step: int) -> None:
        """A step is done."""
        now = time.monotonic()
        if now >= self._due:
            self.course.step, self._evaluated = step, 0
            self._draw(now)

    def evaluates(self) -> None:
        """A batch of an evaluation comes."""
        self._evaluated += 1
        now = time.monotonic()
        if now >= self._due:
            self._draw(now)

    def end_epoch(self, step: int) -> None:
        """The batches of an epoch are at their end, at this step: its line stays."""
        self.course.step, self._evaluated = step, 0
        if self._gone:
            return
        with self._drawing():
            self._live.console.print(self._line(), soft_wrap=False)
            self._draw(time.monotonic())

    def _draw(self, now: float) -> None:
        with self._drawing():
            self._live.update(self._line(), refresh=True)
            self._due = now + _SECONDS_BETWEEN_FRAMES

    def _line(self) -> Any:
        """The epoch, a bar over its steps, and the newest values."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        course = self.course
        epochs = "" if course.epochs is None else f"/{course.epochs}"
        done, length = course.step - course.first, course.length
        if course.end is not None:  # in the middle of an epoch, perhaps
            length = min(length or course.end, course.end - course.first)
        steps = f"{done:,}" if length is None else f"{done:,}/{length:,}"
        values = [f"evaluation, batch {self._evaluated:,}"] if self._evaluated else self._values
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(width=_WIDTH_OF_BAR)
        grid.add_column(no_wrap=True)
        grid.add_column()  # the one that is cut off where the terminal is narrow
        bar = ProgressBar(
            total=length or 1,
            completed=done if length else 0,
            pulse=not length,
            finished_style="bar.complete",
        )
        shown = Text("  ".join(values), no_wrap=True, overflow="ellipsis")
        grid.add_row(f"epoch {course.epoch + 1}{epochs}", bar, steps, shown)
        return grid

    def close(self) -> None:
        """Leave the screen as it was."""
        with self._drawing():
            self._live.stop()  # nothing, the second time


def open_progress(course: Course) -> Lines:
    """What suits where the words of this process go: a bar on a terminal, else lines.

    Args:
        course: of the run.
    """
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        try:
            return Bar(course)
        except ImportError:
            logger.info("no progress bar, as rich is not installed: pip install rich")
    return Lines(course)
