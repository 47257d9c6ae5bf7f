"""Make the tables of the pages in Markdown, from result files only; no torch."""

import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import named, outcomes
from suite import BENCHMARKS

from hpctrain.errors.codes import codes
from hpctrain.tools.bench.measure import arms, describe, rows

__all__ = ["TABLES", "Table"]

Record = Mapping[str, Any]
# Makes a table from the results in the folder of a repository.
Table = Callable[[Path], str]

RESULTS = "benchmarks/results"
OTHERS = "docs/results"
NOT_MEASURED = "Not measured yet."
_MOST_LOST = 8  # that are shown one by one


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
    last = {group: record for record in records for group in record["results"]}
    selected = []
    for record in reversed(records):
        groups = {group: own for group, own in record["results"].items() if last[group] is record}
        if groups:
            selected.append({**record, "results": groups})
    return selected


def _benchmark(path: Path) -> str:
    return str(_read(path).get("benchmark", path.stem))


def benchmark(name: str, top: Path) -> str:
    """Return the tables of a benchmark, each with its machine, date and commit below."""
    tables = []
    for record in newest(top / RESULTS, name):
        head, *arms = rows(named(record))
        cells = [[f"`{arm}`" if "(" in arm else arm, *row] for arm, *row in arms]
        tables.append(f"{_markdown(head, cells)}\n\n{source(record)}")
    return "\n\n".join(tables) or NOT_MEASURED


def targets(top: Path) -> str:
    """Return the targets of all benchmarks, and whether their newest figures meet them."""
    folder = top / RESULTS
    found = []
    for name in sorted({_benchmark(path) for path in folder.glob("*.json")}):
        for record in newest(folder, name):
            found += [(name, *row, _measured(record)) for row in outcomes(record)]
    head = ("benchmark", "of what", "median [95 % interval]", "target", "outcome", "measured")
    return _markdown(head, found)


# The README

# Name and arm of a benchmark, what the ratio is of, its base, other arms, the section of the page.
_RATIOS: tuple[tuple[str, str, str, str, Mapping[str, str], str], ...] = (
    (
        "step_overhead",
        "one process, hpctrain",
        "time of a step, tiny model, CPU",
        "a plain loop",
        {"Fabric": "one process, Lightning Fabric", "accelerate": "one process, accelerate"},
        "a-step",
    ),
    ("imagenet", "in memory, hpctrain", "images/s, ResNet-50", "a plain loop", {}, "imagenet"),
    ("gpt", "bf16, hpctrain, fsdp", "tokens/s, a GPT, FSDP2", "`fully_shard` by hand", {}, "a-gpt"),
    ("checkpoint", "1000 MB, hpctrain", "wait for a save", "`torch.save`", {}, "checkpoints"),
    (
        "evaluation",
        "exact",
        "time of an exact evaluation",
        "one that pads",
        {"accelerate": "accelerate"},
        "evaluation",
    ),
)


def front_page(top: Path) -> str:
    """Return a few figures of other pages, each with a link to its table."""
    cells = []
    for name, arm, what, base, others, section in _RATIOS:
        record, figures = _arm(name, arm, top)
        beside = [
            f"{other} {_arm(name, its, top)[1]['ratio']['median']:.3f}"
            for other, its in others.items()
        ]
        cells.append(
            (
                f"[{what}](benchmarks/README.md#{section})",
                f"× {describe(figures['ratio'], '.3f')}",
                "; ".join([base, *beside]),
                _measured(record),
            )
        )
    parity = _read(top / OTHERS / "parity.json")
    (apart,) = (row["apart"] for row in parity["rows"] if row["arm"] == "ddp, 4 ranks")
    restart, cost = _arm("restart", "3 nodes, ddp", top)
    kills = f"seconds that a killed rank costs on three nodes, {restart['kills']} kills"
    cells += [
        (
            "[losses of 200 steps in fp64, four ranks](docs/reproducibility.md)",
            f"{apart['fp64, losses of steps 1–200']:.1e} apart",
            "one process",
            _measured(parity),
        ),
        (
            f"[{kills}](benchmarks/README.md#a-killed-rank)",
            f"{describe(cost['s'], '.2f')}, at most {cost['most_s']['median']:.2f}",
            "no kill: the same bits at the end",
            _measured(restart),
        ),
    ]
    return _markdown(("what", "median [95 % interval]", "compared with", "measured"), cells)


def _arm(name: str, arm: str, top: Path) -> tuple[Record, Record]:
    """Return the record and the figures of an arm of a benchmark."""
    for record in newest(top / RESULTS, name):
        for found, figures in arms(named(record)):
            if found == arm:
                return record, figures
    raise KeyError(f"{name}: {arm}")


# The other pages


def _lost(seconds: Sequence[float]) -> str:
    """Return the seconds that faults cost: each, or median and largest of many."""
    if len(seconds) <= _MOST_LOST:
        return ", ".join(f"{one:.0f}" for one in seconds)
    middle, largest = statistics.median(seconds), max(seconds)
    return f"{len(seconds)} times: median {middle:.1f}, largest {largest:.1f}"


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
            _lost(row.get("lost", ())),
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


def slurm_versions(top: Path) -> str:
    """Make the table of the tests on each version of Slurm, with a row for each file of tests."""
    path = top / OTHERS / "slurm_versions.json"
    rows = _read(path)["rows"] if path.exists() else []
    versions = sorted({row["version"] for row in rows}, key=_numbers)
    found = {(row["file"], row["version"]): row for row in rows}
    files = {row["file"]: row["what"] for row in sorted(rows, key=lambda row: row["file"])}

    def cell(file: str, version: str) -> str:
        row = found.get((file, version))
        if row is None:
            return "not run"
        counts = [f"{row[name]} {name}" for name in ("passed", "failed", "left out") if row[name]]
        return f"{', '.join(counts)}; {row['date'][:10]}"

    lines = [[what, *(cell(file, one) for one in versions)] for file, what in files.items()]
    lines.append(["commit", *(_commits(rows, one) for one in versions)])
    return _markdown(["tests", *versions], lines)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _commits(rows: Sequence[Record], version: str) -> str:
    return ", ".join(sorted({_commit(row) for row in rows if row["version"] == version}))


def errors(top: Path) -> str:
    """Make the table of the codes of errors, from `hpctrain.errors.codes`."""
    del top
    rows = [
        (name, code.meaning, "<br>".join(code.causes), "<br>".join(code.fixes))
        for name, code in codes().items()
    ]
    return _markdown(("code", "meaning", "usual causes", "fixes"), rows)


_SECTIONS = ("kill", "launchers", "slurm", "hangs", "checkpoints")
# Files that have the cells of their table.
_RECORDED = (
    *("chaos", "ten minutes", "mixed faults", "repeats", "on paper"),
    *("by launcher", "programs", "ported"),
)
# To add a table that pages may name, add a line here.
TABLES: dict[str, Table] = {
    "front page": front_page,
    "targets": targets,
    **{name: functools.partial(benchmark, name) for name in BENCHMARKS},
    **{f"reliability, {name}": functools.partial(reliability, name) for name in _SECTIONS},
    "parity": parity,
    **{name: functools.partial(recorded_baseline, name.replace(" ", "_")) for name in _RECORDED},
    "status": status,
    "slurm versions": slurm_versions,
    "errors": errors,
}
