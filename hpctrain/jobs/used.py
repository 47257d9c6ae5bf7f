"""What a job has used, by Slurm and by its run, and the options that would have been enough."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster import slurm
from hpctrain.jobs.job_status import JobStatus
from hpctrain.jobs.units import slurm_seconds
from hpctrain.rundir import RunDirectory, used
from hpctrain.rundir.used import Used

__all__ = ["JobUse", "of_job"]

_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class JobUse:
    """What a job has used; what is not known is None.

    Attributes:
        nodes: number of its hosts.
        seconds: seconds since its start.
        time: these seconds, as squeue shows them.
        task_memory: most bytes of a task in Slurm's accounting.
        ranks: what the ranks of its run have recorded.
        enough: options that would have been enough, with their values.
    """

    nodes: int | None
    seconds: int | None
    time: str
    task_memory: float | None
    ranks: Used | None
    enough: Mapping[str, str]

    def lines(self) -> list[tuple[str, str]]:
        """Return lines about it, each with its name."""
        found = []
        if self.nodes and self.seconds:
            hours = self.nodes * self.seconds / 3600
            found.append(("used:", f"{hours:.2f} host hours: {self.nodes} × {self.time} (squeue)"))
        if self.task_memory:
            found.append(("memory:", f"at most {self.task_memory / _GB:.2f} GB of a task (sacct)"))
        if self.ranks is not None:
            lines = used.lines(self.ranks)
            found += [(f"{name}:", f"{text} (timings.jsonl)") for name, text in lines]
        if self.enough:
            found.append(("enough:", used.options_text(self.enough)))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `hpctrain status --used --json`."""
        seconds = (self.nodes or 0) * (self.seconds or 0)
        return {
            "host_hours": round(seconds / 3600, 4) or None,
            "memory_of_a_task": self.task_memory,
            "ranks": self.ranks and self.ranks.as_json(),
            "enough": {
                name: self.enough.get(f"--{name.replace('_', '-')}")
                for name in ("time", "memory", "cpus_per_task")
            },
        }


def of_job(status: JobStatus, env: Mapping[str, str]) -> JobUse:
    """Return what a job has used.

    Args:
        status: status of the job and of its run.
        env: environment of Slurm's commands.
    """
    job = status.queued
    started = job is not None and job.state != "PENDING"
    seconds = slurm_seconds(job.used) if job is not None and started else None
    ranks = None
    if status.run_dir is not None:
        directory = RunDirectory(status.run_dir).current()
        try:
            ranks = used.measure(directory.each(directory.timings))
        except OSError:  # the run of another user
            ranks = None
    ended = job is not None and job.state == "COMPLETED" and not job.restarts
    return JobUse(
        nodes=job.nodes if job is not None else None,
        seconds=seconds,
        time=job.used if job is not None else "",
        task_memory=slurm.largest_memory(status.label, env) or None,
        ranks=ranks,
        enough=used.enough(ranks, seconds if ended else None),
    )
