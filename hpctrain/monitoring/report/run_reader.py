"""Reader of run directories, as curves and facts; also for runs that continue or are damaged."""

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.monitoring import drawing
from hpctrain.monitoring.report.step_times import TimingsSummary, gather, is_step
from hpctrain.rundir import RunDirectory

__all__ = ["Floats", "RecordedRun", "Series", "mapping", "read"]

Floats = NDArray[np.float64]

# Number types of JSON; a set for fast checks, because a file may have millions of values.
_NUMBERS = frozenset((int, float))


@dataclass(slots=True)
class Series:
    """Values of one metric, in the order of the file.

    Attributes:
        steps, values: steps and values, of equal length; a value may be nan or infinite.
    """

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add a value; an integer too large for a float becomes infinite."""
        self.steps.append(step)
        try:
            self.values.append(value)
        except OverflowError:
            self.values.append(float("inf"))

    def finite(self) -> tuple[Floats, Floats]:
        """Return steps and values of the finite values."""
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        fine = np.isfinite(values)
        return steps[fine], values[fine]


@dataclass(slots=True)
class RecordedRun:
    """Content of a run directory, read once.

    Attributes:
        path: run directory.
        label: short name, unique among the runs of the report.
        identity: content of run.json.
        starts: lines of starts.jsonl.
        summary: content of summary.json; empty if the run has not ended.
        series: curves by name of metric, in order of first appearance.
        timings: times of steps and ranks from timings.jsonl.
        rows: number of lines of metrics.jsonl that have a step.
        last: `step`, `epoch` and `time` of the last of these lines.
        unread: errors of run.json and summary.json by file name; the content of such a file is
            empty above.
    """

    path: Path
    label: str
    identity: dict[str, Any]
    starts: list[dict[str, Any]]
    summary: dict[str, Any]
    series: dict[str, Series]
    timings: TimingsSummary
    rows: int
    last: dict[str, Any]
    unread: dict[str, UsageError]

    @property
    def end_unread(self) -> bool:
        """Whether summary.json exists but cannot be read."""
        return RunDirectory(self.path).summary.name in self.unread

    @property
    def start(self) -> dict[str, Any]:
        """The last start; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def options(self) -> dict[str, Any]:
        """The options of the last start."""
        return mapping(self.start.get("options"))

    @property
    def world(self) -> dict[str, Any]:
        """World of the last start; without one, that in run.json."""
        return mapping(self.start.get("world")) or mapping(self.identity.get("world"))

    @property
    def restarts(self) -> list[int]:
        """Steps at which later starts continued, in ascending order, each once."""
        steps = (start.get("step") for start in self.starts[1:])
        return sorted({step for step in steps if is_step(step)})


def mapping(value: Any) -> dict[str, Any]:
    """Return a value if it is a dict, otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def read(paths: Sequence[str]) -> list[RecordedRun]:
    """Read run directories; a directory that is named twice is read once.

    Args:
        paths: paths as the user typed them.

    Raises:
        UsageError: a path is no run directory, its rows cannot be read, or no run has readable
            content.
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
    fix = "hpctrain status, which lists the runs below ./runs"
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise UsageError("HT655", f"there is no {path}", "a run directory", fix) from None
    except OSError as error:
        raise UsageError(
            "HT656", f"{path} cannot be read: {error}", "a run directory", fix
        ) from None
    if RunDirectory(path).identity.name not in names:
        raise UsageError("HT655", f"no run is in {path}", "a folder with a run.json in it", fix)


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return [printable(label) for label in labels]
    return [printable(path) for path in paths]


def _run(path: Path, label: str) -> RecordedRun:
    directory = RunDirectory(path)
    try:
        starts = directory.lines(directory.starts)
        series, rows, last = _curves(directory.each(directory.metrics))
        timings = gather(directory.each(directory.timings))
    except OSError as error:
        raise UsageError(
            "HT656",
            f"{path} cannot be read: {error}",
            "a run that this user may read",
            f"ls -l {path}",
        ) from None
    content: dict[Path, dict[str, Any]] = {}
    unread: dict[str, UsageError] = {}
    for file in (directory.identity, directory.summary):
        try:
            content[file] = directory.read(file) or {}
        except UsageError as error:
            content[file], unread[file.name] = {}, error
    return RecordedRun(
        path,
        label,
        content[directory.identity],
        starts,
        content[directory.summary],
        series,
        timings,
        rows,
        last,
        unread,
    )


def _curves(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Series], int, dict[str, Any]]:
    """Return the curves of metrics.jsonl, the number of rows, and the last row's position."""
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
            curve = series.get(name)
            if curve is None:
                curve = series[name] = Series()
            curve.add(step, value)
    return series, rows, {name: last.get(name) for name in drawing.HEADS if name in last}
