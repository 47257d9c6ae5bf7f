"""Selection of an environment's variables, without values of the machine of the capture."""

from collections.abc import Mapping

from environments.record import MARK
from hpctrain.cluster import env_vars

# The texts in the files instead of this machine's folders and user.
HOME = "/home/ada"
WORK = f"{HOME}/project"
USER = {
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOB_USER": "ada",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GID": "1000",
}

# Variables of launchers and schedulers that `hpctrain.cluster.env_vars` does not have.
PREFIXES = (
    *env_vars.SCRUB_PREFIXES,
    *("HPCTRAIN_", "SALLOC_", "PMI", "MPI_", "MPIR_", "MPIEXEC_", "HYDRA", "HYDI", "I_MPI_"),
    *("PRTE_", "LSB_", "LS_", "LSF_", "PBS_", "FLUX_", "CUDA_VISIBLE_", "TORCH_", "NCCL_"),
)
NAMES = env_vars.SCRUB_NAMES | {
    "ENVIRONMENT",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
}
OURS = {MARK, "HPCTRAIN_TEST_CLUSTER"}
OF_THE_MACHINE = "I_MPI_INFO_"


def kept(env: Mapping[str, str], neutral: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of launchers, by name.

    Args:
        env: all variables of a process.
        neutral: replacements for texts of this machine, in this order.
    """
    found = {}
    for name in sorted(env):
        launchers = name in NAMES or name.startswith(PREFIXES)
        if not launchers or name in OURS or name.startswith(OF_THE_MACHINE):
            continue
        value = env[name]
        for ours, theirs in neutral.items():
            value = value.replace(ours, theirs)
        found[name] = USER.get(name, value)
    return found
