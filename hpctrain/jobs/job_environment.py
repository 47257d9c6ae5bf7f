"""Environment in which a job is submitted: that of this process, without another job's. Pure."""

import os
from collections.abc import Mapping

from hpctrain.cluster import env_vars
from hpctrain.jobs.site import VARIABLES
from hpctrain.jobs.spec import JobSpec

__all__ = ["environ"]

# A shell with one of these variables is inside of a job.
_JOB_ID_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
# Variables from the scheduler and the script of that job, besides those of launchers.
_OUTER_JOB_VARIABLES = (
    *(env_vars.RUN_DIR, env_vars.SECRET),
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
)


def environ(spec: JobSpec, env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment to submit a job with, and notes on the user's variables left out.

    SBATCH_* would overrule the lines of the script. Inside of a job, no variable of that job is
    passed on.
    """
    clean = {name: value for name, value in env.items() if not name.startswith("SBATCH_")}
    ignored = sorted({name for name in env if name.startswith("SBATCH_")} - {*VARIABLES.values()})
    notes = [f"{', '.join(ignored)}: ignored; set it by an option"] if ignored else []
    if any(env.get(name) for name in _JOB_ID_VARIABLES):
        clean = env_vars.scrubbed(clean)
        scratch = env.get(env_vars.SCRATCH)
        clean = {
            name: _without(scratch, value) if scratch else value
            for name, value in clean.items()
            if name not in _OUTER_JOB_VARIABLES
        }
    if clean.get(env_vars.RUN_DIR) and (spec.run_dir or spec.indices):
        reason = "the job sets its own" if spec.run_dir else "each task has its own"
        notes.append(f"{env_vars.RUN_DIR}={clean.pop(env_vars.RUN_DIR)}: ignored, as {reason}")
    return clean, notes


def _without(scratch: str, path: str) -> str:
    """Return a search path without entries in the copies of that job, which are removed later."""
    entries = path.split(os.pathsep)
    return os.pathsep.join(one for one in entries if not f"{one}/".startswith(f"{scratch}/"))
