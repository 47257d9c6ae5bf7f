"""Allocation: the job that a scheduler gave, apart from who started the ranks in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.env_vars import number

__all__ = ["Allocation", "detect"]

# The schedulers whose jobs are known by name alone: id, and index in an array. LSF numbers the
# tasks of an array from 1 and gives other jobs the index 0; PBS has the index in the id.
# Sources: "Environment variables" of IBM Spectrum LSF's reference; PBS Professional's reference
# guide, chapter "Environment Variables"; flux-environment(7).
_OTHERS = (
    ("lsf", "LSB_JOBID", "LSB_JOBINDEX"),
    ("pbs", "PBS_JOBID", ""),
    ("flux", "FLUX_JOB_ID", ""),
)

_GPUS = re.compile(r"[0-9]{1,4}\Z")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler says about the job. Without a scheduler there is none.

    Attributes:
        scheduler: "slurm", "lsf", "pbs" or "flux".
        job_id: the scheduler's name for the job; of an array task, its own number.
        array_job_id, array_task: the array's id and the index in it, where there is one.
        restart_count: how often the job was requeued.
        end_time: seconds since the epoch at which the time limit strikes, where it is known.
        submit_dir: the folder in which the job was submitted.
        tasks: the number of tasks that the step, or outside of one the job, is to start; where
            nobody gave a number one for each node; None where it is not known.
        gpus: the GPUs of this host that belong to the job, where it is known.
    """

    scheduler: str
    job_id: str
    array_job_id: str | None = None
    array_task: int | None = None
    restart_count: int = 0
    end_time: int | None = None
    submit_dir: str | None = None
    tasks: int | None = None
    gpus: int | None = None

    @property
    def label(self) -> str:
        """`JOBID`, or `ARRAYJOBID_TASK` as Slurm's own tools print it."""
        if self.array_task is None:
            return self.job_id
        return f"{self.array_job_id or self.job_id}_{self.array_task}"


def detect(env: Mapping[str, str]) -> Allocation | None:
    """Read the job from its scheduler's variables; None outside of one.

    Raises:
        ContradictionError: a variable that should hold a number does not.
    """
    if env.get("SLURM_JOB_ID"):
        return _slurm(env)
    for scheduler, name, index in _OTHERS:
        if env.get(name):
            return Allocation(scheduler, env[name], array_task=number(env, index) or None)
    return None


def _slurm(env: Mapping[str, str]) -> Allocation:
    """Source: the sections INPUT and OUTPUT ENVIRONMENT VARIABLES of sbatch(1) and srun(1)."""
    # In a step srun sets SLURM_NTASKS to the step's own number.
    tasks = number(env, "SLURM_NTASKS") or number(env, "SLURM_JOB_NUM_NODES")
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    return Allocation(
        scheduler="slurm",
        job_id=env["SLURM_JOB_ID"],
        array_job_id=env.get("SLURM_ARRAY_JOB_ID"),
        array_task=number(env, "SLURM_ARRAY_TASK_ID"),
        restart_count=number(env, "SLURM_RESTART_COUNT") or 0,
        end_time=number(env, "SLURM_JOB_END_TIME"),
        submit_dir=env.get("SLURM_SUBMIT_DIR"),
        tasks=tasks,
        gpus=int(gpus) if _GPUS.match(gpus) else None,
    )
