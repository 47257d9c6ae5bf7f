"""Queries of Slurm's accounting, if the site has one: ended jobs, and the accounts of a user."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = ["Ended", "accounts", "ended"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The record of a job in Slurm's accounting.

    Attributes:
        label: label of the job, such as 70 or 70_3.
        word: state of the job; one of the end states, unless the accounting is late.
        code: exit code, or 128 plus the signal that ended the job.
    """

    label: str
    word: str
    code: int


def ended(label: str, env: Mapping[str, str]) -> list[Ended]:
    """Return the records of a job, or of all tasks of an array, from their last start.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK`.
        env: environment of the command.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    said = ask(
        ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={label}",
         "--format=JobID,State,ExitCode"], env,
    )  # fmt: skip
    found = []
    for line in said.splitlines():
        try:
            job, word, codes = line.split("|")
            code, cause = (int(number) for number in codes.split(":"))
        except ValueError:
            raise NoAnswerError(f"sacct: no answer that can be read: {line[:200]!r}") from None
        # "CANCELLED by 1000"
        found.append(Ended(job, word.partition(" ")[0], code or (128 + cause if cause else 0)))
    return found


def accounts(user: str, env: Mapping[str, str]) -> list[str]:
    """Return the accounts that a user may use: the default one first, the others sorted.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    argv = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show"]
    own = ask([*argv, "associations", f"user={user}", "format=Account"], env).split("\n")
    default = ask([*argv, "user", user, "format=DefaultAccount"], env).strip()
    return sorted({name for name in own if name}, key=lambda name: (name != default, name))
