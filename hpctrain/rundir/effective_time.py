"""Effective training time: where each second of a run's wall time went.

Rank 0 and `hpctrain run` append marks to events.jsonl. A mark has `time` (Unix seconds) and
`event`, and begins what takes the time until the next one:

launched    ranks are being started; `again`: by the same launcher, after a failure. `time` is then
            that of the first attempt, and counts as that of the mark before
rendezvous  the ranks look for each other, then the backend connects them
connected   the ranks are connected, and load
restored    the run is open at `step`; later steps are taken again
training    the first step has begun
saved       a checkpoint of `step` was taken; training continues
last step   the newest sign of a start that failed
noticed     the failure was noticed, and the ranks are ended
stopped     the run has stopped, and the ranks end
ended       all ranks have ended
done        the run is done: what follows does not count

About once a second rank 0 overwrites last-step.json, which also has the steps of the whole run
(`end`) and the estimated seconds to its end (`left`). If rank 0 is killed, its content becomes the
mark of the last step.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpctrain.cluster import env_vars, system
from hpctrain.errors import exit_codes
from hpctrain.rundir import RunDirectory, append

__all__ = ["EffectiveTime", "Recorder", "account", "measure", "note_attempt"]

_TRAINING = "training"
# What takes the time after a mark; nothing that counts after the last one.
_CURRENT = {
    "launched": "start",
    "rendezvous": "rendezvous",
    "connected": "load",
    "training": _TRAINING,
    "last step": "detect",
    "noticed": "stop",
    "stopped": "stop",
    "ended": "start",
    "done": "",
}
_REASONS = ("detect", "stop", "start", "rendezvous", "load", "redo", "queue")
_BYTES_OF_A_SIGN = 120
_LEAST_SHOWN = 0.05
_LATEST = 2.0**35  # of a time that is no damage of the file


@dataclass(frozen=True, slots=True)
class EffectiveTime:
    """Wall time of a run, and where it went.

    Attributes:
        wall_seconds: seconds from the first start to the newest mark.
        effective_seconds: seconds in steps that are in the state of the run, with the evaluations,
            logs and saves between them.
        lost_seconds: the other seconds: detect, stop, start, rendezvous, load, redo and queue.
    """

    wall_seconds: float
    effective_seconds: float
    lost_seconds: Mapping[str, float]

    @property
    def share(self) -> float:
        """Effective part of the wall time, 0 to 1; 0 before the first second."""
        return self.effective_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def lost(self) -> str:
        """Lost seconds by reason, the most first; empty if nothing was lost."""
        order = sorted(self.lost_seconds.items(), key=lambda one: -one[1])
        return ", ".join(f"{name} {took:.1f} s" for name, took in order if took >= _LEAST_SHOWN)

    @property
    def brief(self) -> str:
        """Share of the wall time, and what the rest was lost for, in one line."""
        lost = f"; lost: {self.lost}" if self.lost else ""
        return f"{self.share:.2f} of {self.wall_seconds:.0f} s{lost}"

    def __str__(self) -> str:
        return f"effective training time {self.brief}"

    def as_json(self) -> dict[str, Any]:
        """Return the entries of summary.json and of `hpctrain status --json`."""
        return {
            "wall_seconds": round(self.wall_seconds, 3),
            "effective_seconds": round(self.effective_seconds, 3),
            "effective_share": round(self.share, 4),
            "lost_seconds": {name: round(took, 3) for name, took in self.lost_seconds.items()},
        }


def account(marks: Iterable[Mapping[str, Any]]) -> EffectiveTime | None:
    """Return where the time of a run went; None without a mark of a start.

    A clock that jumps back takes no time: until it is at the newest mark again, nothing is counted.

    Args:
        marks: marks of a run, in the order of the file.
    """
    wall, now, current = 0.0, -math.inf, ""
    lost = dict.fromkeys(_REASONS, 0.0)
    trained: list[tuple[float, float]] = []
    saved: dict[Any, float] = {0: -math.inf}  # times of the checkpoints, by step
    newest: Any = 0
    date: Any
    event: Any
    for mark in marks:
        date, event, step = mark.get("time"), mark.get("event"), mark.get("step")
        known = isinstance(event, str) and isinstance(step, int | None)
        if not known or not isinstance(date, float) or not 0 <= date < _LATEST:
            continue
        if not current and event != "launched":
            continue  # after the end
        if event == "launched" and current and not mark.get("again"):
            current = "queue"
        before, now = now, max(now, date)
        if current == _TRAINING:
            trained.append((before, now))
        elif current:
            lost[current] += now - before
        wall += now - before if current else 0.0
        if event == "saved":
            newest = step
        if event in ("saved", "stopped", "done"):  # after its last save, an ended run took no step
            saved[newest] = now
        elif event == "restored":
            lost["redo"] += _cut(trained, saved.get(step, now))
        current = _CURRENT.get(event, current)
    if now == -math.inf:
        return None
    return EffectiveTime(wall, sum(end - begin for begin, end in trained), lost)


def _cut(trained: list[tuple[float, float]], date: float) -> float:
    """Remove what was trained after a checkpoint, and return its seconds."""
    seconds = 0.0
    while trained and trained[-1][1] > date:
        begin, end = trained.pop()
        if begin < date:
            trained.append((begin, date))
        seconds += end - max(begin, date)
    return seconds


def measure(directory: RunDirectory) -> EffectiveTime | None:
    """Return where the time of a run went; None for a run without marks.

    Raises:
        OSError: the run directory cannot be read.
    """
    marks = directory.lines(directory.events)
    return account([*marks, *directory.lines(directory.last_step)]) if marks else None


def note_attempt(directory: RunDirectory, launched: float, noticed: float | None) -> None:
    """Record the end of an attempt; called by `hpctrain run` when all ranks have ended.

    Args:
        directory: run directory.
        launched: time at which `hpctrain run` has begun.
        noticed: time at which the first failure was noticed; None without one.
    """
    with contextlib.suppress(OSError):  # the run goes on without this record
        marks = directory.lines(directory.events)
        if not marks:
            return
        first = _mark("launched", launched)
        # Rank 0 has noted it, unless the first attempt has failed before that.
        noted = any(mark.get("time", 0) >= first["time"] for mark in marks)
        failed = [] if noticed is None else [_mark("noticed", noticed)]
        _append(directory, *([] if noted else [first]), *failed, _mark("ended"))


class Recorder:
    """Recorder of the marks of one start, at rank 0. Its notes cost microseconds and never fail.

    Args:
        directory: run directory.
        env: environment, with the time at which `hpctrain run` has begun.
        opened: times at which the rendezvous began, and at which the ranks were connected.
        again: whether the same launcher has started the ranks before.
        step: step at which this start continues.

    Raises:
        OSError: the run directory cannot be written.
    """

    _left: ClassVar[float] = 0.0  # when this process left an earlier run

    def __init__(
        self,
        directory: RunDirectory,
        env: Mapping[str, str],
        opened: tuple[float, float],
        again: bool,
        step: int,
    ) -> None:
        self._directory = directory
        launched = float(env.get(env_vars.LAUNCHED) or _process_start() or opened[0])
        _append(
            directory,
            _mark("launched", max(launched, self._left), again=again),
            _mark("rendezvous", opened[0]),
            _mark("connected", opened[1]),
            _mark("restored", step=step),
        )
        self._file = os.open(directory.last_step, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def trained(self, seconds: float) -> None:
        """Record that the first step is done, which took some seconds."""
        self._note(_mark(_TRAINING, time.time() - seconds))

    def step(self, step: int, end: int | None, left: float | None) -> None:
        """Record the newest step; called about once a second.

        Args:
            step: newest step.
            end: steps of the whole run; None if unknown.
            left: estimated seconds to its end; None if unknown.
        """
        more = {"end": end, "left": None if left is None else round(left, 1)}
        line = json.dumps(_mark("last step", step=step, **more)).ljust(_BYTES_OF_A_SIGN)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, line.encode(), 0)

    def saved(self, step: int) -> None:
        """Record that a checkpoint of a step was taken."""
        self._note(_mark("saved", step=step))

    def leave(self, code: int, date: float) -> None:
        """Record that rank 0 has left the run.

        Args:
            code: exit code of `exit_codes`.
            date: time at which it has left the loop.
        """
        failed = code not in (exit_codes.DONE, exit_codes.STOPPED)
        with contextlib.suppress(OSError):
            if not failed:
                self._directory.last_step.unlink(missing_ok=True)
            _append(self._directory, _mark("noticed" if failed else exit_codes.STATUS[code], date))

    def close(self) -> None:
        """Close the file of the last step."""
        os.close(self._file)
        type(self)._left = time.time()

    def _note(self, mark: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            append(self._directory.events, json.dumps(mark))


def _process_start() -> float | None:
    """Return when this process was started to train; None for an interactive Python."""
    age = system.age(os.getpid())
    script = hasattr(sys.modules["__main__"], "__file__")
    return time.time() - age if script and age is not None else None


def _mark(event: str, date: float | None = None, **more: Any) -> dict[str, Any]:
    return {"time": round(time.time() if date is None else date, 3), "event": event, **more}


def _append(directory: RunDirectory, *marks: Mapping[str, Any]) -> None:
    """Append marks, after that of the last step if an earlier start has left one."""
    left = directory.lines(directory.last_step)
    append(directory.events, "\n".join(map(json.dumps, [*left, *marks])))
    directory.last_step.unlink(missing_ok=True)
