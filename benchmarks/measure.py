"""What the benchmarks share: spread, pairs, verdicts, what machine it was, and results. No torch.

All but the verdicts and the results is what `hpctrain bench` measures with.
"""

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.tools.bench import measure
from hpctrain.tools.bench.measure import describe, order, summary, table

__all__ = [
    "add_save",
    "commit",
    "describe",
    "facts",
    "order",
    "place",
    "save",
    "summary",
    "table",
    "verdict",
]

_TOP = Path(__file__).resolve().parent.parent
# Folders of the results that pages are made of.
_RESULTS = ("benchmarks/results", "docs/results")
# No figure depends on these: results of one run may lie there, uncommitted, while the next begins.
_WITHOUT_EFFECT = (*_RESULTS, "*.md")


def verdict(figures: Mapping[str, float], limit: float) -> str:
    """Whether the median keeps to a limit, and whether the spread lets one say so."""
    said = "met" if figures["median"] <= limit else "missed"
    sure = figures["high"] <= limit or figures["low"] > limit
    return said if sure else f"{said}, within the noise"


def facts(packages: Sequence[str]) -> dict[str, Any]:
    """What a figure means nothing without: date, command, machine, versions, commit.

    Args:
        packages: whose versions matter.
    """
    return {**measure.facts(packages), "commit": commit()}


def commit() -> str | None:
    """The commit of this tree, with a + where it has changes that are not committed.

    None where this is no git repository.
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
    """Where a record may be written; the type of an option.

    Args:
        name: of a file or folder.

    Raises:
        argparse.ArgumentTypeError: it is among the results of this tree, and the tree has changes
            that are not committed, so that nobody could measure the same again.
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
    """Give a benchmark's command its option `--save`."""
    parser.add_argument("--save", metavar="FILE", type=place, help="the results as JSON")


def save(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, where a file was named.

    Raises:
        SystemExit: the tree was changed since `--save` was read.
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


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=_TOP, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()
