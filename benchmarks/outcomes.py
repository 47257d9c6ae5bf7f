"""Outcomes on targets, read from the records of benchmarks; no torch.

`results` of a record are those of `hpctrain.tools.bench.figures`. An arm may also have `targets`:
by figure, a limit and the outcome.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.tools.bench.figures import arms
from hpctrain.tools.bench.measure import describe

__all__ = ["named", "outcomes"]

Record = Mapping[str, Any]

_UNITS = {"ms": " ms", "us": " µs"}  # of a limit, by the end of the figure's name


def named(record: Record) -> dict[str, Any]:
    """Return the results of a record, with the names of its groups as the pages show them."""
    form = "{} ranks" if record.get("benchmark") == "rendezvous" else "{}"
    return {form.format(key): part for key, part in record["results"].items()}


def outcomes(record: Record) -> Iterator[tuple[str, str, str, str]]:
    """Yield each outcome of a record: its subject, the figure with interval, target, outcome."""
    for name, arm in arms(named(record)):
        targets = arm.get("targets", {})
        for key, target in targets.items():
            form = ".3f" if abs(arm[key]["median"]) < 10 else ".1f"
            subject = f"{name}, {key}" if len(targets) > 1 else name
            limit = target["limit"] + _UNITS.get(key.rpartition("_")[2], "")
            yield subject, describe(arm[key], form), limit, target["outcome"]
