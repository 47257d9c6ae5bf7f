"""Reader of run directories for the report, also of runs that still train or are damaged."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.rundir import POSITIONS, RunDirectory
from hpctrain.rundir.effective_time import measure
from hpctrain.rundir.used import edge

Floats = NDArray[np.float64]


@dataclass(slots=True)
class StepTimes:
    """Sum of all intervals of timings.jsonl.

    Attributes:
        buckets: number of rank 0's steps by bucket, over all launches.
        nodes: node of each rank in the last launch.
        means: seconds per step of waiting for data, and of the forward pass, by rank; over the last
            intervals with the same nodes. Shape (2, ranks).
        steps: number of steps in these means.
    """

    buckets: Counter[int] = field(default_factory=Counter)
    nodes: list[str] = field(default_factory=list)
    means: Floats = field(default_factory=lambda: np.zeros((2, 0)))
    steps: int = 0

    def quantile(self, share: float) -> float:
        """Return the seconds that a share of the steps does not exceed: the end of a bucket."""
        ordered = sorted(self.buckets)
        counts = np.cumsum([self.buckets[bucket] for bucket in ordered])
        return edge(ordered[np.searchsorted(counts, share * counts[-1])] + 1)


class RecordedRun:
    """Content of a run directory, read once.

    Args:
        path: run directory.
        label: name of the run on the page.

    Attributes:
        path, label: the arguments.
        identity: content of run.json.
        summary: content of summary.json; empty if the run has not ended.
        effective: where the time of the run went; None if that is not recorded.
        timings: times of steps and ranks.
        series: steps and values of each metric; a value may be nan or infinite.
        odd: names of metrics with values that are not finite.
        last: last value of each metric, and last step, epoch and time.
        launches: lines of starts.jsonl.
        launch: last launch; empty if there is none.
        world: world of the last launch; without one, the world in run.json.
        restarts: steps at which later launches continued.

    Raises:
        UsageError: the path has no run, or one of its files cannot be read.
    """

    def __init__(self, path: str, label: str) -> None:
        self.path, self.label, directory = path, label, RunDirectory(path)
        try:
            self.identity = directory.read(directory.identity)
            if self.identity is None:
                raise directory.missing()
            self.summary: dict[str, Any] = directory.read(directory.summary) or {}
            self.launches = directory.lines(directory.starts)
            columns = directory.columns()
            self.timings = times(directory.each(directory.timings))
            self.effective = measure(directory)
        except OSError as error:
            raise UsageError("HT656.cannot-read", path=path, error=error) from None
        self.last = {name: values[-1] for name, (_, values) in columns.items()}
        self.series = {
            name: (np.array(steps, dtype=float), np.array(values, dtype=float))
            for name, (steps, values) in columns.items()
            if name not in POSITIONS
        }
        self.odd = [name for name, (_, v) in self.series.items() if not np.isfinite(v).all()]
        self.launch: dict[str, Any] = self.launches[-1] if self.launches else {}
        self.world = mapping(self.launch.get("world")) or mapping(self.identity.get("world"))
        steps = (launch.get("step") for launch in self.launches[1:])
        self.restarts = sorted({step for step in steps if type(step) is int})


def read(paths: Sequence[str]) -> list[RecordedRun]:
    """Read run directories and the named runs in them, each once.

    Each is labelled with its path below the folder that all have in common.

    Raises:
        UsageError: a path has no run, or one of its files cannot be read.
    """
    unique = {
        os.path.realpath(run.path): str(run.path)
        for path in map(RunDirectory, paths)
        for run in path.runs() or [path]
    }
    top = os.path.commonpath([os.path.dirname(path) for path in unique])
    return [RecordedRun(unique[real], printable(os.path.relpath(real, top))) for real in unique]


def mapping(value: Any) -> dict[str, Any]:
    """Return a value if it is a dict, otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def times(lines: Iterable[Mapping[str, Any]]) -> StepTimes:
    """Add up the lines of timings.jsonl; damaged lines are omitted."""
    total = StepTimes()
    for line in lines:
        try:
            buckets = {int(bucket): int(count) for bucket, count in line["step_times"].items()}
            nodes, steps = line["hosts"], max(int(line["steps"]), 1)
            means = np.array([line["data"], line["forward"]], dtype=float)
            means = means.reshape(2, len(nodes))  # ValueError for other ranks
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        total.buckets.update(buckets)
        if nodes != total.nodes:  # other ranks than before: restart the means
            total.nodes, total.steps, total.means = nodes, 0, np.zeros_like(means)
        total.steps += steps
        total.means += (means - total.means) * steps / total.steps
    return total
