"""`hpctrain site`: write a first site.sh from Slurm's data about this cluster."""

import argparse
import os
import pwd
import sys

from hpctrain import rundir
from hpctrain.cli.terminal import put
from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.jobs import site
from hpctrain.jobs.quoting import quote

__all__ = ["add"]

_HEAD = """\
# Settings for all your jobs on this cluster. Scripts of `hpctrain render` and `hpctrain submit`
# source this file before the ranks start. `hpctrain submit` also reads SBATCH_ACCOUNT,
# SBATCH_PARTITION and SBATCH_QOS here, unless an option, JOB.toml or a profile sets another value.
# Do not export them in your shell: there they would override the #SBATCH lines of every script.
"""
_TAIL = """
# Setup for the ranks:
# module purge
# module load python cuda
# export NCCL_SOCKET_IFNAME=ib0
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Settings for all jobs on this cluster, for ${HPCTRAIN_SITE:-$HOME/.config/"
        "hpctrain/site.sh}: account and partition from Slurm, and lines to fill in for modules."
    )
    parser.add_argument(
        "--write", action="store_true", help="write the file; an existing file is not overwritten"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    path = site.script(os.environ)
    try:
        partitions = slurm.partitions(os.environ)
    except slurm.NoAnswerError as error:
        raise StartError(
            "HT816",
            f"Slurm does not list its partitions: {error}",
            "a login node of a cluster with Slurm",
        ) from None
    text = _HEAD + _accounts() + _partitions(partitions) + _TAIL
    if not arguments.write:
        _show(text)
        sys.stderr.write(f"hpctrain: hpctrain site --write saves this as {printable(path)}\n")
        return exit_codes.DONE
    try:
        rundir.create(path, text)
    except FileExistsError:
        _show(text)
        raise UsageError(
            "HT808",
            f"{path} exists and is not overwritten",
            "no file of that name",
            "copy the lines that you need into it",
        ) from None
    except OSError as error:
        raise UsageError(
            "HT809", f"{path} cannot be written: {error}", "a folder of your own"
        ) from None
    put(f"{path}\n")
    return exit_codes.DONE


def _show(text: str) -> None:
    # As bytes, because the terminal may have another encoding than the file.
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _accounts() -> str:
    """Return a line for each account, all but the default account as comments."""
    try:
        names = slurm.accounts(pwd.getpwuid(os.getuid()).pw_name, os.environ)
    except (slurm.NoAnswerError, KeyError):
        names = []
    if not names:
        return "\n# SBATCH_ACCOUNT=PROJECT\n"
    first, *others = [_assignment("ACCOUNT", name) for name in names]
    return "\n" + "".join([first, *(f"# {line}" for line in others)])


def _partitions(partitions: list[slurm.Partition]) -> str:
    """Return a comment for each partition, with its nodes; the default one needs no setting."""
    by_name: dict[str, list[slurm.Partition]] = {}
    for partition in partitions:
        by_name.setdefault(partition.name, []).append(partition)
    lines = []
    for name, kinds in by_name.items():
        nodes = ", ".join(
            f"{partition.nodes} nodes with {partition.gpus or 'no GPU'}" for partition in kinds
        )
        down = "" if any(partition.up for partition in kinds) else ", down"
        line = _assignment("PARTITION", name).rstrip("\n")
        lines.append(f"# {line} # up to {printable(kinds[0].limit)}: {printable(nodes)}{down}\n")
    return "\n" + "".join(lines) + "# SBATCH_QOS=\n"


def _assignment(name: str, value: str) -> str:
    return f"export SBATCH_{name}={quote(value)}\n"
