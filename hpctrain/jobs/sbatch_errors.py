"""Explanation of sbatch's refusals: which value of the job is wrong, and what to type instead.

Source of Slurm's texts: src/common/slurm_errno.c and src/sbatch/opt.c. A text that is in no row of
the table is passed on unchanged.
"""

import os
import pwd
import re
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.cluster import slurm
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs.spec import JobSpec

__all__ = ["MEANINGS", "absent", "refused"]

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
    ("node count|invalid number of nodes|more processors requested",
     ("nodes", "tasks_per_node", "exclude"), "a number that the partition has"),
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
    ("mail-type", ("mail_events",), "events that this Slurm supports"),
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
            "--via local, to run the job on this machine",
        )
    return StartError(
        "HT816", reason, "an answer", "check with hpctrain status before you try again"
    )


def refused(
    message: str, spec: JobSpec, env: Mapping[str, str], option_of: Callable[[str], str]
) -> StartError | UsageError:
    """Return the error for a refusal by sbatch: its reason, and which value of the job to change.

    Args:
        message: standard error of sbatch.
        spec: job that was refused.
        env: environment for Slurm's commands, which list valid values.
        option_of: function that returns the option for a name of JobSpec.
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
    if valid := _valid(names[0], env):
        expected += f": {valid}"
    return UsageError("HT817", summary, expected, *_fixes(names, spec, option_of))


def _meaning(message: str, spec: JobSpec) -> tuple[list[str], str]:
    """Return the names of the likely cause, if possible set by the job, and what is expected."""
    for pattern, names, expected in MEANINGS:
        if re.search(pattern, message, re.IGNORECASE):
            set_names = [name for name in names if _is_set(spec, name)]
            return set_names or [names[0]], expected
    return [], ""


def _is_set(spec: JobSpec, name: str) -> bool:
    value: Any = getattr(spec, name)
    return value not in (None, "", "0", (), {})


def _fixes(names: list[str], spec: JobSpec, option_of: Callable[[str], str]) -> list[str]:
    fixes = []
    for name in names[:4]:
        value = getattr(spec, name)
        current = (
            f", which is {value}" if _is_set(spec, name) and name not in ("extra", "sweep") else ""
        )
        # In Python there is no JOB.toml.
        in_python = option_of(name) == name
        fixes.append(
            f"{name}{current}" if in_python else f"{option_of(name)} ({name} in JOB.toml{current})"
        )
    return fixes


def _valid(name: str, env: Mapping[str, str]) -> str:
    """Return the values that Slurm accepts; empty if they cannot be listed."""
    try:
        if name in ("partition", "time"):
            return "; ".join(
                dict.fromkeys(
                    f"{partition.name} (up to {partition.limit})"
                    for partition in slurm.partitions(env)
                    if partition.up
                )
            )
        if name == "account":
            return ", ".join(slurm.accounts(_user(env), env))
        if name == "gpus_per_node":
            kinds = {partition.gpus for partition in slurm.partitions(env) if partition.gpus}
            return ", ".join(sorted(kinds)) or "none"
    except slurm.NoAnswerError:
        pass
    return ""


def _user(env: Mapping[str, str]) -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return env.get("USER", "")
