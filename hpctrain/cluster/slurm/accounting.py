"""What Slurm's accounting knows, where a site has one: jobs of old, and who may use what."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = ["Ended", "accounts", "ended"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A job as the accounting keeps it.

    Attributes:
        label: 70, or 70_3.
        word: its state; one of those in which it has ended, unless accounting is late.
        code: exit code, and 128 and the signal that ended it.
    """

    label: str
    word: str
    code: int


def ended(label: str, env: Mapping[str, str]) -> list[Ended]:
    """What became of a job, or of all tasks of an array; its last start counts.

    Args:
        label: `JOBID`, or `ARRAYJOBID_TASK`.
        env: for the command.

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
    """The accounts that a user may name, sorted; the default one first.

    Raises:
        NoAnswerError: there is no accounting, or it did not answer.
    """
    argv = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show"]
    own = ask([*argv, "associations", f"user={user}", "format=Account"], env).split("\n")
    default = ask([*argv, "user", user, "format=DefaultAccount"], env).strip()
    return sorted({name for name in own if name}, key=lambda name: (name != default, name))
