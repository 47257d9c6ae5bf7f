"""The names of the variables that launchers and schedulers set for a process.

The launcher classes read them. Code that starts new ranks removes them: a rank that inherits
variables of another start would train in the wrong world.
"""

import json
import re
from collections.abc import Mapping

from hpctrain.errors import ContradictionError

__all__ = ["number", "of_the_job", "of_the_network", "scrubbed"]

# `int` alone accepts 1_0 and non-ASCII digits. No launcher writes more than twenty digits.
_NUMBER = re.compile(r"-?[0-9]{1,20}\Z")

# hpctrain's own variables, set by the user or by a launcher.
LAUNCHER = "HPCTRAIN_LAUNCHER"  # launcher to use, without detection
MAIN_ADDRESS = "HPCTRAIN_MAIN_ADDRESS"  # address of rank 0's host
MAIN_PORT = "HPCTRAIN_MAIN_PORT"  # first port to try at this address
HOSTNAME = "HPCTRAIN_HOSTNAME"  # name of this host at the rendezvous
INTERFACE = "HPCTRAIN_INTERFACE"  # network interface for the ranks
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # network interface for gloo alone
LEAST_TIMEOUT = "HPCTRAIN_LEAST_TIMEOUT"  # shortest learnt time-out in seconds
SECRET = "HPCTRAIN_SECRET"  # noqa: S105  secret shared by the ranks of one start
START = "HPCTRAIN_START"  # id of one start of ranks by `hpctrain run`
LAUNCHED = "HPCTRAIN_LAUNCHED"  # when `hpctrain run` has begun, in Unix seconds
RUN_DIR = "HPCTRAIN_RUN_DIR"  # run directory
DATA = "HPCTRAIN_DATA"  # folder with the job's own copy of the data
CACHE = "HPCTRAIN_CACHE"  # folder for files that can be created again
EXIT_STATUS_FILE = "HPCTRAIN_EXIT_STATUS_FILE"  # exit status file, written by rank 0
EVIDENCE = "HPCTRAIN_EVIDENCE"  # folder for the ranks' failure records
STOP_FILE = "HPCTRAIN_STOP_FILE"  # file that makes the run save and exit
SCRATCH = "HPCTRAIN_SCRATCH"  # local copies of code and environment
COMMIT = "HPCTRAIN_COMMIT"  # commit of frozen code, with -dirty if its files differ from it
FRESH = "HPCTRAIN_FRESH_INTERPRETERS"  # 1: no rank is forked from a process that has imported torch
AGENT = "HPCTRAIN_AGENT"  # what the agents of `hpctrain run` do
STEP = "HPCTRAIN_STEP"  # variables of srun that the step of the agents must not have, as JSON
BEGAN = "HPCTRAIN_BEGAN"  # variables that a rank got after it had waited, as JSON

# Variables of a process that a person uses: of `srun --pty`, and of a kernel of Jupyter.
PTY_PORT = "SLURM_PTY_PORT"
KERNEL = "JPY_PARENT_PID"
OF_A_SHELL = (PTY_PORT, KERNEL)

# The fields of a `World`, for a rank of `hpctrain run`.
WORLD = (
    *("HPCTRAIN_RANK", "HPCTRAIN_WORLD_SIZE", "HPCTRAIN_LOCAL_RANK", "HPCTRAIN_LOCAL_WORLD_SIZE"),
    *("HPCTRAIN_NODE_RANK", "HPCTRAIN_NUM_NODES", "HPCTRAIN_HOSTS"),
)

# Variables that a start sets for its ranks. The user sets the other HPCTRAIN_* variables.
_OF_ONE_RANK = (
    *(*WORLD, LAUNCHER, HOSTNAME, START, LAUNCHED, MAIN_ADDRESS, MAIN_PORT),
    *(EXIT_STATUS_FILE, EVIDENCE, STOP_FILE, SCRATCH, COMMIT, AGENT, STEP, BEGAN),
)
_OF_LAUNCHERS = (
    # torchrun, and env://
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    # MPI
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDI_CONTROL_FD", "I_MPI_HYDRA_UUID"),
    "PRTE_LAUNCHED",
    # What horovodrun sets; the other HOROVOD_* variables are settings of the user. Source:
    # horovod/runner/gloo_run.py and horovod/runner/mpi_run.py, Horovod 0.28.1.
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER"),
    *("HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE", "HOROVOD_ELASTIC"),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
)
SCRUB_NAMES = frozenset((*_OF_ONE_RANK, *_OF_LAUNCHERS))
SCRUB_PREFIXES = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MV2_"),
    *("MPISPAWN_", "PALS_", "JSM_", "FLUX_", "SUBMITIT_", "LSB_", "PBS_"),
)

# Variables of a scheduler that describe a job and not one of its tasks. They apply to every
# process of the job. `cluster.job` reads most of them.
_OF_OTHER_JOBS = (
    *("LSB_JOBID", "LSB_JOBINDEX", "PBS_JOBID", "PBS_ARRAY_INDEX"),
    *("FLUX_JOB_ID", "FLUX_ENCLOSING_ID"),
)
# Of Slurm, all but those that connect one task to its srun, or bind it. Where SLURM_NODELIST and
# SLURM_STEP_ID are set, Open MPI 4 takes itself for a task of srun, and aborts. Source: OUTPUT
# ENVIRONMENT VARIABLES of srun(1), Slurm 22.05 to 25.05.
_OF_SLURM = re.compile(
    r"SLURMD?_(?!SRUN_COMM|STEP_ID|STEP_LAUNCHER_PORT|STEP_RESV|TASK_PID|PTY|PMI|MPI_)\w+"
)
_BINDS = re.compile(r"SLURMD?_((CPU|MEM|GPU|TRES)_BIND\w*|EXPORT_ENV)")
_NETWORK_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
_SECRETIVE = re.compile(r"SECRET|TOKEN|PASS|KEY|CRED|AUTH")
# The site's Slurm configuration, which does not belong to a job despite its prefix.
_SITE_NAMES = frozenset({"SLURM_CONF"})


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment without the variables of launchers and schedulers."""
    return {
        name: value
        for name, value in env.items()
        if name in _SITE_NAMES or (name not in SCRUB_NAMES and not name.startswith(SCRUB_PREFIXES))
    }


def of_the_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that describe the scheduler's job, as a task of srun has them."""
    of_slurm = {
        name: value
        for name, value in {**env, **json.loads(env.get(STEP, "{}"))}.items()
        if _OF_SLURM.fullmatch(name) and not _BINDS.fullmatch(name)
    }
    return of_slurm | {name: env[name] for name in _OF_OTHER_JOBS if name in env}


def of_the_network(env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the communication libraries, without possible passwords."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(_NETWORK_PREFIXES) and not _SECRETIVE.search(name)
    }


def number(env: Mapping[str, str], name: str) -> int | None:
    """Return the integer in a variable; None if it is unset or empty.

    Raises:
        ContradictionError: the value is not an integer.
    """
    text = env.get(name, "")
    if not text:
        return None
    if not _NUMBER.match(text):
        key = "HT103.variable-not-integer" if name.isidentifier() else "HT103.option-not-integer"
        raise ContradictionError(key, name=name, value=text[:200])
    return int(text)
