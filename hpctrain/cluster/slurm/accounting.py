"""Slurm's accounting: ended jobs, and the accounts of this user.

Many sites have none, and every caller can do without. So each result is empty if the accounting is
missing or does not answer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.slurm.asking import ask, exit_code
from hpctrain.cluster.slurm.job_state import is_label
from hpctrain.cluster.texts import user_name

_SIZE = re.compile(r"([0-9.]+)([KMGT]?)\Z")


@dataclass(frozen=True, slots=True)
class Ended:
    """The record of a job in Slurm's accounting.

    Attributes:
        label: label of the job, such as 70 or 70_3.
        state: state of the job; one of the end states, unless the accounting is late.
        code: exit code, or 128 plus the signal that ended the job.
    """

    label: str
    state: str
    code: int


def ended(label: str, env: Mapping[str, str]) -> list[Ended]:
    """Return the records of a job, or of all tasks of an array, from their last start.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK`; any other text is the label of no job.
        env: environment of the command.
    """
    rows = _of_job(label, ["--allocations", "--format=JobID,State,ExitCode"], env)
    try:
        # "CANCELLED by 1000"
        return [
            Ended(job, state.partition(" ")[0], exit_code(codes))
            for job, state, codes in (row.split("|") for row in rows)
        ]
    except ValueError:  # no answer that can be read
        return []


def largest_memory(label: str, env: Mapping[str, str]) -> float:
    """Return the most bytes of memory that a task of a job has used; 0 if that is not recorded.

    Args:
        label, env: as for `ended`.
    """
    sizes = filter(None, map(_SIZE.match, _of_job(label, ["--noconvert", "--format=MaxRSS"], env)))
    return max(
        (float(size[1]) * 1024 ** " KMGT".index(size[2] or " ") for size in sizes), default=0
    )


def accounts(env: Mapping[str, str]) -> list[str]:
    """Return the accounts that this user may use: the default one first, the others sorted."""
    names = _show(["associations", f"user={user_name()}", "format=Account"], env)
    default = _show(["user", user_name(), "format=DefaultAccount"], env)
    return sorted(set(names), key=lambda name: (name not in default, name))


def qualities(env: Mapping[str, str]) -> list[str]:
    """Return the qualities of service (QOS) that this user may ask for, sorted."""
    lists = _show(["associations", f"user={user_name()}", "format=QOS"], env)
    return sorted({name for names in lists for name in names.split(",")})


def _of_job(label: str, options: Sequence[str], env: Mapping[str, str]) -> list[str]:
    return _lines(["sacct", f"--jobs={label}", *options], env) if is_label(label) else []


def _show(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    return _lines(["sacctmgr", "--readonly", "show", *words], env)


def _lines(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the lines of a command's answer that are not empty."""
    try:
        output = ask([command[0], "--noheader", "--parsable2", *command[1:]], env)
    except NoAnswerError:
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]
