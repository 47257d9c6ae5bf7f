"""Tables about runs: results, metrics, systems, options and starts; and what differs."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.monitoring.curves import Series
from hpctrain.monitoring.drawing import is_number
from hpctrain.monitoring.report import wording
from hpctrain.monitoring.report.run_reader import RecordedRun, mapping
from hpctrain.monitoring.report.wording import NOTHING, text

__all__ = ["Table", "metrics", "options", "side_by_side", "starts", "summary", "system"]

_MOST_HOSTS = 8
_BEST = ("top1", "top5")  # higher is better


@dataclass(frozen=True, slots=True)
class Table:
    """Content of a table; the first cell of a row is its head.

    Attributes:
        caption: text above the table.
        heads: heads of the columns.
        rows: rows of cells, with one cell per head.
        note: text below the table, or empty.
        differing: number of rows at the top in which the runs differ.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    differing: int = 0


def side_by_side(
    caption: str,
    runs: Sequence[RecordedRun],
    facts: Callable[[RecordedRun], Mapping[str, str]],
    sort: bool = True,
) -> Table:
    """Return facts of runs by name, with a column for each run.

    Args:
        caption: text above the table.
        runs: runs of the report.
        facts: function that returns the facts of a run.
        sort: whether the rows in which the runs differ come first, and are marked.
    """
    columns = [facts(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, NOTHING) for column in columns)) for name in names]
    heads = ("", *(run.label for run in runs))
    if not sort or len(runs) == 1:
        return Table(caption, heads, rows)
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    differing = sum(len(set(row[1:])) > 1 for row in rows)
    note = "≠ and bold: the runs differ." if differing else "The runs do not differ."
    return Table(caption, heads, rows, note, differing)


def summary(run: RecordedRun) -> dict[str, str]:
    """Return the main results of a run."""
    results, last = run.summary, run.last.get("time")
    facts = {"status": text(results.get("status", "not ended"))}
    for name in _BEST:
        if name in run.series and len(values := run.series[name].finite()[1]):
            facts[f"best {name}"] = wording.number(float(values.max()))
    facts |= {
        "step": wording.number(results.get("step", run.last.get("step"))),
        "epoch": text(results.get("epoch", run.last.get("epoch"))),
        "throughput": _speed(run),
        "training, last start": wording.duration(
            results.get("seconds", _between(run.start.get("time"), last))
        ),
        "first start to last row": wording.duration(
            _between(run.starts[0].get("time") if run.starts else None, last)
        ),
        "starts": wording.number(len(run.starts)),
        "last row": wording.moment(last),
    }
    if (effective := run.effective) is not None:
        wall = wording.duration(effective.wall_seconds)
        facts["effective training time"] = f"{effective.share:.2f} of {wall}"
        facts["lost"] = effective.lost or NOTHING
    return facts | ({"reason": text(results["reason"])} if results.get("reason") else {})


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
    return f"{wording.number(speed)} samples/s" if is_number(speed) and speed else NOTHING


def metrics(runs: Sequence[RecordedRun]) -> Table:
    """Return a table of the last, lowest and highest value of each metric, by run."""
    several = len(runs) > 1
    names = dict.fromkeys(name for run in runs for name in run.series)
    rows = [
        (text(name), *([run.label] if several else []), *_extremes(run.series[name]))
        for name in names
        for run in runs
        if name in run.series
    ]
    heads = ("metric", *(["run"] if several else []), "last", "lowest", "highest", "values")
    return Table("Metrics", heads, rows)


def _extremes(series: Series) -> tuple[str, ...]:
    """Return the last value, the lowest and the highest finite one, and the number of values."""
    steps, values = series.finite()
    low = high = NOTHING
    if len(values):
        low, high = (
            f"{wording.number(float(values[place]))} at step {int(steps[place]):,}"
            for place in (values.argmin(), values.argmax())
        )
    rest = len(series.values) - len(values)
    count = wording.number(len(series.values)) + (f" ({rest:,} not finite)" if rest else "")
    return wording.number(series.values[-1]), low, high, count


def system(run: RecordedRun) -> dict[str, str]:
    """Return facts about the system of a run, at its last start."""
    world, start, results = run.world, run.start, run.summary
    chosen = mapping(start.get("options"))
    facts = {
        "ranks": world.get("world_size"),
        "hosts": world.get("num_nodes"),
        "names of hosts": _hosts(world),
        "launcher": world.get("launcher"),
        "backend": results.get("backend", chosen.get("backend")),
        "precision": results.get("precision", chosen.get("precision")),
        "device": start.get("device"),
        "job": mapping(start.get("job")).get("job_id"),
        "commit": start.get("commit"),
        **mapping(start.get("versions")),
    }
    return {text(name): text(value) for name, value in facts.items()}


def options(run: RecordedRun) -> dict[str, str]:
    """Return the options of the last start by name, including the script's own options."""
    return {text(name): text(value) for name, value in _options(run.start).items()}


def _options(start: Mapping[str, Any]) -> dict[str, Any]:
    return mapping(start.get("options")) | mapping(start.get("own_options"))


def starts(runs: Sequence[RecordedRun]) -> Table:
    """Return a table of the starts: time, place, and what changed since the start before."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        for place, start in enumerate(run.starts):
            world, command = mapping(start.get("world")), start.get("command")
            before = run.starts[place - 1] if place else start
            rows.append(
                (
                    f"{place + 1}" if len(runs) == 1 else f"{run.label}: {place + 1}",
                    wording.moment(start.get("time")),
                    text(start.get("step")),
                    text(world.get("world_size")),
                    text(_hosts(world)),
                    text(mapping(start.get("job")).get("job_id")),
                    text(shlex.join(map(str, command)) if isinstance(command, list) else command),
                    text(_changes(_settings(before), _settings(start))),
                )
            )
    heads = ("start", "when", "at step", "ranks", "hosts", "job", "command", "changed since")
    return Table("Starts", heads, rows)


def _settings(start: Mapping[str, Any]) -> dict[str, Any]:
    launcher = mapping(start.get("world")).get("launcher")
    more = {"launcher": launcher, "commit": start.get("commit")}
    return _options(start) | mapping(start.get("versions")) | more


def _hosts(world: Mapping[str, Any]) -> str:
    """Return the names of the hosts; of many hosts, only the first names."""
    hosts = world.get("hosts")
    named = [text(host) for host in hosts] if isinstance(hosts, list) else []
    more = f" and {len(named) - _MOST_HOSTS} more" if len(named) > _MOST_HOSTS else ""
    return ", ".join(named[:_MOST_HOSTS]) + more


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    missing = object()
    return "; ".join(
        f"{text(name)}: {text(before.get(name))} → {text(now.get(name))}"
        for name in {**before, **now}
        if before.get(name, missing) != now.get(name, missing)
    )
