"""Tables that compare runs: a column per run, and a mark where the runs differ."""

from collections.abc import Callable, Mapping, Sequence

from hpctrain.monitoring.report import tables
from hpctrain.monitoring.report.run_reader import RecordedRun
from hpctrain.monitoring.report.tables import Table

__all__ = ["compare", "results"]

_NOTHING = "–"
# The lowest and highest values of these metrics do not describe how well a model learned.
_OF_THE_MACHINE = ("lr", "samples_per_second", "data_wait", "gpu_memory")


def compare(runs: Sequence[RecordedRun]) -> list[Table]:
    """Compare options and systems of runs; rows that differ come first."""
    return [
        _side_by_side("Options", runs, tables.options, sort=True),
        _side_by_side("System", runs, tables.system, sort=True),
    ]


def results(runs: Sequence[RecordedRun]) -> Table:
    """Compare the results of runs."""
    return _side_by_side("Results", runs, _results, sort=False)


def _results(run: RecordedRun) -> dict[str, str]:
    found = tables.summary(run)
    for name, last, low, high, _ in tables.metrics(run).rows:
        found[f"{name}, last"] = last
        if name not in _OF_THE_MACHINE:
            found[f"{name}, lowest"] = low
            found[f"{name}, highest"] = high
    return found


def _side_by_side(
    caption: str,
    runs: Sequence[RecordedRun],
    facts: Callable[[RecordedRun], Mapping[str, str]],
    sort: bool,
) -> Table:
    columns = [facts(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, _NOTHING) for column in columns)) for name in names]
    if sort:
        rows.sort(key=_alike)
    marked = frozenset(place for place, row in enumerate(rows) if not _alike(row)) if sort else ()
    heads = ("", *(run.label for run in runs))
    note = "≠ and bold: the runs differ." if marked else "The runs do not differ." if sort else ""
    return Table(caption, heads, rows, frozenset(marked), note)


def _alike(row: Sequence[str]) -> bool:
    return len(set(row[1:])) == 1
