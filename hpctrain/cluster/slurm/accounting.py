"""Slurm's accounting, if the site has one: ended jobs, and the accounts of a user."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.slurm.asking import ask, exit_code

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
        label: `JOBID`, or `ARRAYJOBID_TASK`.
        env: environment of the command.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    output = ask(
        ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={label}",
         "--format=JobID,State,ExitCode"], env,
    )  # fmt: skip
    records = []
    for line in output.splitlines():
        try:
            job, state, codes = line.split("|")
            # "CANCELLED by 1000"
            records.append(Ended(job, state.partition(" ")[0], exit_code(codes)))
        except ValueError:
            raise NoAnswerError(f"sacct: no answer that can be read: {line[:200]!r}") from None
    return records


def largest_memory(label: str, env: Mapping[str, str]) -> float:
    """Return the most bytes of memory that a task of a job has used; 0 if that is not recorded.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK`.
        env: environment of the command.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    output = ask(
        ["sacct", "--noheader", "--parsable2", "--noconvert", f"--jobs={label}", "--format=MaxRSS"],
        env,
    )
    sizes = filter(None, map(_SIZE.match, output.split()))
    return max(
        (float(size[1]) * 1024 ** " KMGT".index(size[2] or " ") for size in sizes), default=0
    )


def accounts(user: str, env: Mapping[str, str]) -> list[str]:
    """Return the accounts that a user may use: the default one first, the others sorted.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    names = _show(["associations", f"user={user}", "format=Account"], env)
    default = _show(["user", user, "format=DefaultAccount"], env)
    return sorted(set(names), key=lambda name: (name not in default, name))


def qualities(user: str, env: Mapping[str, str]) -> list[str]:
    """Return the qualities of service (QOS) that a user may ask for, sorted.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    lists = _show(["associations", f"user={user}", "format=QOS"], env)
    return sorted({name for names in lists for name in names.split(",")})


def _show(words: list[str], env: Mapping[str, str]) -> list[str]:
    """Return the lines of `sacctmgr show` that are not empty."""
    output = ask(["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", *words], env)
    return [line.strip() for line in output.splitlines() if line.strip()]
