"""Tables of a run: results, system, options, starts and ranks."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.monitoring.report import wording
from hpctrain.monitoring.report.run_reader import RecordedRun, Series, mapping
from hpctrain.monitoring.report.step_times import is_step

__all__ = ["Table", "metrics", "options", "ranks", "starts", "summary", "system"]

_MOST_STARTS = 100
_MOST_RANKS = 16
_MOST_METRICS = 200
_MOST_HOSTS = 8
_COMMIT = 10  # characters of a commit that are shown


@dataclass(frozen=True, slots=True)
class Table:
    """Content of a table; the first cell of a row is its head.

    Attributes:
        caption: text above the table.
        heads: heads of the columns.
        rows: rows of cells, with one cell per head.
        marked: numbers of the rows in which the runs differ, from 0.
        note: text below the table, or empty.
    """

    caption: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    marked: frozenset[int] = field(default_factory=frozenset)
    note: str = ""


def summary(run: RecordedRun) -> dict[str, str]:
    """Return the main results of a run as short texts by name."""
    results = run.summary
    elapsed = _between(run.start.get("time"), run.last.get("time"))
    whole = _between(run.starts[0].get("time") if run.starts else None, run.last.get("time"))
    facts = {
        "status": status(run),
        "step": _count(results.get("step", run.last.get("step"))),
        "epoch": wording.text(results.get("epoch", run.last.get("epoch"))),
        "throughput": _speed(run),
        "training, last start": wording.duration(results.get("seconds", elapsed)),
        "first start to last row": wording.duration(whole),
        "starts": wording.number(len(run.starts)),
        "last row": wording.moment(run.last.get("time")),
    }
    if results.get("reason"):
        facts["reason"] = wording.text(results["reason"])
    return facts


def _count(value: Any) -> str:
    return wording.number(value) if is_step(value) else wording.text(value)


def status(run: RecordedRun) -> str:
    """Return how a run ended; a run without summary continues or was killed."""
    if run.end_unread:
        return "not known"
    found = run.summary.get("status")
    return wording.text(found) if isinstance(found, str) and found else "not ended"


def _between(begin: Any, end: Any) -> float | None:
    try:
        return max(float(end) - float(begin), 0.0)
    except (TypeError, ValueError, OverflowError):
        return None


def _speed(run: RecordedRun) -> str:
    speed = run.summary.get("samples_per_second")
    if speed is None and (series := run.series.get("samples_per_second")):
        speeds = series.finite()[1]
        speed = float(np.median(speeds)) if len(speeds) else None
    if not isinstance(speed, (int, float)) or not speed:
        return "–"
    return f"{wording.number(speed)} samples/s"


def metrics(run: RecordedRun) -> Table:
    """Return a table with the last, lowest and highest value of each metric."""
    rows = []
    for name, series in list(run.series.items())[:_MOST_METRICS]:
        low, high, finite = _extremes(series)
        rest = len(series.values) - finite
        rows.append(
            (
                wording.text(name),
                wording.number(series.values[-1]),
                low,
                high,
                wording.number(len(series.values)) + (f" ({rest:,} not finite)" if rest else ""),
            )
        )
    heads = ("metric", "last", "lowest", "highest", "values")
    more = len(run.series) - len(rows)
    return Table(
        "Metrics", heads, rows, note=f"{more:,} more metrics are not shown." if more else ""
    )


def _extremes(series: Series) -> tuple[str, str, int]:
    """Return the lowest and highest finite value with steps, and the number of finite values."""
    steps, values = series.finite()
    if not len(values):
        return "–", "–", 0
    low, high = (
        f"{wording.number(float(values[index]))} at step {int(steps[index]):,}"
        for index in (values.argmin(), values.argmax())
    )
    return low, high, len(values)


def system(run: RecordedRun) -> dict[str, str]:
    """Return facts about the system of a run, at its last start."""
    world, start, results = run.world, run.start, run.summary
    facts = {
        "ranks": wording.text(world.get("world_size")),
        "hosts": wording.text(world.get("num_nodes")),
        "names of hosts": _hosts(world),
        "launcher": wording.text(world.get("launcher")),
        "backend": wording.text(results.get("backend", run.options.get("backend"))),
        "precision": wording.text(results.get("precision", run.options.get("precision"))),
        "device": wording.text(start.get("device")),
        "job": wording.text(mapping(start.get("job")).get("job_id")),
        "commit": wording.text(start.get("commit")),
    }
    versions = mapping(start.get("versions"))
    return facts | {wording.text(name): wording.text(value) for name, value in versions.items()}


def options(run: RecordedRun) -> dict[str, str]:
    """Return the options of the last start by name, including the script's own options."""
    own = mapping(run.start.get("own_options"))
    return {wording.text(name): wording.text(value) for name, value in (run.options | own).items()}


def starts(run: RecordedRun) -> Table:
    """Return a table of the starts: time, place, settings, and changes since the start before."""
    rows = []
    before: Mapping[str, Any] | None = None
    for count, start in enumerate(run.starts, 1):
        now = mapping(start.get("options")) | mapping(start.get("own_options"))
        world, versions = mapping(start.get("world")), mapping(start.get("versions"))
        rows.append(
            (
                str(count),
                wording.moment(start.get("time")),
                wording.text(start.get("step")),
                wording.text(world.get("world_size")),
                _hosts(world),
                "–" if before is None else _changes(before, now),
                _command(start.get("command")),
                wording.text(world.get("launcher")),
                wording.text(mapping(start.get("job")).get("job_id")),
                wording.text(", ".join(f"{k} {wording.text(v)}" for k, v in versions.items())),
                wording.text(start.get("commit"))[:_COMMIT],
            )
        )
        before = now
    heads = (
        *("start", "when", "at step", "ranks", "hosts", "options changed since the last"),
        *("command", "launcher", "job", "versions", "commit"),
    )
    left = len(rows) - _MOST_STARTS
    note = f"The first {left:,} starts are not shown." if left > 0 else ""
    return Table("Starts", heads, rows[-_MOST_STARTS:], note=note)


def _hosts(world: Mapping[str, Any]) -> str:
    """Return the names of the hosts; of many hosts, only the first names."""
    hosts = world.get("hosts")
    named = [wording.text(host) for host in hosts] if isinstance(hosts, list) else []
    more = f" and {len(named) - _MOST_HOSTS} more" if len(named) > _MOST_HOSTS else ""
    return wording.text(", ".join(named[:_MOST_HOSTS]) + more)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    missing = object()
    changed = [
        f"{wording.text(name)}: {wording.text(before.get(name))} → {wording.text(now.get(name))}"
        for name in {**before, **now}
        if before.get(name, missing) != now.get(name, missing)
    ]
    return wording.text("; ".join(changed) or "none")


def _command(command: Any) -> str:
    """Return a command that the user can run again."""
    return wording.text(shlex.join(map(str, command)) if isinstance(command, list) else command)


def ranks(run: RecordedRun) -> Table | None:
    """Return a table of ranks: all if they are few, otherwise the slow ones; None if unknown."""
    all_ranks = run.timings.ranks
    if not all_ranks:
        return None
    few = len(all_ranks) <= _MOST_RANKS
    chosen = [
        (number, rank)
        for number, rank in enumerate(all_ranks)
        if few or rank.slow_data or rank.slow_forward
    ]
    rows = [
        (
            str(number),
            wording.text(rank.host),
            wording.duration(rank.data),
            wording.duration(rank.forward),
            " and ".join(
                ["data"] * rank.slow_data + ["forward"] * rank.slow_forward,
            )
            or "–",
        )
        for number, rank in chosen[:_MOST_STARTS]
    ]
    note = "" if few else f"Of {len(all_ranks):,} ranks, only slow ones are shown."
    heads = ("rank", "host", "waits for data", "forward", "slow by")
    return Table("Ranks: means of a step", heads, rows, note=note)
