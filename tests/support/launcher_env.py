"""Environments of ranks, as launchers set them."""

from hpctrain.cluster.launchers import LAUNCHERS
from hpctrain.cluster.world import World

# The variables of a batch script, set by sbatch: 4 tasks on 2 hosts.
BATCH = {
    "SLURM_CLUSTER_NAME": "maple",
    "SLURM_JOB_ID": "815",
    "SLURM_JOBID": "815",
    "SLURM_JOB_NAME": "bash",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_SUBMIT_DIR": "/home/ada",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}
# The same with those of srun: task 3, alone on the second host.
STEP = {
    **BATCH,
    "SLURM_DISTRIBUTION": "block",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "3",
}
# The first rank of the second agent; two agents with two ranks each.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
}
ENV_LAUNCHER = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
HPCTRAIN = {
    "HPCTRAIN_START": "77",
    "HPCTRAIN_RANK": "2",
    "HPCTRAIN_WORLD_SIZE": "3",
    "HPCTRAIN_LOCAL_RANK": "0",
    "HPCTRAIN_LOCAL_WORLD_SIZE": "1",
    "HPCTRAIN_NODE_RANK": "1",
    "HPCTRAIN_NUM_NODES": "2",
    "HPCTRAIN_HOSTS": "node1,node2",
    "HPCTRAIN_MAIN_ADDRESS": "127.0.0.1",
    "HPCTRAIN_HOSTNAME": "node2",
}


def changed(env, **changes):
    """Return the environment with some variables set, or unset by None."""
    merged = {**env, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def launcher_variables(name, **changes):
    """Return the variables of a launcher in rank 1 of 4, 3 of them on its host; None unsets."""
    (launcher,) = (one for one in LAUNCHERS if one.name == name)
    world = World(1, 4, 1, 3, 0, 2, ("node1", "node2"), name)
    return changed(launcher.environ(world, (3, 1), 77), **changes)
