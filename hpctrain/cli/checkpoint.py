"""`hpctrain checkpoint show`: list the checkpoints of a run, and what is in one of them."""

import argparse
import importlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from hpctrain.cli.argument_types import RUN
from hpctrain.errors import CheckpointError
from hpctrain.jobs import job_status, job_watching

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = "Commands for the checkpoints of a run."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "show",
        help="list the checkpoints of a run, their sizes, and what is damaged",
        description="Reads every file of the checkpoints once, and lists steps, sizes, and what "
        "is damaged. With --step, lists the tensors of one checkpoint. Exit code 1 if one is "
        "damaged.",
    )
    command.add_argument("run", **RUN)
    command.add_argument("--step", type=int, metavar="N", help="list the tensors of this one")
    command.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    # Imported by name, and here: it imports torch, which the other commands do not need.
    loading = importlib.import_module("hpctrain.checkpoint.loading")
    directory = job_status.only_run(arguments.run, os.environ)
    found: dict[int, Path] = loading.places(directory)
    steps = ", ".join(map(str, found)) or "none"
    if arguments.step is not None:
        found = {step: folder for step, folder in found.items() if step == arguments.step}
    if not found:
        key = "HT709.no-checkpoint" if arguments.step is None else "HT709.no-such-step"
        raise CheckpointError(key, step=arguments.step, directory=directory, steps=steps)
    rows: list[tuple[str, ...]] = [("step", "saved", "files", "bytes", "ranks", "state")]
    damaged = []
    for step, folder in found.items():
        damage = loading.damages(folder, step)
        damaged += damage
        try:
            rows.append(_row(step, loading.read_manifest(folder, step), damage))
        except CheckpointError:
            rows.append((f"{step:,}", "", "", "", "", "damaged"))
    sys.stdout.write(job_watching.aligned(rows))
    for text in damaged:
        sys.stdout.write(f"damaged: {text}\n")
    if arguments.step is not None and not damaged:
        _print_tensors(loading, found[arguments.step], arguments.step)
    return 1 if damaged else 0


def _row(step: int, manifest: dict[str, Any], damage: list[str]) -> tuple[str, ...]:
    files, saved = manifest["files"], manifest.get("time")
    size = sum(entry["size"] for entry in files.values())
    ranks = (manifest.get("world") or {}).get("world_size", "")
    return (
        f"{step:,}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved)) if saved else "",
        str(len(files)),
        f"{size:,}",
        str(ranks),
        "damaged" if damage else "complete",
    )


def _print_tensors(loading: Any, folder: Path, step: int) -> None:
    """Print the tensors of a checkpoint, and in how many pieces they are."""
    manifest = loading.read_manifest(folder, step)
    rows = [("tensor", "type", "shape", "bytes", "pieces")]
    for part, table in manifest["tensors"].items():
        names = {one["number"]: one["name"] for one in table}
        for one in table:
            size = math.prod(one["shape"]) * loading.dtype_of(one["dtype"]).itemsize
            rows.append(
                (
                    f"{part}.{one['name']}",
                    one["dtype"],
                    " × ".join(map(str, one["shape"])) or "1",
                    f"{size:,}",
                    f"as {part}.{names[one['same']]}" if "same" in one else f"{len(one['pieces'])}",
                )
            )
    sys.stdout.write("\n")
    if len(rows) > 1:
        sys.stdout.write(job_watching.aligned(rows))
