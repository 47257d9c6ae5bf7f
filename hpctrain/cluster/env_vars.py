"""The names of the variables that launchers and schedulers put into a process.

Launchers read them, and what starts new processes scrubs them: a rank that inherits somebody
else's is the oldest way to train in the wrong world.
"""

import re
from collections.abc import Mapping

from hpctrain.errors import ContradictionError

__all__ = ["number", "of_the_job", "of_the_network", "scrubbed"]

# `int` alone would take 1_0 and the digits of other scripts; no launcher writes twenty digits.
_NUMBER = re.compile(r"-?[0-9]{1,20}\Z")

# hpctrain's own variables, as a person or a launcher sets them.
LAUNCHER = "HPCTRAIN_LAUNCHER"  # overrides detection
MAIN_ADDRESS = "HPCTRAIN_MAIN_ADDRESS"  # where rank 0 is
MAIN_PORT = "HPCTRAIN_MAIN_PORT"  # the first port to try there
HOSTNAME = "HPCTRAIN_HOSTNAME"  # the name this host goes by at the rendezvous
INTERFACE = "HPCTRAIN_INTERFACE"  # the network interface that ranks talk over
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # the same, for gloo alone
SECRET = "HPCTRAIN_SECRET"  # noqa: S105  what only the ranks of one start know
START = "HPCTRAIN_START"  # what `hpctrain run` calls one start of its ranks
RUN = "HPCTRAIN_RUN"  # the run directory
DATA = "HPCTRAIN_DATA"  # the folder with data sets
CACHE = "HPCTRAIN_CACHE"  # the folder for everything that can be made again
VERDICT = "HPCTRAIN_VERDICT"  # where rank 0 writes how the run ended
EVIDENCE = "HPCTRAIN_EVIDENCE"  # the folder in which ranks leave how they failed
STOP = "HPCTRAIN_STOP"  # the file that asks the run to save and to leave
SCRATCH = "HPCTRAIN_SCRATCH"  # where a host has its copies of code and environment

# What a start writes into its ranks, as against what a person sets for all of them.
_OF_ONE_RANK = (
    "HPCTRAIN_RANK",
    "HPCTRAIN_WORLD_SIZE",
    "HPCTRAIN_LOCAL_RANK",
    "HPCTRAIN_LOCAL_WORLD_SIZE",
    "HPCTRAIN_NODE_RANK",
    "HPCTRAIN_NUM_NODES",
    "HPCTRAIN_HOSTS",
    LAUNCHER,
    HOSTNAME,
    START,
    MAIN_ADDRESS,
    MAIN_PORT,
    VERDICT,
    EVIDENCE,
    STOP,
    SCRATCH,
)

SCRUB_NAMES = frozenset(
    {
        *_OF_ONE_RANK,
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "HYDI_CONTROL_FD",
        "I_MPI_HYDRA_UUID",
        "PRTE_LAUNCHED",
    }
)
SCRUB_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "HOROVOD_",
    "MV2_",
    "MPISPAWN_",
    "PALS_",
    "JSM_",
    "FLUX_",
    "SUBMITIT_",
    "LSB_",
    "PBS_",
)

# What a scheduler says of a job, and not of one of its tasks: it holds for whatever is started in
# the job. `allocation` reads these.
OF_THE_JOB = (
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_JOB_END_TIME",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_SUBMIT_DIR",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    "SLURM_GPUS_ON_NODE",
    "LSB_JOBID",
    "LSB_JOBINDEX",
    "PBS_JOBID",
    "FLUX_JOB_ID",
)
_NETWORK_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
_SECRETIVE = re.compile(r"SECRET|TOKEN|PASS|KEY|CRED|AUTH")
# Where the site's Slurm is: no job's variable, though it looks like one.
_SITE_NAMES = frozenset({"SLURM_CONF"})


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment without what any launcher or scheduler put there."""
    return {
        name: value
        for name, value in env.items()
        if name in _SITE_NAMES or (name not in SCRUB_NAMES and not name.startswith(SCRUB_PREFIXES))
    }


def of_the_job(env: Mapping[str, str]) -> dict[str, str]:
    """What the environment says of the scheduler's job."""
    return {name: env[name] for name in OF_THE_JOB if name in env}


def of_the_network(env: Mapping[str, str]) -> dict[str, str]:
    """The settings of the libraries that carry the numbers, without what may be a password."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(_NETWORK_PREFIXES) and not _SECRETIVE.search(name)
    }


def number(env: Mapping[str, str], name: str) -> int | None:
    """The whole number in a variable; None where it is unset or empty.

    Raises:
        ContradictionError: it holds something else.
    """
    text = env.get(name, "")
    if not text:
        return None
    if not _NUMBER.match(text):
        fix = f"unset {name}" if name.isidentifier() else f"take {name} out of the command"
        raise ContradictionError(f"{name}={text[:200]!r}", f"{name} is a whole number", fix)
    return int(text)
