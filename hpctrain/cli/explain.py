"""`hpctrain explain`: what the launcher said, and which variable said it."""

import argparse
import json
import os
import sys
from typing import Any

from hpctrain.launchers import LAUNCHERS, Explanation, Start, explain

__all__ = ["add"]

_FIELDS = (
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "node_rank",
    "num_nodes",
    "hosts",
)


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "explain",
        help="say who this process is, and how it is known",
        description="What the launcher of this process says, each value with the variable that "
        "it came from. Put it in place of your script: srun hpctrain explain",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--strict", action="store_true", help="a warning is an error, exit code 2")
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    explanation = explain(os.environ)
    if arguments.json:
        sys.stdout.write(json.dumps(explanation.as_json()) + "\n")
    elif explanation.start is not None:
        sys.stdout.write(_text(explanation, explanation.start))
    if explanation.error is not None:
        raise explanation.error
    assert explanation.start is not None
    return 2 if arguments.strict and explanation.start.warnings else 0


def _text(explanation: Explanation, start: Start) -> str:
    """A table for people."""
    reason = next(one.reason for one in LAUNCHERS if one.name == start.world.launcher)
    lines = [f"launcher          {start.world.launcher}    ({reason})"]
    values = explanation.as_json()
    for field in _FIELDS:
        value = values[field]
        if isinstance(value, (list, tuple)):
            value = ",".join(value)
        source = start.claims[field].source if field in start.claims else "the roll call finds out"
        lines.append(f"{field:<17} {'?' if value is None else value}    {source}")
    point = start.meeting_point
    if start.world.world_size > 1:
        where = "this host" if start.world.on_one_host else point.address or "not known"
        lines.append(f"ranks meet at     {where}")
    if start.allocation is not None:
        job = start.allocation
        lines.append(f"job               {job.scheduler} {job.label}, restart {job.restart_count}")
    for other in start.outer:
        lines.append(f"also there        {other.name}")
    lines += [f"warning: {warning}" for warning in start.warnings]
    return "\n".join(lines) + "\n"
