"""The names of the variables that launchers and schedulers put into a process.

Launchers read them, and what starts new processes scrubs them: a rank that inherits somebody
else's is the oldest way to train in the wrong world.
"""

from collections.abc import Mapping

__all__ = ["scrubbed"]

# hpctrain's own variables, as a person or a launcher sets them.
LAUNCHER = "HPCTRAIN_LAUNCHER"  # overrides detection
MAIN_ADDRESS = "HPCTRAIN_MAIN_ADDRESS"  # where rank 0 is
MAIN_PORT = "HPCTRAIN_MAIN_PORT"  # the first port to try there
HOSTNAME = "HPCTRAIN_HOSTNAME"  # the name this host goes by at the roll call
START = "HPCTRAIN_START"  # what `hpctrain run` calls one start of its ranks
RUN = "HPCTRAIN_RUN"  # the run directory
DATA = "HPCTRAIN_DATA"  # the folder with data sets
CACHE = "HPCTRAIN_CACHE"  # the folder for everything that can be made again
VERDICT = "HPCTRAIN_VERDICT"  # where rank 0 writes how the run ended

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
    "PALS_",
    "JSM_",
    "FLUX_",
    "SUBMITIT_",
)


# Where the site's Slurm is: no job's variable, though it looks like one.
_SITE_NAMES = frozenset({"SLURM_CONF"})


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment without what any launcher or scheduler put there."""
    return {
        name: value
        for name, value in env.items()
        if name in _SITE_NAMES or (name not in SCRUB_NAMES and not name.startswith(SCRUB_PREFIXES))
    }
