"""Environments of real launchers: the files in env/, and the programs that capture them again.

    cd tests/support
    python -m environments                 # the names, and what each one needs
    python -m environments srun-block …    # capture again and write the files
    HPCTRAIN_TEST_SLURM=24.11 python -m environments slurm    # all that Slurm alone needs

A program is one script on one host of the test cluster, and starts `train.py` as a person does,
once or more. Each process records its host, its arguments, its ancestors and its environment. The
command line determines the layout of ranks on hosts; the capture checks it by the names of the
hosts.

`starts` defines a start, `table` has all of them. The ranks run `record`, `capture` runs the
programs, `parts` has the required parts, `keep` selects and neutralises variables. `compare` finds
the differences of two captures.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.capture import CaptureError, capture
from environments.compare import differences
from environments.parts import lacks, of_slurm
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
    "of_slurm",
    "of_version",
    "place",
    "write",
]

FOLDER = Path(__file__).parents[2] / "cluster" / "env"


def of_version(name: str, version: str) -> str:
    """Return the name of the file of a start with a version of Slurm; "" is the machine's own."""
    return f"slurm-{version}/{name}" if version else name


def load(name: str) -> dict[str, Any]:
    """Return the document of one file."""
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


def names() -> list[str]:
    """Return the names of all files, with the folder of those of another version of Slurm."""
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.json"))


def all() -> dict[str, dict[str, Any]]:
    """Return the documents of all files."""
    return {name: load(name) for name in names()}


def write(name: str, document: Mapping[str, Any]) -> None:
    """Write one file."""
    file = FOLDER / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
