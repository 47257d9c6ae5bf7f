"""Explanation of sbatch's refusals: which value of the job is wrong, and what to type instead.

Source of Slurm's texts: src/common/slurm_errno.c and src/sbatch/opt.c. A text that is in no row of
the table is passed on unchanged.
"""

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hpctrain.cluster import slurm
from hpctrain.cluster.texts import nearest
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs.spec import JobSpec

__all__ = ["MEANINGS", "absent", "refused"]

_FIELDS = {field.name: field for field in fields(JobSpec)}
# Pattern for sbatch's text, the names of JobSpec that can fix it, and what Slurm expects.
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
    ("invalid node name|nodelist", ("exclude", "extra"), "names of this cluster's hosts"),
    ("memory", ("memory", "partition"), "what a host of the partition has"),
    ("generic resource|gres|invalid trackable", ("gpus_per_node", "extra"),
     "GPUs that this cluster has, N or TYPE:N"),
    ("feature", ("constraint",), "features of this cluster's hosts: sinfo --format='%n %f'"),
    ("dependency", ("dependency",), "jobs that are still in Slurm's list"),
    ("array", ("array", "sweep"), "fewer indices, or smaller ones (MaxArraySize of Slurm)"),
    ("license", ("extra",), "licenses: scontrol show licenses"),
    ("reservation", ("extra",), "a reservation: scontrol show reservation"),
    ("node configuration is not available|required node not available",
     ("gpus_per_node", "memory", "constraint", "exclude", "cpus_per_task", "tasks_per_node",
      "nodes", "partition"), "less of each, or another partition"),
    ("signal", ("signal",), "a signal that this Slurm supports"),
    ("unrecognized option|invalid --", ("extra",), "options that this sbatch has: sbatch --help"),
)  # fmt: skip
# Errors that no value of the job causes: the same command may work later.
_TEMPORARY = re.compile(
    r"unable to contact|temporarily|timed out|connection (refused|timed)|connect failure"
    r"|communication|protocol authentication|not responding|cannot stat|dns srv"
    r"|configuration (file|source)|munge",
    re.IGNORECASE,
)


def absent(reason: str) -> StartError:
    """Return the error for a missing sbatch, or one that did not answer.

    Args:
        reason: why there is no answer; has "no sbatch" if it is missing.
    """
    if "no sbatch" in reason:
        return StartError(
            "HT815",
            reason,
            "a login node of the cluster, or its Slurm module",
            "module load slurm",
            "hpctrain run …, to start the ranks on this machine",
        )
    return StartError(
        "HT816", reason, "an answer", "check with hpctrain status before you try again"
    )


def refused(message: str, spec: JobSpec, env: Mapping[str, str]) -> StartError | UsageError:
    """Return the error for a refusal by sbatch: its reason, and which value of the job to change.

    Args:
        message: what sbatch printed.
        spec: job that was refused.
        env: environment for Slurm's commands.
    """
    lines = [re.sub(r"^sbatch: (error: )?", "", line.strip()) for line in message.splitlines()]
    reason = "; ".join(line for line in lines if line)
    summary = f"sbatch refused the job: {reason}"
    if not message.strip():
        return StartError("HT817", "sbatch refused the job without a message", "its reason")
    if _TEMPORARY.search(message):
        return StartError(
            "HT816",
            f"sbatch could not submit the job: {reason}",
            "an answer from Slurm; the values of the job are not the cause",
            "the same command again later; scontrol ping shows whether Slurm is up",
        )
    names, expected = _meaning(message, spec)
    if not names:
        return StartError("HT817", summary)
    values, listed = _accepted(names[0], spec, env)
    if listed:
        expected += f": {', '.join(listed)}"
    return UsageError("HT817", summary, expected, *_fixes(names, values, spec))


def _meaning(message: str, spec: JobSpec) -> tuple[list[str], str]:
    """Return the names of the likely cause, if possible set by the job, and what is expected."""
    for pattern, names, expected in MEANINGS:
        if re.search(pattern, message, re.IGNORECASE):
            set_names = [name for name in names if _is_set(spec, name)]
            return set_names or [names[0]], expected
    return [], ""


def _is_set(spec: JobSpec, name: str) -> bool:
    value: Any = getattr(spec, name)
    return value not in (_FIELDS[name].default, None, (), {})


def _fixes(names: list[str], values: list[str], spec: JobSpec) -> list[str]:
    """Return what to type: an option, with a value that Slurm accepts if there is one.

    Args:
        names: names of JobSpec; the values are those of the first one.
        values: values that Slurm accepts, the default one first.
        spec: job that was refused.
    """
    fixes = []
    for name in names[:4]:
        current = str(getattr(spec, name)) if _is_set(spec, name) else ""
        others = [value for value in values if value != current] if name == names[0] else []
        value = nearest(current, others) or (others or [_FIELDS[name].metadata["metavar"]])[0]
        was = f"it is {current}; " if current and name not in ("extra", "sweep") else ""
        option = f"--{name.replace('_', '-')} {value}".rstrip()
        fixes.append(f"{option} ({was}{name} in JOB.toml and JobSpec)")
    return fixes


def _accepted(name: str, spec: JobSpec, env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return values that Slurm accepts, the default one first, and a list of all for the user.

    Both are empty if they are not known.
    """
    try:
        if name in ("account", "qos"):
            values = (slurm.accounts if name == "account" else slurm.qualities)(_user(env), env)
            return values, values
        if name not in ("partition", "time", "gpus_per_node"):
            return [], []
        partitions = [partition for partition in slurm.partitions(env) if partition.up]
    except slurm.NoAnswerError:
        return [], []
    partitions.sort(key=lambda one: (one.name != spec.partition, not one.default))
    if name == "gpus_per_node":
        kinds = list(dict.fromkeys(one.gpus for one in partitions if one.gpus))
        return [kind.removeprefix("gpu:") for kind in kinds] or ["0"], kinds or ["none"]
    listed = list(dict.fromkeys(f"{one.name} (up to {one.limit})" for one in partitions))
    if name == "partition":
        return [one.name for one in partitions], listed
    return [one.limit for one in partitions[:1] if one.limit != "infinite"], listed


def _user(env: Mapping[str, str]) -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return env.get("USER", "")
