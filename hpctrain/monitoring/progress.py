"""Progress of a run for the user: log lines, and a progress bar on a terminal."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hpctrain.process.logging import logger
from hpctrain.rundir import POSITIONS

__all__ = ["Bar", "Course", "Lines", "clock", "open_progress"]

# An evaluation of many minutes without a line looks like a hang.
_SECONDS_UNTIL_EVALUATION_LINE, _SECONDS_BETWEEN_EVALUATION_LINES = 10.0, 30.0
# Users cannot read faster updates.
_SECONDS_BETWEEN_LINES = 1.0
_SECONDS_BETWEEN_FRAMES = 0.5
_WIDTH_OF_BAR = 12  # leaves room for loss, rate and speed in 80 columns


class Course:
    """Position of a run in its epochs, and estimate of the remaining time.

    Attributes:
        step: steps done.
        epoch: current epoch, from 0.
        epochs: number of epochs; None if only a number of steps ends the run.
        length: steps per epoch; None if unknown.
        end: steps of the run; None if unknown.
        first: step at which the current epoch begins.
    """

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self.step = self.epoch = self.first = 0
        self.epochs: int | None = None
        self.length: int | None = None
        self.end = max_steps
        self._since: tuple[int, float] | None = None  # a step of this start and its time

    def begin(
        self, step: int, epoch: int, epoch_step: int, epochs: int | None, length: int | None
    ) -> None:
        """Record the beginning of an epoch's batches.

        Args:
            step: steps done.
            epoch: number of the epoch, from 0.
            epoch_step: steps of this epoch that are done.
            epochs, length: as in the class attributes.
        """
        self.step, self.epoch, self.epochs, self.length = step, epoch, epochs, length
        self.first = step - epoch_step
        ends = [] if self._max_steps is None else [self._max_steps]
        if epochs is not None and length is not None:
            ends.append(self.first + (epochs - epoch) * length)
        self.end = min(ends, default=None)

    def seconds_left(self, step: int) -> float | None:
        """Return the estimated seconds until the end of the run; None if unknown.

        The speed is the mean speed of this start since its first call.

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


def formatted_values(row: Mapping[str, Any], course: Course) -> list[str]:
    """Return the values of a row of metrics as texts for the user.

    Args:
        row: row as in metrics.jsonl.
        course: position of the run.
    """
    known = {
        "samples_per_second": lambda value: f"{value:,.0f} samples/s",
        "data_wait": lambda value: f"data wait {100 * value:.0f} %",
        "gpu_memory": lambda value: f"{value / 1e9:.1f} GB",
    }
    texts = [
        known[name](value) if name in known and math.isfinite(value) else f"{name} {value:.5g}"
        for name, value in row.items()
        if name not in POSITIONS
    ]
    left = course.seconds_left(row["step"]) if "samples_per_second" in row else None
    return texts if left is None else [*texts, f"to the end {clock(left)}"]


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds as text: 1:23:45."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Lines:
    """Progress as log lines of rows of metrics, at most one training row per second.

    Args:
        course: position of the run.
    """

    screen = True  # whether training lines go to the screen

    def __init__(self, course: Course) -> None:
        self.course = course
        self._next = self._next_of_evaluation = 0.0

    def row(self, row: Mapping[str, Any], training: bool) -> None:
        """Show a row of metrics."""
        now = time.monotonic()
        if training and now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LINES if training else self._next
        course = self.course
        epochs = "" if course.epochs is None else f"/{course.epochs}"
        steps = "" if course.end is None else f"/{course.end:,}"
        # A row behind the loop has the number of the epoch that would follow.
        epoch = min(row["epoch"] + 1, course.epochs or math.inf)
        where = f"epoch {epoch}{epochs}  step {row['step']:,}{steps}"
        text = "  ".join([where, *formatted_values(row, course)])
        logger.info("%s", text, extra={"screen": self.screen or not training})

    def step(self, step: int) -> None:
        """Record the end of a step."""

    def evaluates(self, number: int, count: int) -> None:
        """Show the progress of an evaluation, if it takes long.

        Args:
            number: number of the batch, from 0.
            count: number of batches.
        """
        now = time.monotonic()
        if number == 0:
            self._next_of_evaluation = now + _SECONDS_UNTIL_EVALUATION_LINE
        elif now >= self._next_of_evaluation:
            self._next_of_evaluation = now + _SECONDS_BETWEEN_EVALUATION_LINES
            logger.info("evaluation, batch %s of %s", f"{number:,}", f"{count:,}")

    def end_epoch(self, step: int) -> None:
        """Record the end of an epoch's batches, at this step."""

    def close(self) -> None:
        """Restore the screen."""


class Bar(Lines):
    """Progress bar at the bottom of a terminal for the current epoch; log lines go above it.

    The training loop draws it at most twice a second, without a thread. The cursor is never hidden,
    so that a process that dies leaves a usable terminal. If the terminal is closed first, the bar
    ends and only log lines follow.

    Args:
        course: position of the run.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, course: Course) -> None:
        super().__init__(course)
        from rich.console import Console
        from rich.live import Live

        class Plain(Console):
            """Console that keeps the cursor, and long lines such as a command to copy."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

            def print(self, *objects: Any, **options: Any) -> None:
                super().print(*objects, **{"soft_wrap": True, "markup": False, **options})

        self._values: list[str] = []
        self._evaluated = ""
        self._due = 0.0
        self._live = Live(
            console=Plain(file=sys.stderr, highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._terminal_closed = self.screen = False
        with self._drawing():
            self._live.start()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Wrap writes to the terminal; end the bar if the terminal was closed."""
        try:
            yield
        except OSError as error:
            self._terminal_closed = self.screen = True
            self._due = math.inf
            with suppress(OSError):  # restores the standard streams before it writes
                self._live.stop()
            logger.info("the progress bar ends, because the terminal was closed: %s", error)

    def row(self, row: Mapping[str, Any], training: bool) -> None:
        """Show a row of metrics."""
        super().row(row, training)
        if training:
            self._values = formatted_values(row, self.course)

    def step(self, step: int) -> None:
        """Record the end of a step."""
        if time.monotonic() >= self._due:
            self.course.step, self._evaluated = step, ""
            self._draw()

    def evaluates(self, number: int, count: int) -> None:
        """Draw the progress of an evaluation; see `Lines.evaluates`."""
        self._evaluated = f"{number + 1:,}/{count:,}"
        if time.monotonic() >= self._due:
            self._draw()

    def end_epoch(self, step: int) -> None:
        """Print the final line of an epoch, at this step."""
        self.course.step, self._evaluated = step, ""
        if self._terminal_closed:
            return
        with self._drawing():
            self._live.console.print(self._line(), soft_wrap=False)
            self._draw()

    def _draw(self) -> None:
        with self._drawing():
            self._live.update(self._line(), refresh=True)
            self._due = time.monotonic() + _SECONDS_BETWEEN_FRAMES

    def _line(self) -> Any:
        """Return the epoch, a bar over its steps, and the newest values."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        course = self.course
        epochs = "" if course.epochs is None else f"/{course.epochs}"
        done, length = course.step - course.first, course.length
        if course.end is not None:  # the run may end within an epoch
            length = min(length or course.end, course.end - course.first)
        steps = f"{done:,}" if length is None else f"{done:,}/{length:,}"
        values = [f"evaluation, batch {self._evaluated}"] if self._evaluated else self._values
        # The last column is cut off on a narrow terminal.
        columns = Column(no_wrap=True), Column(width=_WIDTH_OF_BAR), Column(no_wrap=True), Column()
        grid = Table.grid(*columns, padding=(0, 1))
        bar = ProgressBar(total=length or None, completed=done, finished_style="bar.complete")
        shown = Text("  ".join(values), no_wrap=True, overflow="ellipsis")
        grid.add_row(f"epoch {course.epoch + 1}{epochs}", bar, steps, shown)
        return grid

    def close(self) -> None:
        """Restore the screen."""
        with self._drawing():
            self._live.stop()  # no effect the second time


def open_progress(course: Course) -> Lines:
    """Return a progress bar if standard error is a terminal, else log lines.

    Args:
        course: position of the run.
    """
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        try:
            return Bar(course)
        except ImportError:
            logger.info("no progress bar, because rich is not installed: pip install rich")
    return Lines(course)
