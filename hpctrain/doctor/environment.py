"""Which variables of the environment may be shown: those of a list, and no other.

A variable that nobody thought of may hold a password, so a name has to be known to be shown.
"""

from collections.abc import Mapping

from hpctrain import gpus, variables
from hpctrain.doctor.findings import plain

__all__ = ["shown"]

_NAMES = frozenset(
    {
        *variables.OF_THE_JOB,
        gpus.CUDA,
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        "MKL_NUM_THREADS",
        "SLURM_CPUS_PER_TASK",
        "SLURM_JOB_PARTITION",
        "SLURM_LOCALID",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_NODEID",
        "SLURM_PROCID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "HPCTRAIN_RANK",
        "HPCTRAIN_WORLD_SIZE",
        "HPCTRAIN_LOCAL_RANK",
        "HPCTRAIN_LOCAL_WORLD_SIZE",
        "HPCTRAIN_NODE_RANK",
        "HPCTRAIN_NUM_NODES",
        "HPCTRAIN_HOSTS",
        "HPCTRAIN_INTERFACE",
        variables.LAUNCHER,
        variables.MAIN_ADDRESS,
        variables.MAIN_PORT,
        variables.HOSTNAME,
        variables.RUN,
        variables.DATA,
        variables.CACHE,
    }
)


def shown(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be shown, by name."""
    found = {name: env[name] for name in _NAMES if name in env} | variables.of_the_network(env)
    return {name: plain(value) for name, value in sorted(found.items())}
