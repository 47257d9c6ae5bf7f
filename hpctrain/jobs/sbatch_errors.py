"""Explanation of sbatch's refusals: which value of the job is wrong, and which ones Slurm accepts.

Source of Slurm's texts: src/common/slurm_errno.c and src/sbatch/opt.c. A text that is in no row of
the table is passed on unchanged.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs.spec import JobSpec

__all__ = ["MEANINGS", "refused"]

_FIELDS = {field.name: field for field in fields(JobSpec)}
# Pattern for sbatch's text, the names of JobSpec and of `extra` that can fix it, and what Slurm
# expects.
# The first row that matches counts.
MEANINGS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("invalid partition|partition name", ("partition",), "a partition of this cluster"),
    ("partition not available|PARTITION.*(DOWN|drain)", ("partition",), "one that is up"),
    ("account or account/partition|invalid account|group not permitted",
     ("account", "partition", "qos"), "an account that may use the partition and the qos"),
    ("invalid qos|job.s qos", ("qos", "account"), "a qos of the account's"),
    ("time limit|invalid --time", ("time", "partition"), "at most the partition's limit"),
    ("accounting/qos policy|job violates|limit.*exceeded|too many jobs|maximum.*job",
     ("qos", "time", "nodes", "array"), "what account and qos allow: fewer or smaller jobs"),
    ("more processors requested",
     ("cpus_per_task", "tasks_per_node", "nodes", "partition"), "what the partition has"),
    ("node count|invalid number of nodes",
     ("nodes", "exclude", "partition"), "a number that the partition has"),
    ("invalid node name|nodelist", ("nodelist", "exclude"), "names of this cluster's nodes"),
    ("memory", ("memory", "partition"), "what a node of the partition has"),
    ("generic resource|gres|invalid trackable", ("gpus_per_node", "gres"),
     "GPUs that this cluster has, N or TYPE:N"),
    ("feature", ("constraint",), "features of this cluster's nodes: sinfo --format='%n %f'"),
    ("dependency", ("dependency",), "jobs that are still in Slurm's list"),
    ("array", ("array", "sweep"), "fewer indices, or smaller ones (MaxArraySize of Slurm)"),
    ("license", ("licenses",), "licenses: scontrol show licenses"),
    ("reservation", ("reservation",), "a reservation: scontrol show reservation"),
    ("node configuration is not available|required node not available",
     ("gpus_per_node", "memory", "constraint", "nodelist", "exclude", "cpus_per_task",
      "tasks_per_node", "nodes", "partition"), "less of each, or another partition"),
    ("signal", ("signal",), "a signal that this Slurm supports"),
    ("unrecognized option|invalid --", ("extra",), "options that this sbatch has: sbatch --help"),
)  # fmt: skip
# Fields that the size of a partition limits.
_SIZES = ("nodes", "tasks_per_node", "cpus_per_task", "memory")
# Errors that no value of the job causes: the same command may work later.
_TEMPORARY = re.compile(
    r"unable to contact|temporarily|timed out|connection (refused|timed)|connect failure"
    r"|communication|protocol authentication|not responding|cannot stat|dns srv"
    r"|configuration (file|source)|munge",
    re.IGNORECASE,
)


def refused(message: str, spec: JobSpec, env: Mapping[str, str]) -> StartError | UsageError:
    """Return the error for a refusal by sbatch: its reason, and which value of the job to change.

    Args:
        message: what sbatch printed.
        spec: job that was refused.
        env: environment for Slurm's commands.
    """
    lines = [re.sub(r"^sbatch: (error: )?", "", line.strip()) for line in message.splitlines()]
    reason = "; ".join(line for line in lines if line) or "without a message"
    if _TEMPORARY.search(message):
        return StartError("HT816.cannot-submit", reason=reason)
    for pattern, names, expected in MEANINGS:
        if re.search(pattern, message, re.IGNORECASE):
            likely = [name for name in names if _given(spec, name)] or [names[0]]
            known = ", ".join(_accepted(likely[0], spec, env))
            fixes = [_fix(name, _given(spec, name)) for name in likely[:4]]
            values = f"{expected}: {known}" if known else expected
            return UsageError("HT817.invalid-value", reason=reason, expected=values, fixes=fixes)
    return StartError("HT817.rejected", reason=reason)


def _given(spec: JobSpec, name: str) -> str:
    """Return the value of a field or of an entry of `extra` as text; empty if it is the default."""
    if name not in _FIELDS:
        return str(spec.extra.get(name, ""))
    value: Any = getattr(spec, name)
    return "" if value in (_FIELDS[name].default, None, (), {}) else str(value)


def _fix(name: str, value: str) -> str:
    was = f"it is {value}; " if value and name not in ("extra", "sweep") else ""
    if name not in _FIELDS:
        return f"--{name} … ({was}extra.{name} in JOB.toml and JobSpec)"
    option = f"--{name.replace('_', '-')} {_FIELDS[name].metadata['metavar']}".rstrip()
    return f"{option} ({was}{name} in JOB.toml and JobSpec)"


def _accepted(name: str, spec: JobSpec, env: Mapping[str, str]) -> list[str]:
    """Return the values that Slurm accepts for a field; empty if they are not known."""
    if name == "account":
        return slurm.accounts(env)
    if name == "qos":
        return slurm.qualities(env)
    if name in ("nodelist", "exclude"):
        return [*filter(None, [slurm.node_names(spec.partition, env)])]
    partitions = [partition for partition in slurm.partitions(env) if partition.up]
    values: list[str] = []
    if name == "gpus_per_node":
        values = [one.gpus or "none" for one in partitions]
    elif name in _SIZES:
        values = [f"{one.name} has {one.size}" for one in partitions]
    elif name in ("partition", "time"):
        values = [f"{one.name} (up to {one.limit})" for one in partitions]
    return list(dict.fromkeys(values))
