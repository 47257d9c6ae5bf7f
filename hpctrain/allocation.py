"""Allocation: the job that a scheduler gave, apart from who started the ranks in it."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import ContradictionError

__all__ = ["Allocation", "detect"]


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler says about the job. Without a scheduler there is none.

    Attributes:
        scheduler: "slurm".
        job_id: the scheduler's name for the job; of an array task, its own number.
        array_job_id, array_task: the array's id and the index in it, where there is one.
        restart_count: how often the job was requeued.
        end_time: seconds since the epoch at which the time limit strikes, where it is known.
        submit_dir: the folder in which the job was submitted.
        tasks: the number of tasks that the job may start, where it is known.
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
    """Read the job from Slurm's variables; None outside of one.

    Source: the sections INPUT and OUTPUT ENVIRONMENT VARIABLES of sbatch(1) and srun(1).

    Raises:
        ContradictionError: a variable that should hold a number does not.
    """
    job_id = env.get("SLURM_JOB_ID")
    if not job_id:
        return None

    def number(name: str) -> int | None:
        text = env.get(name)
        if not text:
            return None
        try:
            return int(text)
        except ValueError:
            raise ContradictionError(
                f"{name}={text!r}", "a whole number", f"unset {name}"
            ) from None

    gpus = env.get("SLURM_GPUS_ON_NODE")
    return Allocation(
        scheduler="slurm",
        job_id=job_id,
        array_job_id=env.get("SLURM_ARRAY_JOB_ID"),
        array_task=number("SLURM_ARRAY_TASK_ID"),
        restart_count=number("SLURM_RESTART_COUNT") or 0,
        end_time=number("SLURM_JOB_END_TIME"),
        submit_dir=env.get("SLURM_SUBMIT_DIR"),
        tasks=number("SLURM_NTASKS"),
        gpus=int(gpus) if gpus and gpus.isdecimal() else None,
    )
