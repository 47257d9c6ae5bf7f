"""Make the tables of the pages in Markdown, from result files only; no torch."""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outcomes import outcomes

from hpctrain.errors.codes import CODES
from hpctrain.tools.bench.measure import describe

__all__ = ["TABLES", "Table"]

Record = Mapping[str, Any]
# Makes a table from the results in the folder of a repository.
Table = Callable[[Path], str]

BENCHMARKS = "benchmarks/results"
OTHERS = "docs/results"

# Column heads by figure of a benchmark; figures that are not listed are not shown.
HEADS = {
    "ms": "ms",
    "us": "µs",
    "s": "s",
    "wall_s": "s",
    "stall_s": "s that training waits",
    "images_per_s": "images/s",
    "ratio": "× base",
    "times_base": "× base",
    "more_ms": "ms more",
    "more_us": "µs more",
    "more_cpu_us": "µs more of CPU time",
    "more_s": "s more",
    "cpu_s": "s of rank 0's CPU time",
    "check_s": "of it, s for the check",
    "proof_s": "of it, s for the check",
    "unpack_s": "s to unpack the roster",
    "roll_bytes": "bytes of the roster",
    "samples": "samples counted",
    "top5": "top-5",
    "stall": "first save, s",
    "memory": "memory of it, bytes",
    "": "times as long",
}
# Keys of numbers without a spread, and keys of a record that do not name a row.
_PLAIN = ("reported", "first")
_NO_LEVELS = {"results", "sizes", "arms", "targets", *_PLAIN}
# Names of groups in a benchmark's record, where the key alone is unclear.
_LEVELS = {"checkpoint": "{} MB", "rendezvous": "{} ranks"}
_TAX = "other work meanwhile"
NOT_MEASURED = "Not measured yet."


def _read(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    return record


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') or ' ' for cell in line)} |"
        for line in lines
    )


def _commit(record: Record) -> str:
    commit = record.get("commit")
    if not commit:
        return "commit not recorded"
    return f"`{commit.rstrip('+')}`" + (", uncommitted changes" if commit.endswith("+") else "")


def _machine(record: Record) -> str:
    machine = record["machine"]
    if isinstance(machine, str):
        return machine
    gpu = [record["gpu"]] if "gpu" in record else []
    return ", ".join(
        [*gpu, machine["cpu"], f"{machine['cores']} cores", f"load {machine['load']:.1f}"]
    )


def _measured(record: Record) -> str:
    return f"{record['date'][:10]}; {_machine(record)}; {_commit(record)}"


def source(record: Record) -> str:
    """Return where and when a record was measured, as a line of a page."""
    versions = ", ".join(
        f"{name} {version}"
        for name, version in record.get("versions", {}).items()
        if version and name != "hpctrain"
    )
    command = f"`{record['command']}`" if "command" in record else ""
    parts = (_measured(record), versions, command)
    note = f" Note: {record['note']}." if "note" in record else ""
    return f"{'; '.join(filter(None, parts))}.{note}"


# Benchmarks


def newest(folder: Path, name: str) -> list[Record]:
    """Return the newest figures of a benchmark: for each group of arms, those of the last run.

    Args:
        folder: folder of the records; a file is named NAME.json or NAME_MORE.json.
        name: name of the benchmark.
    """
    paths = [path for path in folder.glob("*.json") if _benchmark(path) == name]
    records = sorted(map(_read, paths), key=lambda record: record["date"])
    last = {group: record for record in records for group in _results(record)}
    selected = []
    for record in reversed(records):
        groups = {group: part for group, part in _results(record).items() if last[group] is record}
        if groups:
            selected.append({**record, "sizes" if "sizes" in record else "results": groups})
    return selected


def _benchmark(path: Path) -> str:
    return str(_read(path).get("benchmark", path.stem))


def _results(record: Record) -> Record:
    results: Record = record.get("sizes") or record["results"]
    return results


def _is_figures(part: Any) -> bool:
    return isinstance(part, Mapping) and "median" in part


def _arms(part: Record, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a part of a record: a name, and its cells by column head."""
    figures = {key: value for key, value in part.items() if _is_figures(value)}
    shown = {HEADS[key]: _cell(key, value) for key, value in figures.items() if key in HEADS}
    for plain in _PLAIN:
        for key, value in part.get(plain, {}).items():
            if key in HEADS:
                shown[HEADS[key]] = f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    if shown:
        yield ", ".join(path), shown
    elif figures:  # figures that belong to no arm
        for key, value in figures.items():
            yield ", ".join((*path, key)), {HEADS[""]: _cell("", value)}
    for key, value in part.items():
        if isinstance(value, Mapping) and key not in figures and key not in _PLAIN:
            levels = () if key in _NO_LEVELS else (_TAX if key == "tax" else key,)
            yield from _arms(value, (*path, *levels))


def _cell(key: str, figures: Mapping[str, float]) -> str:
    ratio = key in ("ratio", "times_base", "")
    if figures["low"] == figures["high"] == float(ratio):
        return "base" if ratio else ""
    size = abs(figures["median"]) or 1
    digits = 3 if ratio else min(max(2 - math.floor(math.log10(size)), 0), 4)
    return describe(figures, f",.{digits}f")


def benchmark(name: str, top: Path) -> str:
    """Return the tables of a benchmark, each with its machine, date and commit below."""
    tables = []
    for record in newest(top / BENCHMARKS, name):
        level = _LEVELS.get(name, "{}")
        groups = {level.format(group): part for group, part in _results(record).items()}
        rows = list(_arms(groups))
        heads = [
            head for head in dict.fromkeys(HEADS.values()) if any(head in row for _, row in rows)
        ]
        cells = [
            [f"`{row}`" if "(" in row else row, *(arm.get(head, "") for head in heads)]
            for row, arm in rows
        ]
        table = _markdown(["median [95 % interval]", *heads], cells)
        tables.append(f"{table}\n\n{source(record)}")
    return "\n\n".join(tables) or NOT_MEASURED


def targets(top: Path) -> str:
    """Return the targets of all benchmarks, and whether their newest figures meet them."""
    folder = top / BENCHMARKS
    rows = []
    for name in sorted({_benchmark(path) for path in folder.glob("*.json")}):
        for record in newest(folder, name):
            rows += [(name, *row, _measured(record)) for row in outcomes(record)]
    head = ("benchmark", "of what", "median [95 % interval]", "target", "outcome", "measured")
    return _markdown(head, rows)


# The other pages


def reliability(section: str, top: Path) -> str:
    """Return the faults that were tested, with the result of the runs.

    Args:
        section: section of the page.
        top: folder of the repository.
    """
    records = [
        row for row in _read(top / OTHERS / "reliability.json")["rows"] if row["section"] == section
    ]
    rows = [
        (
            row["case"],
            row["what"],
            row["runs"],
            row["result"],
            f"{row['seconds']:.0f}" if "seconds" in row else "",
            ", ".join(f"{seconds:.0f}" for seconds in row.get("lost", ())),
            _measured(row) + ("" if "test" in row else "; not measured since"),
        )
        for row in records
    ]
    head = ("case", "what was done", "runs", "result", "seconds", "lost", "measured")
    if not any("lost" in row for row in records):
        head, rows = (*head[:5], head[6]), [(*row[:5], row[6]) for row in rows]
    return _markdown(head, rows) if rows else NOT_MEASURED


def parity(top: Path) -> str:
    """Return each arm's largest relative differences, and its top-1 at the end."""
    record = _read(top / OTHERS / "parity.json")
    tables = []
    for part, title, form in (
        ("apart", "largest relative difference", ".1e"),
        ("top1", "top-1 at the end", ".4f"),
    ):
        rows = [row for row in record["rows"] if row[part]]
        heads = list(dict.fromkeys(head for row in rows for head in row[part]))
        cells = [
            [
                row["arm"],
                *(f"{row[part][head]:{form}}" if head in row[part] else "" for head in heads),
            ]
            for row in rows
        ]
        tables.append(_markdown([title, *heads], cells))
    return "\n\n".join((*tables, source(record)))


def status(top: Path) -> str:
    """Return which components have been run, and where."""
    rows = [
        (
            row["component"],
            row["where"],
            row["what"],
            row["never"],
            _measured(row) if "date" in row else "never",
        )
        for row in _read(top / OTHERS / "status.json")["rows"]
    ]
    return _markdown(("component", "where", "what was run", "never run", "recorded"), rows)


def recorded_baseline(name: str, top: Path) -> str:
    """Return a table that a result file contains as `head` and `rows`."""
    record = _read(top / OTHERS / f"{name}.json")
    return f"{_markdown(record['head'], record['rows'])}\n\n{source(record)}"


def errors(top: Path) -> str:
    """Make the table of the codes of errors, from `hpctrain.errors.codes`."""
    del top
    rows = (
        (name, code.meaning, "<br>".join(code.causes), code.fix) for name, code in CODES.items()
    )
    lines = ["| code | meaning | usual causes | fix |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


_BENCHMARKS = (
    "startup",
    "step_overhead",
    "hostlist",
    "rendezvous",
    "first_allreduce",
    "allreduce",
    "evaluation",
    "input",
    "imagenet",
    "precision",
    "checkpoint",
    "submit",
)
_SECTIONS = ("kill", "launchers", "slurm", "hangs", "checkpoints")
# To add a table that pages may name, add a line here.
TABLES: dict[str, Table] = {
    "targets": targets,
    **{name: functools.partial(benchmark, name) for name in _BENCHMARKS},
    **{f"reliability, {name}": functools.partial(reliability, name) for name in _SECTIONS},
    "parity": parity,
    "repeats": functools.partial(recorded_baseline, "repeats"),
    "by launcher": functools.partial(recorded_baseline, "by_launcher"),
    "programs": functools.partial(recorded_baseline, "programs"),
    "ported": functools.partial(recorded_baseline, "ported"),
    "status": status,
    "errors": errors,
}
