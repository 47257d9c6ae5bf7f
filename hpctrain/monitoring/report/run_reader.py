"""Reader of run directories, as curves, times and facts; also of runs that go on or are damaged."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.monitoring.curves import Floats, History, collect
from hpctrain.monitoring.slow_ranks import slow_ranks
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.effective_time import EffectiveTime, measure
from hpctrain.rundir.used import edge

__all__ = ["RecordedRun", "StepTimes", "mapping", "quantile", "read", "times"]

_KINDS = ("data", "forward")


@dataclass(slots=True)
class StepTimes:
    """Sum of all intervals of a run.

    Attributes:
        buckets: number of rank 0's steps by bucket, over all starts.
        hosts: host of each rank, at the last start.
        means: seconds per step of waiting for data, and of the forward pass, by rank; over the last
            intervals with the same hosts. Shape (2, ranks).
        steps: number of steps in these means.
        slow: ranks that the others wait for, for each row of `means`.
    """

    buckets: Counter[int] = field(default_factory=Counter)
    hosts: list[str] = field(default_factory=list)
    means: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    steps: int = 0
    slow: tuple[list[int], list[int]] = ([], [])


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
        timings = times(directory.each(directory.timings))
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


def quantile(buckets: Mapping[int, int], share: float) -> float:
    """Return the seconds that a share of the steps does not exceed: the end of their bucket."""
    if not buckets:
        return math.nan
    ordered = sorted(buckets)
    counts = np.cumsum([buckets[bucket] for bucket in ordered])
    return edge(ordered[np.searchsorted(counts, share * counts[-1])] + 1)


def times(lines: Iterable[Mapping[str, Any]]) -> StepTimes:
    """Add up the lines of timings.jsonl; a line that is damaged is left out."""
    found = StepTimes()
    for line in lines:
        try:
            buckets = {int(bucket): int(count) for bucket, count in line["step_times"].items()}
            hosts, steps = line["hosts"], int(line["steps"])
            means = np.array([line[kind] for kind in _KINDS], dtype=float)
            means = means.reshape(len(_KINDS), len(hosts))  # ValueError for other ranks
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        found.buckets.update(buckets)
        if hosts != found.hosts:  # other ranks than before: restart the means
            found.hosts, found.steps, found.means = hosts, 0, np.zeros_like(means)
        total = found.steps + steps
        found.means = (found.means * found.steps + means * steps) / total
        found.steps = total
    if found.hosts:
        step = quantile(found.buckets, 0.5)
        data, forward = (slow_ranks(seconds.tolist(), step) for seconds in found.means)
        found.slow = data, forward
    return found
