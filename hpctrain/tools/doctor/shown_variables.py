"""Environment variables that the report may show.

An unknown variable may hold a password. So the report shows only the names of a fixed list, and the
settings of the network libraries whose names do not suggest a secret.
"""

from collections.abc import Mapping

from hpctrain.cluster import env_vars
from hpctrain.cluster.texts import printable

__all__ = ["shown"]

_NAMES = (
    *env_vars.OF_THE_JOB,
    *env_vars.WORLD,
    env_vars.LAUNCHER, env_vars.HOSTNAME, env_vars.INTERFACE,
    env_vars.MAIN_ADDRESS, env_vars.MAIN_PORT,
    env_vars.RUN_DIR, env_vars.DATA, env_vars.CACHE, env_vars.LEAST_TIMEOUT,
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "MKL_NUM_THREADS",
    "SLURM_CPUS_PER_TASK", "SLURM_JOB_PARTITION", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE",
    "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID",
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
)  # fmt: skip


def shown(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may be shown, by name."""
    found = {name: env[name] for name in _NAMES if name in env} | env_vars.of_the_network(env)
    return {name: printable(value) for name, value in sorted(found.items())}
