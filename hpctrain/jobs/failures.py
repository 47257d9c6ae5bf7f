"""Why a job has failed: from its run, or from the end of its log."""

import re
from pathlib import Path

from hpctrain.cluster.texts import printable, shortened
from hpctrain.errors import exit_codes
from hpctrain.jobs.run_progress import Progress, end_of

__all__ = ["FAILED", "cause", "in_words"]

_LONGEST = 500
#: How a run ends that has failed.
FAILED = (exit_codes.STATUS[exit_codes.FAILED], exit_codes.STATUS[exit_codes.GIVEN_UP])
# The last line of `hpctrain run`, or an error of hpctrain, with the rank's number before it.
_CONCLUSION = re.compile(
    r"(?:[0-9]+: )?hpctrain: (?:error: (.+)|(given up: .+)"
    r"|job \S+ is not started again: (.+)"
    r"|(rank [0-9]+ .*(?:failed first|ended), .+?)(?:\. Its last lines:)?\Z)"
)
# Lines that are no cause: what Slurm adds when the ranks have ended, and what hpctrain advises.
_NO_CAUSE = re.compile(
    r"srun: |slurmstepd|\s*\Z"
    r"|(?:[0-9]+: )?(?:  (?:expected|fix|or|more): |hpctrain: its checkpoints)"
)


def in_words(state: str, code: int) -> str:
    """Return the state of a job in words: Slurm's own, but "stopped" for a stopped job.

    Args:
        state: state as Slurm names it.
        code: exit code of the job.
    """
    if state == "FAILED" and code == exit_codes.STOPPED:
        return exit_codes.STATUS[exit_codes.STOPPED]
    return printable(state).lower()


def cause(run: Progress | None, log: Path | None, code: int | None, last_line: bool) -> str:
    """Return in one line which rank failed first, on which host, with which error; else empty.

    For a job that was stopped, return by what.

    Args:
        run: progress of the job's run. It has the cause only if the job had a Session.
        log: log of the job.
        code: exit code of the job; None if it is unknown. A run with another end is an earlier one.
        last_line: whether the last line of the log counts if no other line has the cause.
    """
    status = exit_codes.STATUS.get(code or exit_codes.FAILED, FAILED[0])
    if run is not None and run.reason and (code is None or run.status == status):
        text = run.reason
    else:
        tail = end_of(log) if log is not None else b""
        lines = tail.decode(errors="replace").splitlines()
        conclusions = [match for match in map(_CONCLUSION.match, lines) if match]
        others = [line for line in lines if not _NO_CAUSE.match(line)]
        text = "".join(others[-1:]) if last_line else ""
        if conclusions:
            text = conclusions[-1][conclusions[-1].lastindex or 0]
    return shortened(printable(text.strip()), _LONGEST)
