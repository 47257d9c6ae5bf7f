"""`hpctrain init`: write a first training script, and a batch script for the cluster at hand."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from hpctrain.cli.argument_types import typed
from hpctrain.cluster import slurm
from hpctrain.errors import UsageError
from hpctrain.jobs import site, units
from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec

__all__ = ["add"]

_KINDS = ("images", "text")  # the scripts of this package, which are examples
_SHAPE = re.compile(r"(\d{1,5})(?:\s*x\s*(\d{1,4}))?", re.ASCII)
_LIMIT = "1h"


def _shape_of(text: str) -> tuple[int, int]:
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(match[1]), int(match[2] or 0)


_shape = typed("number of hosts and of GPUs of each, such as 2x4", _shape_of, lambda one: one[0])
_kind = typed(f"kind of training: {' or '.join(_KINDS)}", str, _KINDS.__contains__)
_time = typed("time such as 4h, 1d12h, 90m", units.slurm_time)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Writes DIR/train.py, a complete training that runs on this machine as it is, and "
        "DIR/train.sbatch, which starts it on a cluster. On a terminal it asks for what no option "
        "says. Slurm, if it is there, is asked for partition, GPUs and account. A file that exists "
        "is kept."
    )
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="DIR", help="folder to write to (default: .)"
    )
    parser.add_argument(
        "--kind",
        choices=_KINDS,
        help="what is trained: a classifier of images, or a small GPT (default: images)",
    )
    parser.add_argument(
        "--hosts",
        type=_shape,
        metavar="NxG",
        help="number of hosts, and of GPUs of each, such as 2x4 (default: one, with its GPUs)",
    )
    parser.add_argument(
        "--time", type=_time, metavar="TIME", help=f"time limit of the job (default: {_LIMIT})"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    env = os.environ
    partitions = [one for one in slurm.partitions(env) if one.up]
    gpus = next((_gpus(one) for one in partitions if one.default), 0)
    kind = arguments.kind or _ask("What does it train: images or text?", "images", _kind)
    hosts = arguments.hosts or _ask("Hosts, and GPUs of each?", f"1x{gpus}", _shape)
    limit = arguments.time or _ask("Time limit of the job?", _LIMIT, _time)
    script, batch = Path(arguments.folder, "train.py"), Path(arguments.folder, "train.sbatch")
    job = site.completed(
        JobSpec(
            about=f"Trains train.py. From this folder: sbatch {batch.name}",
            command=("python", script.name),
            nodes=hosts[0],
            gpus_per_node=str(hosts[1]),
            time=limit,
            partition="" if env.get("SBATCH_PARTITION") else _partition(partitions, *hosts),
            account="" if env.get("SBATCH_ACCOUNT") else next(iter(slurm.accounts(env)), ""),
            venv=env.get("VIRTUAL_ENV", ""),
            conda="" if env.get("VIRTUAL_ENV") else env.get("CONDA_DEFAULT_ENV", ""),
        ),
        env,
    )
    text = resources.files("hpctrain.cli").joinpath("scripts", f"{kind}.txt").read_text()
    _write({script: text, batch: render(job)})
    cd = "" if arguments.folder == "." else f"cd {shlex.quote(arguments.folder)}; "
    sys.stdout.write(
        f"{script} is written; try it here:  {cd}python {script.name} --max-steps 100\n"
        f"{batch} is written; submit it:  {cd}sbatch {batch.name}\n"
    )
    return 0


def _ask(question: str, default: str, read: Callable[[str], Any]) -> Any:
    """Return the answer of a person on the terminal, else the default."""
    while sys.stdin.isatty():
        sys.stderr.write(f"{question} [{default}] ")
        sys.stderr.flush()
        try:
            return read(sys.stdin.readline().strip() or default)
        except argparse.ArgumentTypeError as error:
            sys.stderr.write(f"{error}\n")
    return read(default)


def _gpus(partition: slurm.Partition) -> int:
    """Return the number of GPUs of each node of a partition, such as of gpu:a100:4."""
    kinds = (kind.rpartition(":")[2] for kind in partition.gpus.split(",") if kind)
    return sum(int(count) for count in kinds if count.isdecimal())


def _partition(partitions: list[slurm.Partition], nodes: int, gpus: int) -> str:
    """Return the first partition with these hosts, the default one before the others; or empty."""
    fitting = [one for one in partitions if _gpus(one) >= gpus]
    for one in sorted(fitting, key=lambda one: not one.default):
        if sum(other.nodes for other in fitting if other.name == one.name) >= nodes:
            return one.name
    return ""


def _write(files: Mapping[Path, str]) -> None:
    """Write new files.

    Raises:
        UsageError: one of them exists, and then none is written; the folder cannot be written.
    """
    for path in files:
        if path.exists():
            raise UsageError("HT808.init-file-exists", path=path, quoted=shlex.quote(str(path)))
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                file.write(text)
        except OSError as error:
            raise UsageError("HT809.cannot-write-file", path=path, error=error) from None
