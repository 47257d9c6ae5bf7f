"""Facts about runs as texts: results, metrics, step times, launches and configuration."""

import datetime
import json
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.cluster.texts import printable, ranks_text
from hpctrain.monitoring.report.runs import RecordedRun, mapping
from hpctrain.monitoring.slow_ranks import slow_ranks

_NOTHING = "–"
_MAX_CHARACTERS = 400


def text(value: Any) -> str:
    """Return any value of a file as one line, shortened if long; a dash for an empty value."""
    if value is None or value == "":
        return _NOTHING
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.6g}"
    line = value if isinstance(value, str) else json.dumps(value)
    if len(line) > _MAX_CHARACTERS:
        line = f"{line[:_MAX_CHARACTERS]} … ({len(line):,} characters)"
    return printable(line)


def duration(seconds: Any) -> str:
    """Return seconds as text: 12.3 ms, 5.4 s, 1:02:03; a dash for an invalid value."""
    if not _is_time(seconds):
        return _NOTHING
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    return str(datetime.timedelta(seconds=round(seconds)))


def moment(seconds: Any) -> str:
    """Return Unix seconds as date and time in UTC; a dash for an invalid value."""
    known = _is_time(seconds)
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if known else _NOTHING


def _is_time(seconds: Any) -> bool:
    return type(seconds) in (int, float) and 0 <= seconds < 2**35


def by_run(
    runs: Sequence[RecordedRun],
    facts: Callable[[RecordedRun], Mapping[str, Any]],
    sort: bool = False,
) -> list[tuple[str, ...]]:
    """Return the facts of runs: the name of a fact, then its value in each run.

    Facts that no run has are omitted.

    Args:
        runs: runs of the report.
        facts: function that returns the facts of a run.
        sort: whether the facts in which the runs differ come first.
    """
    columns = [{k: v for k, v in facts(run).items() if v not in (None, "")} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(text(name), *(text(column.get(name)) for column in columns)) for name in names]
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1) if sort else rows


def summary(run: RecordedRun) -> dict[str, Any]:
    """Return the main results of a run."""
    results, last, effective = run.summary, run.last, run.effective
    speed = results.get("samples_per_second", last.get("samples_per_second"))
    facts = {
        "status": results.get("status", "not ended"),
        "reason": results.get("reason"),
        "step": results.get("step", last.get("step")),
        "epoch": results.get("epoch", last.get("epoch")),
        "throughput": f"{text(speed)} samples/s" if speed else None,
        "training, last launch": duration(results.get("seconds")),
        "launches": len(run.launches),
    }
    for name in ("top1", "top5"):
        if name in run.series and not np.isnan(run.series[name][1]).all():
            facts[f"best {name}"] = float(np.nanmax(run.series[name][1]))
    if effective is not None:
        wall = duration(effective.wall_seconds)
        facts["effective training time"] = f"{100 * effective.share:.0f} % of {wall}"
        facts["lost"] = effective.lost
    return facts


def metrics(runs: Sequence[RecordedRun]) -> list[tuple[str, ...]]:
    """Return for each metric and run: the last, lowest and highest value, and their number."""
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(name for run in runs for name in run.series):
        for run in (run for run in runs if name in run.series):
            steps, values = run.series[name]
            fine = np.isfinite(values)
            order = np.argsort(values[fine], kind="stable")
            ends = [
                f"{text(float(values[fine][place]))} at step {steps[fine][place]:,.0f}"
                for place in (*order[:1], *order[-1:])
            ] or [_NOTHING] * 2
            odd = f" ({np.sum(~fine):,} not finite)" if name in run.odd else ""
            rows.append((text(name), run.label, text(run.last[name]), *ends, f"{len(fine):,}{odd}"))
    return rows


def step_times(run: RecordedRun) -> dict[str, str]:
    """Return the times of rank 0's steps and of the ranks; empty if they are not recorded."""
    times = run.timings
    if not times.buckets:
        return {}
    shares = {"half of the steps": 0.5, "99 % of the steps": 0.99, "all steps": 1.0}
    facts = {f"{name}, at most": duration(times.quantile(shares[name])) for name in shares}
    for name, row in zip(("waiting for data", "forward pass"), times.means, strict=True):
        seconds, step = row.tolist(), times.quantile(0.5)
        facts[f"{name}, median rank"] = duration(statistics.median_low(seconds))
        if slow := slow_ranks(seconds, step):
            where = ranks_text(slow, [text(node) for node in times.nodes])
            facts[f"{name}, slow ranks"] = f"{where}: up to {duration(max(seconds))}"
    return facts


def configuration(run: RecordedRun) -> dict[str, Any]:
    """Return system, versions and options of the last launch, and the script's own options."""
    launch, results, options = run.launch, run.summary, _options(run.launch)
    return {
        "ranks": run.world.get("world_size"),
        "nodes": _nodes(run.world),
        "launcher": run.world.get("launcher"),
        "device": launch.get("device"),
        "job": mapping(launch.get("job")).get("job_id"),
        "commit": launch.get("commit"),
        **mapping(launch.get("versions")),
        **options,
        "backend": results.get("backend", options.get("backend")),
        "precision": results.get("precision", options.get("precision")),
    }


def launches(runs: Sequence[RecordedRun]) -> list[tuple[str, ...]]:
    """Return a row for each launch: time, place, and what changed since the launch before."""
    rows = []
    for run in runs:
        for place, launch in enumerate(run.launches):
            world, command = mapping(launch.get("world")), launch.get("command")
            cells = (
                place + 1,
                run.label,
                moment(launch.get("time")),
                launch.get("step"),
                world.get("world_size"),
                _nodes(world),
                mapping(launch.get("job")).get("job_id"),
                shlex.join(map(str, command)) if isinstance(command, list) else command,
                _changes(run.launches[max(place - 1, 0)], launch),
            )
            rows.append(tuple(map(text, cells)))
    return rows


def _options(launch: Mapping[str, Any]) -> dict[str, Any]:
    return mapping(launch.get("options")) | mapping(launch.get("own_options"))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = (
        {**_options(one), **mapping(one.get("versions")), "commit": one.get("commit")}
        for one in (before, now)
    )
    return "; ".join(
        f"{text(name)}: {text(old.get(name))} → {text(new.get(name))}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    )


def _nodes(world: Mapping[str, Any]) -> str:
    hosts = world.get("hosts")
    return ", ".join(dict.fromkeys(map(str, hosts))) if isinstance(hosts, list) else ""
