"""Functions shared by the benchmarks: outcomes, machine, commit, result files; no torch.

`results` of a record are those of `hpctrain.tools.bench.measure`. An arm may also have `targets`:
by figure, a limit and the outcome.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.tools.bench import measure

__all__ = [
    "add_save",
    "changes",
    "commit",
    "facts",
    "named",
    "outcome",
    "outcomes",
    "place",
    "save",
]

_TOP = Path(__file__).resolve().parent.parent
# Folders of the results from which the pages are made.
_RESULTS = ("benchmarks/results", "docs/results")
# No figure depends on these files. Results of one run may be uncommitted when the next begins.
_WITHOUT_EFFECT = (*_RESULTS, "*.md")
_UNITS = {"ms": " ms", "us": " µs"}  # of a limit, by the end of the figure's name


def outcome(figure: Mapping[str, float], limit: float) -> str:
    """Return whether the median meets a limit, and whether the spread makes this uncertain."""
    text = "met" if figure["median"] <= limit else "missed"
    sure = figure["high"] <= limit or figure["low"] > limit
    return text if sure else f"{text}, within the noise"


def named(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a record, with the names of its groups as the pages show them."""
    form = "{} ranks" if record.get("benchmark") == "rendezvous" else "{}"
    return {form.format(key): part for key, part in record["results"].items()}


def outcomes(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield each outcome of a record: its subject, the figure with interval, target, outcome."""
    for name, arm in measure.arms(named(record)):
        targets = arm.get("targets", {})
        for key, target in targets.items():
            form = ".3f" if abs(arm[key]["median"]) < 10 else ".1f"
            subject = f"{name}, {key}" if len(targets) > 1 else name
            limit = target["limit"] + _UNITS.get(key.rpartition("_")[2], "")
            yield subject, measure.describe(arm[key], form), limit, target["outcome"]


def changes(kept: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield what has changed in the figures that have a target: its subject, before, now, a word.

    The word is "worse" or "better" if the intervals do not overlap, else "as before".

    Args:
        kept: record in `benchmarks/results`.
        now: record of a new run, perhaps a short one.
    """
    if any(kept["machine"][name] != now["machine"][name] for name in ("cpu", "cores")):
        yield kept["benchmark"], "", "", f"kept on another machine: {kept['machine']['cpu']}"
        return
    old = dict(measure.arms(named(kept)))
    for name, arm in measure.arms(named(now)):
        for key, target in arm.get("targets", {}).items():
            if key not in old.get(name, {}):
                continue  # a short run may have other sizes
            before, after = old[name][key], arm[key]
            more, less = after["low"] > before["high"], after["high"] < before["low"]
            worse, better = (more, less) if target["limit"][0] == "≤" else (less, more)
            form = ".3f" if abs(before["median"]) < 10 else ".1f"
            figures = (measure.describe(one, form) for one in (before, after))
            word = "worse" if worse else "better" if better else "as before"
            yield f"{name}, {key}", *figures, word


def facts(packages: Sequence[str]) -> dict[str, Any]:
    """Return what every result needs: date, command, machine, versions, commit.

    Args:
        packages: packages whose versions are recorded.
    """
    return {**measure.facts(packages), "commit": commit()}


def commit() -> str | None:
    """Return the commit of this tree, with a + if it has uncommitted changes.

    None if this is not a git repository.
    """
    left_out = [f":!{path}" for path in _WITHOUT_EFFECT]
    try:
        return _git("rev-parse", "--short=12", "HEAD") + (
            "+"
            if _git("--no-optional-locks", "status", "--porcelain", "--", ".", *left_out)
            else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def place(name: str) -> Path:
    """Return a path where a record may be written; for argparse's `type`.

    Args:
        name: name of a file or folder.

    Raises:
        argparse.ArgumentTypeError: the path is among the results of this tree, and the tree has
            uncommitted changes or no git repository, so that the measurement could not be repeated.
    """
    path = Path(name).resolve()
    among_results = any(path.is_relative_to(_TOP / folder) for folder in _RESULTS)
    state = commit() if among_results else ""
    if state is None or state.endswith("+"):
        reason = "has uncommitted changes" if state else "is no git repository"
        raise argparse.ArgumentTypeError(
            f"{_TOP} {reason}, and results come from a clean tree only: "
            "commit the changes, or save to a folder outside of the results"
        )
    return path


def add_save(parser: argparse.ArgumentParser) -> None:
    """Add the option `--save` to the parser of a benchmark."""
    parser.add_argument("--save", metavar="FILE", type=place, help="write the results as JSON")


def save(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, if a path is given.

    Raises:
        SystemExit: the path is among the results, and the tree has changed since `--save` was read.
    """
    if not path:
        return
    try:
        place(str(path))
    except argparse.ArgumentTypeError as error:
        raise SystemExit(f"not saved: {error}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"saved to {path}")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=_TOP, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()
