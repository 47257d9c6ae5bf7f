"""Environments of real launchers: the files in env/, and the programs that capture them again.

    cd tests/support
    python -m environments                 # the names, and what each one needs
    python -m environments srun-block …    # capture again and write the files

A program is one script on one host of the test cluster, and starts `train.py` as a person would,
once or more. Each process writes down its host, its arguments, its ancestors and its environment.
Which rank belongs on which host is known from the layout that the command line asks for; that each
rank is there is checked with the host's own name.

`starts` says what a start is, `table` holds them all. `record` is what the ranks run, `capture`
runs the programs, `parts` is what they need, `keep` what stays of an environment. `compare` says
in what two captures differ.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.capture import CaptureError, capture
from environments.compare import differences
from environments.parts import lacks
from environments.starts import place
from environments.table import BY_START

__all__ = [
    "BY_START",
    "CaptureError",
    "all",
    "capture",
    "differences",
    "lacks",
    "load",
    "names",
    "place",
    "write",
]

FOLDER = Path(__file__).parents[2] / "cluster" / "env"


def load(name: str) -> dict[str, Any]:
    """The document of one file."""
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


def names() -> list[str]:
    """The names of all files."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def all() -> dict[str, dict[str, Any]]:
    """The documents of all files."""
    return {name: load(name) for name in names()}


def write(name: str, document: Mapping[str, Any]) -> None:
    """Write one file."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n")
