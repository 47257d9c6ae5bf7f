"""Reader of run directories, as curves and facts; also for runs that continue or are damaged."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.monitoring.curves import History, collect
from hpctrain.monitoring.report import step_times
from hpctrain.monitoring.report.step_times import StepTimes
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.effective_time import EffectiveTime, measure

__all__ = ["RecordedRun", "mapping", "read"]


@dataclass(slots=True)
class RecordedRun(History):
    """Content of a run directory, read once.

    Attributes:
        path: run directory.
        identity: content of run.json.
        starts: lines of starts.jsonl.
        summary: content of summary.json; empty if the run has not ended.
        last: last row of metrics.
        timings: times of steps and ranks from timings.jsonl.
        effective: where the time of the run went; None if that is not recorded.
    """

    path: Path
    identity: dict[str, Any]
    starts: list[dict[str, Any]]
    summary: dict[str, Any]
    last: Mapping[str, Any]
    timings: StepTimes
    effective: EffectiveTime | None

    @property
    def start(self) -> dict[str, Any]:
        """The last start; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def world(self) -> dict[str, Any]:
        """World of the last start; without one, that in run.json."""
        return mapping(self.start.get("world")) or mapping(self.identity.get("world"))


def mapping(value: Any) -> dict[str, Any]:
    """Return a value if it is a dict, otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def read(paths: Sequence[str]) -> list[RecordedRun]:
    """Read run directories; a directory that is named twice is read once.

    Args:
        paths: paths as the user typed them.

    Raises:
        UsageError: a path is no run directory, or one of its files cannot be read.
    """
    given = list({os.path.realpath(path): Path(path) for path in paths}.values())
    return [_run(path, label) for path, label in zip(given, _labels(given), strict=True)]


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for length in range(1, max(map(len, parts))):
        labels = [printable("/".join(part[-length:])) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [printable(path) for path in paths]


def _run(path: Path, label: str) -> RecordedRun:
    directory = RunDirectory(path)
    try:
        identity = directory.read(directory.identity)
        if identity is None:
            raise UsageError(
                "HT655",
                f"no run is in {path}",
                "a folder with a run.json in it",
                "hpctrain status, which lists the runs below ./runs",
            )
        summary = directory.read(directory.summary) or {}
        starts = directory.lines(directory.starts)
        series, last = collect(directory.each(directory.metrics))
        timings = step_times.gather(directory.each(directory.timings))
        effective = measure(directory)
    except OSError as error:
        raise UsageError(
            "HT656",
            f"{path} cannot be read: {error}",
            "a run that this user may read",
            f"ls -l {path}",
        ) from None
    steps = (start.get("step") for start in starts[1:])
    restarts = sorted({step for step in steps if type(step) is int})
    return RecordedRun(
        *(label, series, restarts, path, identity, starts, summary, last, timings, effective)
    )
