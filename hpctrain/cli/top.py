"""`hpctrain top`: a live screen of your jobs, with keys to follow and to stop them."""

import argparse
import contextlib
import io
import math
import os
import re
import select
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from hpctrain import cli, rundir
from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError, exit_codes
from hpctrain.jobs import job_status, job_tables, run_progress
from hpctrain.jobs.job_status import JobStatus
from hpctrain.rundir import used

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add", "curve"]

_SECONDS_BETWEEN_QUERIES = 5.0
_SECONDS_FOR_A_KEY = 0.25
_CURVE = 12  # characters of a loss curve
_BLOCKS, _PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_HEADS = ("JOB", "NAME", "STATE", "USED", "LEFT", "STEP", "LOSS", "", "SAMPLES/S")
_KEYS = "↑ ↓ select   f follow its log   s stop   c cancel   r requeue   q quit"
_ACTIONS = {"s": "stop", "c": "cancel", "r": "requeue"}
_UP, _DOWN = ("\x1b[A", "k"), ("\x1b[B", "j")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Shows your jobs and the newest runs below ./runs, and refreshes them every few seconds: "
        f"state, step, loss with its curve, speed, and why a job waits. Keys: {_KEYS}. It asks "
        "before it stops, cancels or requeues a job. A stopped run saves first."
    )
    parser.set_defaults(command=_main)


@dataclass
class _Screen:
    """What is shown, and what the keys have changed.

    Attributes:
        statuses: jobs and runs, from the newest answer.
        note: why there is no newer answer, or what the last key has done.
        selected: number of the selected line.
        asked: key whose action waits for a yes; empty if there is none.
        curves: losses of the runs, by the name of their line.
        used: what the ranks of the runs have used lately, by the name of their line.
    """

    statuses: Sequence[JobStatus] = ()
    note: str = "asks Slurm …"
    selected: int = 0
    asked: str = ""
    curves: dict[str, list[float]] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)

    @property
    def job(self) -> JobStatus | None:
        """The selected job or run."""
        self.selected = max(0, min(self.selected, len(self.statuses) - 1))
        return self.statuses[self.selected] if self.statuses else None

    def key(self, key: str) -> str:
        """Take a key; return the action to do now: follow, stop, cancel, requeue, quit or none."""
        job, asked, self.asked = self.job, self.asked, ""
        if asked:
            self.note = "" if key == "y" else "nothing was changed"
            return _ACTIONS[asked] if key == "y" else ""
        if key in ("q", "\x03", "\x04"):
            return "quit"
        self.note = ""
        if key in _UP:
            self.selected -= 1
        elif key in _DOWN:
            self.selected += 1
        elif key == "f" and job is not None:
            return "follow"
        elif key in _ACTIONS and job is not None:
            self.asked, self.note = key, f"{_ACTIONS[key]} {_name(job)}? y or n"
        return ""

    def picture(self, width: int, height: int, blocks: str) -> "RenderableType":
        """Return the screen.

        Args:
            width, height: of the terminal, in characters.
            blocks: characters of a curve, from low to high.
        """
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bold")
        for head in _HEADS:
            table.add_column(
                head,
                justify="right" if head in job_tables.RIGHT else "left",
                no_wrap=True,
                overflow="ellipsis",
                ratio=1 if head == "NAME" else None,
            )
        details = [part for line in self._details() for part in wrap(line, width)]
        del details[max(0, height // 2 - 3) :]
        room = max(1, height - 4 - len(details))
        first = max(0, min(self.selected - room // 2, len(self.statuses) - room))
        for number, status in enumerate(self.statuses[first : first + room], first):
            style = "reverse" if number == self.selected else ""
            table.add_row(*map(Text, self._cells(status, blocks)), style=style)
        lines = [Text(line, no_wrap=True) for line in ("", *details)]
        foot = Text(self.note or _KEYS, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(table, *lines, foot)

    def _cells(self, status: JobStatus, blocks: str) -> list[str]:
        label, name, state, _, _, used, left, step, _, loss, speed, _ = job_tables.row_of(status)
        name = name or (job_tables.place(status.run_dir) if status.run_dir else "")
        losses = self.curves.get(_name(status), [])
        return [label, name, state, used, left, step, loss, curve(losses, blocks), speed]

    def _details(self) -> list[str]:
        if self.job is None:
            return ["you have no jobs in Slurm's list, and there are no runs below ./runs"]
        status = self.job
        *_, place = job_tables.row_of(status)
        hosts = status.queued.hosts if status.queued is not None else ""
        return [
            *([f"hosts: {printable(hosts)}"] if hosts else []),
            place,
            *([f"lately: {text}"] if (text := self.used.get(_name(status))) else []),
            *job_tables.details(status).splitlines(),
        ]


def curve(values: Sequence[float], blocks: str) -> str:
    """Return a curve of characters: each is the mean of equally many values, from low to high."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(_CURVE, len(finite))
    if not count:
        return ""
    edges = [len(finite) * number // count for number in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def _name(status: JobStatus) -> str:
    """Return the label of a job, or the run directory of a run without one."""
    return status.label or str(status.run_dir)


def _main(arguments: argparse.Namespace) -> int:
    del arguments
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "HT804", "hpctrain top without a terminal", "a terminal", "hpctrain status"
        )
    from rich.console import Console
    from rich.live import Live

    console, screen, ended = Console(), _Screen(), threading.Event()
    blocks = _BLOCKS if "utf" in console.encoding else _PLAIN
    threading.Thread(target=_refresh, args=(screen, ended), daemon=True).start()

    def picture() -> "RenderableType":
        return screen.picture(console.width, console.height, blocks)

    try:
        while True:
            with _keys(), Live(picture(), console=console, screen=True, auto_refresh=False) as live:
                action = ""
                while not action:
                    live.update(picture(), refresh=True)
                    action = next(filter(None, map(screen.key, _read_keys())), "")
            if action == "quit":
                return exit_codes.DONE
            if screen.job is not None:
                _do(action, screen)
    except KeyboardInterrupt:
        return exit_codes.DONE
    finally:
        ended.set()


def _do(action: str, screen: _Screen) -> None:
    """Do what a key asks for, and note the answer."""
    job = screen.job
    if job is None:
        return
    name = _name(job)
    if action == "follow":
        cli.main(["logs", "--follow", name])
        with contextlib.suppress(KeyboardInterrupt, EOFError):
            input("Enter goes back to the screen ")
        return
    if action == "stop":
        screen.note = _stop(job)
        return
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        cli.main([action, name])
    screen.note = " ".join(output.getvalue().split())


def _stop(job: JobStatus) -> str:
    """Ask a run to save and to stop; return what was done."""
    if job.run_dir is None or job.progress is None:
        return f"{_name(job)} has no run that could save; c cancels it"
    try:
        rundir.RunDirectory(job.run_dir).stop.touch()
    except OSError as error:
        return f"{_name(job)} cannot be stopped: {error}"
    return f"{_name(job)} saves and stops soon"


def _refresh(screen: _Screen, ended: threading.Event) -> None:
    """Query Slurm and read the runs, until the screen is closed."""
    while not ended.is_set():
        try:
            user_jobs = slurm.jobs(os.environ, uid=os.getuid())
            if screen.note.startswith("asks Slurm"):
                screen.note = ""
        except slurm.NoAnswerError as error:
            user_jobs = []
            screen.note = f"Slurm does not answer: {error}"
        statuses, _ = job_status.listed(user_jobs, os.environ)
        runs = [(_name(one), one.run_dir) for one in statuses if one.run_dir is not None]
        screen.curves = {name: run_progress.losses(path) for name, path in runs}
        screen.used = {name: _lately(path) for name, path in runs}
        screen.statuses = statuses
        ended.wait(_SECONDS_BETWEEN_QUERIES)


def _lately(run: Path) -> str:
    """Return what the ranks of a run have used lately, as one line; empty if it is not known."""
    recent = run_progress.recent_use(run)
    return "; ".join(f"{name} {text}" for name, text in used.lines(recent)) if recent else ""


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Let single keys be read, without their echo."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _read_keys() -> list[str]:
    """Return the keys that were pressed, after a moment at most; a closed terminal is a q.

    Keys that are typed fast arrive together, the more so over ssh.
    """
    if not select.select([sys.stdin], [], [], _SECONDS_FOR_A_KEY)[0]:
        return []
    try:
        text = os.read(sys.stdin.fileno(), 16).decode(errors="replace")
    except OSError:
        text = ""
    return re.findall(r"\x1b\[.|.", text or "q", re.DOTALL)
