"""`hpctrain run --as …` sets the variables that the real launcher sets for the same layout."""

import environments
import pytest

from hpctrain.cli.run_options import AS
from hpctrain.launch import rank_environment

# Variables of the machine on which the real launcher ran, and those of processes that are not
# simulated: a daemon's address, its folders, its protocol.
OF_THE_MACHINE = {
    "slurm": {
        *("SLURM_CONF", "SLURM_WORKING_CLUSTER", "SLURM_TASK_PID"),
        *("SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT"),
        *("SRUN_DEBUG", "SLURM_NTASKS_PER_NODE", "SLURM_NODE_ALIASES", "ENVIRONMENT"),
    },
    "torchrun": {"SLURM_CONF", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"},
    "mpi": {
        *("SLURM_CONF", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_FILE_LOCATION"),
        # No training script was found to read these.
        *("OMPI_APP_CTX_NUM_PROCS", "OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX"),
    },
    "horovod": {"SLURM_CONF", "NCCL_SOCKET_IFNAME"},
}
PREFIXES = {
    "mpi": ("OMPI_MCA_", "PMIX_"),
    "torchrun": ("SLURM", "SRUN"),
    "slurm": ("SLURM_JOB_CPUS_PER_NODE_PACK_GROUP",),  # salloc sets it in an ordinary job too
}
NAMED = {"mpi": {"OMPI_MCA_orte_num_nodes", "PMIX_RANK", "PMIX_NAMESPACE"}}
# Variables that differ in each job, and one that is simulated differently: no agent has a store.
DIFFERENT = {
    *("SLURM_JOB_ID", "SLURM_JOBID", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "MASTER_PORT"),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_GLOO_IFACE"),
    *("OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE", "OMPI_UNIVERSE_SIZE"),
    *("SLURM_JOB_NAME", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_UMASK"),
    *("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST"),
    *("SLURM_JOB_GID", "SLURM_JOB_UID", "SLURM_JOB_USER", "SLURM_LAUNCH_NODE_IPADDR"),
    # Names of nodes that lead to this machine.
    *("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURMD_NODENAME"),
    "SLURM_TOPOLOGY_ADDR",
}


@pytest.mark.parametrize(
    ("style", "name"),
    [
        ("slurm", "srun-block"),
        ("slurm", "srun-uneven"),
        ("torchrun", "srun-torchrun"),
        ("mpi", "openmpi-ssh"),
        ("horovod", "horovodrun"),
        ("horovod", "horovodrun-two-hosts"),
    ],
)
def test_run_as_gives_a_rank_the_variables_of_the_real_launcher(style, name):
    document = environments.load(name)
    hosts = list(dict.fromkeys(document["layout"]))
    counts = [document["layout"].count(host) for host in hosts]
    simulated = rank_environment.environs(counts, {}, AS[style], (), None)
    assert len(simulated) == len(document["ranks"])
    for rank, true in enumerate(document["ranks"]):
        own = simulated[rank]
        expected = {
            variable: value
            for variable, value in true["env"].items()
            if variable in NAMED.get(style, ())
            or (
                variable not in OF_THE_MACHINE[style]
                and not variable.startswith(PREFIXES.get(style, ()) or "-")
            )
        }
        assert expected.keys() <= own.keys()
        added = own.keys() - expected.keys() - {"OMP_NUM_THREADS", "PYTHONUNBUFFERED"}
        # srun sets the last one if it has the option.
        expected_more = {"HPCTRAIN_MAIN_ADDRESS", "HPCTRAIN_HOSTNAME", "HPCTRAIN_SECRET"}
        assert added <= expected_more | {"SLURM_NTASKS_PER_NODE"}
        if len(hosts) > 1:  # a single host keeps its own name
            compared = expected.keys() - DIFFERENT
            assert {v: own[v] for v in compared} == {v: expected[v] for v in compared}
