"""What a job has used, and the options that would have been enough."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable
from hpctrain.jobs.job_status import JobStatus
from hpctrain.jobs.units import slurm_seconds, slurm_time
from hpctrain.rundir import RunDirectory

__all__ = ["Used", "lines", "measure"]

# What the next job should ask for more than this one has used.
_MORE = 1.25
_LEAST_SECONDS = 600
_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class Used:
    """What the ranks of a run have recorded about themselves.

    Attributes:
        hosts: host of each rank, at the last start.
        memory: most bytes of a rank's process, by rank; loader processes are not counted.
        gpu_memory: most bytes of a rank's GPU; 0 without one.
        data_wait: share of the time of the steps in which the mean rank waited for data; None if
            it is not known.
    """

    hosts: Sequence[str]
    memory: Sequence[float]
    gpu_memory: float
    data_wait: float | None

    @property
    def on_a_host(self) -> float:
        """Most bytes of all ranks of one host."""
        totals: Counter[str] = Counter()
        for host, size in zip(self.hosts, self.memory, strict=True):
            totals[host] += math.ceil(size)
        return max(totals.values())


def measure(run: Path) -> Used | None:
    """Return what the ranks of the last start have used; None if they have recorded nothing."""
    hosts: Sequence[str] = ()
    memory: Sequence[float] = ()
    gpu, waited, seconds = 0.0, 0.0, 0.0
    for line in RunDirectory(run).each(RunDirectory(run).timings):
        try:
            sizes, gpus, waits = (
                [float(number) for number in line[name]]
                for name in ("memory", "gpu_memory", "data")
            )
            names = [str(host) for host in line["hosts"]]
            steps, took = float(line["steps"]), _seconds(line["step_times"])
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        numbers = (*sizes, *gpus, *waits, steps, took)
        if not sizes or len(sizes) != len(names) or not all(map(math.isfinite, numbers)):
            continue
        if names != hosts:  # another start
            hosts, memory, gpu, waited, seconds = names, [0.0] * len(sizes), 0.0, 0.0, 0.0
        memory = [max(a, b) for a, b in zip(memory, sizes, strict=True)]
        gpu = max(gpu, *gpus)
        waited += steps * sum(waits) / len(sizes)
        seconds += took
    if not memory:
        return None
    return Used(hosts, memory, gpu, waited / seconds if seconds else None)


def _seconds(buckets: Mapping[str, Any]) -> float:
    """Return the seconds of steps in a histogram of timings.jsonl, at the middle of each bucket."""
    return math.fsum(
        count * 10 ** ((int(name) + 0.5) / 20) / 1e6 for name, count in buckets.items()
    )


def lines(status: JobStatus, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return lines about what a job has used, each with its name.

    Args:
        status: status of the job and of its run.
        env: environment of Slurm's commands.
    """
    found = []
    job = status.queued
    seconds = slurm_seconds(job.used) if job is not None and job.state != "PENDING" else None
    if job is not None and seconds:
        nodes = int(job.nodes) if job.nodes.isdigit() else 1
        found.append(
            ("used:", f"{nodes * seconds / 3600:.2f} host hours: {nodes} × {job.used} (squeue)")
        )
    accounted = _accounted(status, env)
    if accounted:
        found.append(("memory:", f"{accounted} (sacct)"))
    used = measure(status.run_dir) if status.run_dir is not None else None
    if used is not None:
        top = max(range(len(used.memory)), key=used.memory.__getitem__)
        text = f"at most {used.memory[top] / _GB:.2f} GB of a rank, "
        text += f"rank {top} on {printable(used.hosts[top])}; "
        text += f"{used.on_a_host / _GB:.2f} GB of the ranks of a host"
        found.append(("ranks:", f"{text} (timings.jsonl)"))
        if used.gpu_memory:
            found.append(("GPU:", f"at most {used.gpu_memory / _GB:.1f} GB (timings.jsonl)"))
        if used.data_wait is not None:
            found.append(("data:", f"{used.data_wait:.0%} of the steps waited for (timings.jsonl)"))
    options = []
    if seconds and job is not None and job.state == "COMPLETED" and not job.restarts:
        options.append(f"--time {slurm_time(str(-(-_enough(seconds) // 60)))}")
    if used is not None:
        options.append(f"--memory {math.ceil(used.on_a_host * _MORE / _GB)}G")
    if options:
        found.append(("enough:", f"{shlex.join(' '.join(options).split())} (a quarter more)"))
    return found


def _enough(seconds: int) -> int:
    return max(_LEAST_SECONDS, math.ceil(seconds * _MORE))


def _accounted(status: JobStatus, env: Mapping[str, str]) -> str:
    """Return the largest memory of a task in Slurm's accounting; empty without it."""
    if not status.label or not slurm.is_label(status.label):
        return ""
    try:
        size = slurm.largest_memory(status.label, env)
    except slurm.NoAnswerError:
        return ""
    return f"at most {size / _GB:.2f} GB of a task" if size else ""
