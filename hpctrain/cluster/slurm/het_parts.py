"""Parts of a heterogeneous job, each with its own hosts and number of tasks.

Source: "Heterogeneous Job Support" of Slurm's documentation; captured environments.
"""

from collections.abc import Mapping

from hpctrain.cluster.env_vars import number
from hpctrain.cluster.hostlist import expand

# Lists and counts that srun joins for the tasks of a step, and sbatch gives for each part only.
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
_SUMS = ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS")


def hosts_of_parts(env: Mapping[str, str]) -> list[list[str]]:
    """Return the hosts of each part of the job; empty for a job without parts.

    Args:
        env: environment of the batch script or of the allocation's shell.
    """
    return [expand(text) for text in _values(env, "SLURM_JOB_NODELIST")]


def ids_of_parts(env: Mapping[str, str]) -> list[str]:
    """Return the job ids of the parts; of a job without parts, its id."""
    return _values(env, "SLURM_JOB_ID") or [env["SLURM_JOB_ID"]]


def of_all_parts(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the hosts and tasks of all parts as those of the job."""
    whole = dict(env)
    for name in _LISTS:
        if values := _values(env, name):
            whole[name] = ",".join(values)
    for name in _SUMS:
        if values := _values(env, name):
            whole[name] = str(sum(map(int, values)))
    return whole


def _values(env: Mapping[str, str], name: str) -> list[str]:
    """Return the values of a variable in all parts; empty if a part lacks it.

    A job that was submitted in a heterogeneous one has inherited the variables of its parts.
    """
    if env.get("SLURM_JOB_ID_HET_GROUP_0") != env.get("SLURM_JOB_ID"):
        return []
    count = number(env, "SLURM_HET_SIZE") or 0
    values = [env.get(f"{name}_HET_GROUP_{part}", "") for part in range(count)]
    return values if all(values) else []
