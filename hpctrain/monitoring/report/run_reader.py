"""What a run directory holds, as curves and facts; also that of a run that goes on or is broken."""

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError
from hpctrain.monitoring import drawing
from hpctrain.monitoring.report.step_times import Timings, gather, is_step
from hpctrain.rundir import RunDirectory

__all__ = ["Floats", "Run", "Series", "mapping", "read"]

Floats = NDArray[np.float64]

# Of JSON; looked up for every value of a file that may have millions.
_NUMBERS = frozenset((int, float))


@dataclass(slots=True)
class Series:
    """The values of one metric, in the order in which they were written.

    Attributes:
        steps, values: of equal length; a value may be no finite number.
    """

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add a value; a whole number that no float can hold is infinite."""
        self.steps.append(step)
        try:
            self.values.append(value)
        except OverflowError:
            self.values.append(float("inf"))

    def finite(self) -> tuple[Floats, Floats]:
        """Steps and values of what is a finite number."""
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        fine = np.isfinite(values)
        return steps[fine], values[fine]


@dataclass(slots=True)
class Run:
    """A run directory, read once.

    Attributes:
        path: the directory.
        label: a short name, unlike that of any other run of the report.
        identity: run.json.
        starts: the lines of starts.jsonl.
        summary: summary.json; empty where the run has not ended.
        series: the curves by name of metric, as first met.
        timings: what timings.jsonl says of steps and ranks.
        rows: lines of metrics.jsonl that have a step.
        last: `step`, `epoch` and `time` of the last of them.
        unread: why run.json or summary.json, by name, cannot be read; it is empty above then.
    """

    path: Path
    label: str
    identity: dict[str, Any]
    starts: list[dict[str, Any]]
    summary: dict[str, Any]
    series: dict[str, Series]
    timings: Timings
    rows: int
    last: dict[str, Any]
    unread: dict[str, UsageError]

    @property
    def end_unread(self) -> bool:
        """Whether a summary.json is there that cannot be read."""
        return RunDirectory(self.path).summary.name in self.unread

    @property
    def start(self) -> dict[str, Any]:
        """The last start; empty where there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def options(self) -> dict[str, Any]:
        """The options of the last start."""
        return mapping(self.start.get("options"))

    @property
    def world(self) -> dict[str, Any]:
        """Who trained at the last start, else at the first."""
        return mapping(self.start.get("world")) or mapping(self.identity.get("world"))

    @property
    def restarts(self) -> list[int]:
        """The steps at which starts but the first went on, rising, each once."""
        steps = (start.get("step") for start in self.starts[1:])
        return sorted({step for step in steps if is_step(step)})


def mapping(value: Any) -> dict[str, Any]:
    """A value of a file that should be an object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def read(paths: Sequence[str]) -> list[Run]:
    """Read run directories; one that is named twice is read once.

    Args:
        paths: as a person has typed them.

    Raises:
        UsageError: one is no directory of a run, or its rows cannot be read, or of none anything
            can be read.
    """
    given = list({os.path.realpath(path): Path(path) for path in paths}.values())
    for path in given:
        _refuse(path)
    runs = [_run(path, label) for path, label in zip(given, _labels(given), strict=True)]
    unread = [error for run in runs for error in run.unread.values()]
    if unread and not any(run.identity or run.starts or run.rows for run in runs):
        raise unread[0]
    return runs


def _refuse(path: Path) -> None:
    fix = "hpctrain status    names the runs below ./runs"
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise UsageError(f"there is no {path}", "a run directory", fix) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", "a run directory", fix) from None
    if RunDirectory(path).identity.name not in names:
        raise UsageError(f"no run is in {path}", "a folder with a run.json in it", fix)


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return [drawing.plain(label) for label in labels]
    return [drawing.plain(str(path)) for path in paths]


def _run(path: Path, label: str) -> Run:
    directory = RunDirectory(path)
    try:
        starts = directory.lines(directory.starts)
        series, rows, last = _curves(directory.each(directory.metrics))
        timings = gather(directory.each(directory.timings))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error}", "a run that this user may read", f"ls -l {path}"
        ) from None
    known: dict[Path, dict[str, Any]] = {}
    unread: dict[str, UsageError] = {}
    for one in (directory.identity, directory.summary):
        try:
            known[one] = directory.read(one) or {}
        except UsageError as error:
            known[one], unread[one.name] = {}, error
    return Run(
        path,
        label,
        known[directory.identity],
        starts,
        known[directory.summary],
        series,
        timings,
        rows,
        last,
        unread,
    )


def _curves(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Series], int, dict[str, Any]]:
    """The curves of metrics.jsonl, the number of rows, and where the last one stands."""
    series: dict[str, Series] = {}
    rows = 0
    last: Mapping[str, Any] = {}
    for row in lines:
        step = row.get("step")
        if not is_step(step):
            continue
        rows += 1
        last = row
        for name, value in row.items():
            if type(value) not in _NUMBERS or name in drawing.HEADS:
                continue
            one = series.get(name)
            if one is None:
                one = series[name] = Series()
            one.add(step, value)
    return series, rows, {name: last.get(name) for name in drawing.HEADS if name in last}
