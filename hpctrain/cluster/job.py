"""The job of a scheduler, independent of the launcher that started the ranks in it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.env_vars import number

__all__ = ["Allocation", "detect", "submit_folder"]

# Schedulers of which only the job id and the array index are read. LSF numbers the tasks of an
# array from 1 and gives other jobs the index 0; PBS includes the index in the id.
# A batch script of Flux is in an instance of its own, whose own job has this script.
# Sources: "Environment variables" of IBM Spectrum LSF's reference; PBS Professional's reference
# guide, chapter "Environment Variables"; flux-environment(7).
_OTHERS = (
    ("lsf", "LSB_JOBID", "LSB_JOBINDEX"),
    ("pbs", "PBS_JOBID", ""),
    ("flux", "FLUX_JOB_ID", ""),
    ("flux", "FLUX_ENCLOSING_ID", ""),
)

_GPUS = re.compile(r"[0-9]{1,4}\Z")


@dataclass(frozen=True, slots=True)
class Allocation:
    """Facts about the scheduler's job.

    Attributes:
        scheduler: "slurm", "lsf", "pbs" or "flux".
        job_id: id of the job; for an array task, the id of this task.
        array_job_id: id of the array, or None.
        array_task: index in the array, or None.
        restart_count: number of times that the job was requeued.
        end_time: end of the time limit, in seconds since the epoch, or None if unknown.
        tasks: number of tasks of the step, or outside of a step of the job; one for each node if
            the number was not given; None if unknown.
        gpus: number of GPUs of this host that belong to the job, or None if unknown.
    """

    scheduler: str
    job_id: str
    array_job_id: str | None = None
    array_task: int | None = None
    restart_count: int = 0
    end_time: int | None = None
    tasks: int | None = None
    gpus: int | None = None

    @property
    def label(self) -> str:
        """The job's label, `JOBID` or `ARRAYJOBID_TASK`, in the format of Slurm's tools."""
        if self.array_task is None:
            return self.job_id
        return f"{self.array_job_id or self.job_id}_{self.array_task}"


def detect(env: Mapping[str, str]) -> Allocation | None:
    """Read the job from the scheduler's variables; return None outside of a job.

    Raises:
        ContradictionError: the value of a numeric variable is not a number.
    """
    if env.get("SLURM_JOB_ID"):
        return _slurm(env)
    for scheduler, name, index in _OTHERS:
        if env.get(name):
            # Flux takes its ids also in ASCII.
            job_id = env[name].replace("ƒ", "f")
            return Allocation(scheduler, job_id, array_task=number(env, index) or None)
    return None


def submit_folder(env: Mapping[str, str]) -> Path:
    """Return the folder in which the job of Slurm was submitted, else the current one."""
    return Path(env.get("SLURM_SUBMIT_DIR") or os.getcwd())


def _slurm(env: Mapping[str, str]) -> Allocation:
    """Read the Slurm job from the variables.

    Source: the sections INPUT and OUTPUT ENVIRONMENT VARIABLES of sbatch(1) and srun(1).
    """
    # In a step srun sets SLURM_NTASKS to the step's number of tasks.
    tasks = number(env, "SLURM_NTASKS") or number(env, "SLURM_JOB_NUM_NODES")
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    return Allocation(
        scheduler="slurm",
        job_id=env["SLURM_JOB_ID"],
        array_job_id=env.get("SLURM_ARRAY_JOB_ID"),
        array_task=number(env, "SLURM_ARRAY_TASK_ID"),
        restart_count=number(env, "SLURM_RESTART_COUNT") or 0,
        end_time=number(env, "SLURM_JOB_END_TIME"),
        tasks=tasks,
        gpus=int(gpus) if _GPUS.match(gpus) else None,
    )
