"""Names of log files, as sbatch expands them."""

import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster import slurm
from hpctrain.cluster.hostlist import expand
from hpctrain.errors import UsageError

__all__ = ["filled", "of_forgotten", "of_job"]

_PATTERN = re.compile(r"%(?:%|(?P<width>\d*)(?P<letter>[A-Za-z]))")


def filled(pattern: str, values: Mapping[str, str]) -> str:
    """Expand a pattern as Slurm does.

    Source: "filename pattern" of sbatch(1).

    Args:
        pattern: name with patterns, such as logs/%x-%j.log.
        values: values of the letters; numbers are padded as the pattern requires.

    Raises:
        LookupError: the pattern has an unknown letter; the error holds that part.
    """

    def expanded(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        if match["letter"] not in values:
            raise LookupError(match[0])
        text = values[match["letter"]]
        return text.zfill(min(int(match["width"] or 0), 10)) if text.isdigit() else text

    return _PATTERN.sub(expanded, pattern)


def of_job(job: slurm.QueuedJob) -> Path | None:
    """Return the log of a job; None if its name is unknown, or unknown until the job has hosts."""
    if "[" in job.label:  # pending tasks of an array
        return None
    values = {
        "A": job.array, "a": job.task, "j": job.number, "J": job.number, "n": "0", "s": "batch",
        "t": "0", "u": job.user, "x": job.name,
    }  # fmt: skip
    try:
        if job.hosts:
            values["N"] = expand(job.hosts)[0].partition(".")[0]
        return Path(job.folder, filled(job.log, values)) if job.log else None
    except (LookupError, UsageError):
        return None


def of_forgotten(label: str) -> Path | None:
    """Return the log of a job that Slurm has forgotten, by its default names; None without it."""
    if not slurm.is_label(label):
        return None
    name = f"*-{label}.log"
    return next((path for folder in ("runs", ".") for path in Path(folder).glob(name)), None)
