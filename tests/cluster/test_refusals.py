"""Refused starts: idle tasks, and processes that are not a rank; their messages and fixes."""

import dataclasses
import re
import shlex

import environments
import pytest
from launcher_env import BATCH as JOB
from launcher_env import changed

from hpctrain import arguments
from hpctrain.arguments import Options
from hpctrain.cluster import launchers
from hpctrain.cluster.launchers import Process, survey
from hpctrain.cluster.launchers.ancestors import LAUNCHING, Ancestor
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError

# Four tasks on two hosts: one task of a step in the job.
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
}
# The launchers that set all that a rank needs.
NAMES = [one.name for one in launchers.LAUNCHERS if "local_rank" in one.variables]


def launcher_variables(name, size, nodes=1):
    """Return the variables of a launcher in rank 0, for ranks spread evenly over hosts."""
    (launcher,) = (one for one in launchers.LAUNCHERS if one.name == name)
    local = size // nodes
    hosts = tuple(f"node{n + 1}" for n in range(nodes))
    world = World(0, size, 0, local, 0, nodes, hosts, name)
    return launcher.environ(world, (local,) * nodes, 77)


def last_fix(error):
    """Return the variable that the last fix of an error sets."""
    name, value = re.search(r"env (HPCTRAIN_LAUNCHER)=(\w+) COMMAND\Z", error.fixes[-1]).groups()
    return {name: value}


def test_idle_tasks_without_srun_are_refused_with_the_command():
    process = Process(("python", "train.py", "--name", "two words"))
    error = survey(JOB, process).waste
    assert isinstance(error, UsageError)
    assert error.found == ("this process trains alone, and 3 of the 4 tasks of job 815 are idle")
    assert error.code == "HT110"
    assert "srun" in error.fixes[0]
    assert "python train.py --name 'two words'" in error.fixes[0]
    assert survey({**JOB, **last_fix(error)}, process).waste is None
    assert survey({**JOB, **last_fix(error)}, process).world.launcher == "none"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"SLURM_NTASKS": None, "SLURM_JOB_NUM_NODES": "1"},
        {"SLURM_NTASKS": None, "SLURM_JOB_NUM_NODES": None},
        {"SLURM_NTASKS": "", "SLURM_JOB_NUM_NODES": ""},
        {"SLURM_NTASKS": "0", "SLURM_JOB_NUM_NODES": "0"},
    ],
)
def test_job_of_one_task_without_srun_is_accepted(changes):
    assert survey(changed(JOB, **changes)).waste is None


def test_idle_second_host_is_refused():
    assert "1 of the 2 tasks of job 815" in survey(changed(JOB, SLURM_NTASKS=None)).waste.found


def test_idle_tasks_of_an_array_job_are_named_by_array_id():
    env = {**JOB, "SLURM_ARRAY_JOB_ID": "800", "SLURM_ARRAY_TASK_ID": "7"}
    assert "job 800_7" in survey(env).waste.found


# The shell of salloc on a login host, for a job of one task. slurmd sets nothing there.
ALLOCATED = changed(
    JOB,
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")),
    SLURM_JOB_NODELIST="node7",
    SLURM_JOB_NUM_NODES="1",
    SLURM_NNODES="1",
    SLURM_TASKS_PER_NODE="1",
)


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("python train.py --name 'two words'", "train.py --name 'two words'"),
        ("python -m package.train --lr 1", "-m package.train --lr 1"),
        ("python -u train.py", "-- python -u train.py"),
        ("", "SCRIPT"),
    ],
)
def test_training_on_the_login_host_of_an_allocation_is_refused(typed, fix):
    process = Process(tuple(shlex.split(typed)), host="login2.cluster")
    error = survey(ALLOCATED, process).waste
    assert (error.code, error.exit_code) == ("HT118", 2)
    assert "this node is login2.cluster, and job 815 has node7" in error.found
    assert error.fixes[:2] == (f"hpctrain run {fix}", f"srun hpctrain run {fix}")
    start = survey({**ALLOCATED, **last_fix(error)}, process)
    assert (start.waste, start.world.launcher) == (None, "none")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("slurm", "hpctrain")])
def test_ranks_of_a_launcher_on_the_login_host_of_an_allocation_are_refused(name):
    env = {**ALLOCATED, **launcher_variables(name, 2)}
    error = survey(env, Process(host="login2")).waste
    assert error.code == "HT118"
    assert survey({**env, **last_fix(error)}, Process(host="login2")).waste is None


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        # With LaunchParameters=use_interactive_step the shell is on a host of the job.
        ({"SLURMD_NODENAME": "node7"}, "node7"),
        ({}, "node7"),
        ({}, "node7.cluster"),
        ({"SLURM_JOB_NODELIST": "node7.cluster"}, "node7"),
        # slurm.conf may give a host another name than it has itself (NodeHostname).
        ({"SLURMD_NODENAME": "node7"}, "cn0007"),
        ({"SLURM_JOB_ID": None}, "login2"),
        ({"SLURM_JOB_NODELIST": None}, "login2"),
        # Ranks that `hpctrain run` has started where its user wanted it.
        (launcher_variables("hpctrain", 1), "login2"),
    ],
)
def test_training_on_a_host_of_the_job_is_accepted(changes, host):
    assert survey(changed(ALLOCATED, **changes), Process(host=host)).waste is None


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("slurm", "hpctrain")])
def test_fewer_ranks_than_tasks_are_refused_under_every_launcher(name):
    env = {**JOB, **launcher_variables(name, 2)}
    error = survey(env).waste
    assert f"{name} started ranks for 2 of the 4 tasks of job 815" in error.found
    assert error.code == "HT110"
    assert error.fixes[:2] == ("start 4 ranks", "ask for as many tasks as ranks: 2")
    assert survey({**env, **last_fix(error)}).waste is None
    assert survey({**env, **last_fix(error)}).world.world_size == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [4, 8])
def test_as_many_ranks_as_tasks_or_more_are_accepted(name, size):
    assert survey({**JOB, **launcher_variables(name, size)}).waste is None


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_srun_torchrun_standalone_in_every_task_is_refused(size):
    """Each task would start a separate training with all ranks on its host."""
    env = {**STEP, **launcher_variables("torchrun", size)}
    error = survey(env).waste
    assert "4 tasks of a step of job 815 each started torchrun" in error.found
    assert "several trainings at once" in error.found
    assert error.code == "HT111"
    assert "--rdzv-endpoint" in error.fixes[0]
    assert survey({**env, **last_fix(error)}).waste is None


def test_srun_torchrun_with_one_rendezvous_is_accepted():
    step = {**STEP, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert survey({**step, **launcher_variables("torchrun", 8, nodes=2)}).waste is None
    assert survey({**step, **launcher_variables("torchrun", 2, nodes=2)}).waste is None


def test_no_tasks_are_idle_outside_of_a_job():
    for name in NAMES:
        if name != "slurm":
            assert survey(launcher_variables(name, 2)).waste is None


@pytest.mark.parametrize("program", sorted(LAUNCHING))
def test_launched_process_without_variables_is_refused(program):
    process = Process(launched_by=Ancestor(4711, program, LAUNCHING[program]))
    error = survey({}, process).stray
    assert isinstance(error, UsageError)
    assert error.code == "HT108"
    assert f"descends from {program} (pid 4711)" in error.found
    assert LAUNCHING[program] in error.expected
    assert survey(last_fix(error), process).stray is None
    assert survey(last_fix(error), process).world.launcher == "none"


def test_launched_process_with_variables_is_accepted():
    for name in NAMES:
        process = Process(launched_by=Ancestor(4711, "orted", "openmpi"))
        assert survey(launcher_variables(name, 2), process).stray is None


def test_batch_shell_without_variables_is_accepted():
    process = Process(launched_by=Ancestor(4711, "slurmstepd", "slurm"))
    assert survey(JOB, process).stray is None
    assert "slurmstepd" in survey({}, process).stray.found
    # In the same job, processes of mpirun without its variables are refused.
    process = Process(launched_by=Ancestor(4712, "orted", "openmpi"))
    assert "orted" in survey(JOB, process).stray.found


@pytest.mark.parametrize("name", ["none", *NAMES])
def test_multiprocessing_child_with_the_rank_of_its_parent_is_refused(name):
    env = {} if name == "none" else launcher_variables(name, 2)
    error = survey(env, Process(inherited=env)).stray
    assert isinstance(error, UsageError)
    assert "multiprocessing" in error.found
    assert "rank 0" in error.found
    assert error.code == "HT109"
    assert error.fixes[:2] == (
        "hpctrain run --nproc-per-node N SCRIPT",
        "hpctrain.spawn(FUNCTION, N)",
    )
    alone = {**env, **last_fix(error)}
    assert survey(alone, Process(inherited=env)).stray is None
    assert survey(alone, Process(inherited=env)).world.world_size == 1


@pytest.mark.parametrize("inherited", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_multiprocessing_child_with_its_own_rank_is_accepted(inherited, rank):
    """Accept also the first of several children, whose rank 0 is also that of a lone parent."""
    place = {"RANK": rank, "WORLD_SIZE": "3", "LOCAL_RANK": rank, "MASTER_PORT": "29500"}
    env = {**inherited, **place}
    start = survey(env, Process(inherited=inherited))
    assert (start.stray, start.world.rank, start.world.world_size) == (None, int(rank), 3)


def test_multiprocessing_child_with_only_a_local_rank_is_refused():
    before = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    assert survey({**before, "LOCAL_RANK": "1"}, Process(inherited=before)).stray is not None


def test_detect_never_refuses_idle_tasks():
    assert launchers.detect(JOB).launcher == "none"
    assert launchers.detect({**STEP, **launcher_variables("torchrun", 2)}).world_size == 2


ENV_LAUNCHER = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_PORT": "29500"}


def test_local_rank_argument_of_torch_distributed_launch_is_read():
    process = Process(("python", "train.py", "--local_rank", "2"))
    for env in (
        ENV_LAUNCHER,
        {**ENV_LAUNCHER, "LOCAL_RANK": "2"},
        {**ENV_LAUNCHER, "LOCAL_RANK": ""},
    ):
        start = survey(env, process)
        assert (start.world.local_rank, start.stray, start.waste) == (2, None, None)
    # Ignored without the variables: a script may have an argument of that name.
    assert survey({}, process).world == World(0, 1, 0, 1, 0, 1, launcher="none")
    assert survey(STEP, process).world.local_rank == 0


def test_local_rank_of_the_variable_has_precedence_over_the_argument():
    process = Process(("python", "train.py", "--local_rank=2"))
    assert survey({**ENV_LAUNCHER, "LOCAL_RANK": "1"}, process).world.local_rank == 1
    assert survey(ENV_LAUNCHER, process).world.local_rank == 2


@pytest.mark.parametrize(
    "argument", [["--local_rank", "2"], ["--local_rank=2"], ["--local-rank=2"], []]
)
def test_local_rank_argument_is_accepted_and_hidden_by_options(argument):
    parsed = arguments.options().parse_args(["--seed", "5", *argument])
    options = Options.of(parsed, {})
    assert options.seed == 5
    assert "local_rank" not in {field.name for field in dataclasses.fields(options)}
    assert "local" not in arguments.options().format_help()


def test_rank_variables_without_master_port_are_refused():
    place = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}
    for env in (place, {**place, "HPCTRAIN_LAUNCHER": "env"}):
        start = survey(env)
        assert start.world.rank == 1  # the rank is known, but not the address of rank 0
        assert "no MASTER_PORT" in start.stray.found
        assert start.stray.code == "HT102"
    assert survey({**place, "MASTER_PORT": "29500"}).stray is None
    assert survey({**place, "HPCTRAIN_MAIN_PORT": "29500"}).stray is None
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert survey(alone).stray is None


def test_horovodrun_elastic_is_refused_with_the_command():
    env = {**launcher_variables("horovodrun", 2), "HOROVOD_ELASTIC": "1"}
    error = survey(env, Process(("python", "train.py", "--lr", "0.1"))).stray
    assert isinstance(error, UsageError)
    assert error.found.startswith("HOROVOD_ELASTIC=1: horovodrun has --min-np")
    assert error.code == "HT112"
    assert error.fixes == (
        "in a Slurm batch script: exec hpctrain run --elastic train.py --lr 0.1",
    )
    assert survey({**env, "HPCTRAIN_LAUNCHER": "horovodrun"}).stray is not None
    assert survey({**env, "HOROVOD_ELASTIC": "0"}).stray is None
    # The rule does not apply to ranks of another launcher.
    assert survey({**launcher_variables("slurm", 2), "HOROVOD_ELASTIC": "1"}).stray is None


def test_batch_script_of_one_task_may_clean_its_environment():
    def stray_process(**started):
        title = "slurmstepd: [815.batch]"
        found = Ancestor(7, "slurmstepd", "slurm", title, started=started)
        return survey({}, Process(launched_by=found)).stray

    assert stray_process() is None
    assert stray_process(SLURM_JOB_ID="815", SLURM_NTASKS="1") is None
    assert "environment" in stray_process(SLURM_JOB_ID="815", SLURM_NTASKS="4").found
    step = Ancestor(7, "slurmstepd", "slurm", "slurmstepd: [815.0]", started={})
    assert survey({}, Process(launched_by=step)).stray is not None


def test_torchrun_from_an_interactive_srun_shell_is_accepted():
    env = {**launcher_variables("slurm", 4), **launcher_variables("torchrun", 4)}
    assert "several trainings" in survey(env).waste.found
    assert survey({**env, "SLURM_PTY_PORT": "40000"}).waste is None  # srun --pty


def in_a_shell_of_srun(typed, *task):
    """Return the start of a command in the terminal of a task of `srun -n4 --pty`."""
    env = {**environments.load("srun-block")["ranks"][0]["env"], "SLURM_PTY_PORT": "40000"}
    return survey(env, Process(tuple(shlex.split(typed)), terminal=True, task=task))


@pytest.mark.parametrize(
    "task",
    [
        ("bash", ""),  # as /proc shows it
        ("/bin/bash", "-il"),
        ("-zsh",),
        ("fish", "--login"),
        ("/venv/bin/python3.12", "-u"),
        ("/venv/bin/python", "/venv/bin/ipython"),
    ],
)
def test_command_in_a_shell_of_srun_is_no_rank(task):
    """The other tasks have no terminal: their shells end at once, and no rank would come."""
    start = in_a_shell_of_srun("python train.py --lr 1", *task)
    assert (start.world.launcher, start.world.world_size) == ("none", 1)
    assert (start.waste.code, start.waste.fixes[0]) == ("HT110", "hpctrain run train.py --lr 1")
    assert "the other 3 of the 4 tasks" in start.waste.found


@pytest.mark.parametrize(
    "task",
    [
        ("python", "train.py", ""),
        ("python", "-um", "train"),
        ("bash", "train.sh", ""),
        ("bash", "-lc", "python train.py"),
        ("apptainer", "exec", "image.sif", "python", "train.py"),
        (),  # it is hidden
    ],
    ids=str,
)
def test_task_of_srun_with_a_terminal_is_a_rank(task):
    start = in_a_shell_of_srun("python train.py", *task)
    assert (start.world.launcher, start.world.rank, start.waste) == ("slurm", 0, None)


def test_ranks_of_torchrun_in_a_shell_of_srun_are_ranks():
    env = {**STEP, "SLURM_PTY_PORT": "40000", **launcher_variables("torchrun", 4)}
    start = survey(env, Process(terminal=True, task=("bash",)))
    assert (start.world.launcher, start.waste, start.stray) == ("torchrun", None, None)


def test_variables_of_an_outer_launcher_are_refused():
    """Test a rank of torchrun that starts mpirun, or submits a job."""
    for program, inner in (("mpirun", "openmpi"), ("slurmstepd", "slurm")):
        env = {**launcher_variables("torchrun", 2), **launcher_variables(inner, 2)}
        process = Process(launched_by=Ancestor(7, program, inner))
        error = survey(env, process).stray
        assert f"{program} (pid 7) started this process" in error.found
        assert error.code == "HT104"
        named = survey({**env, "HPCTRAIN_LAUNCHER": inner}, process)
        assert (named.world.launcher, named.stray) == (inner, None)
        agent = Process(launched_by=Ancestor(7, "torchrun", "torchrun"))
        assert survey(env, agent).stray is None
    submitit = {**launcher_variables("slurm", 2), **launcher_variables("submitit", 2)}
    step = Process(launched_by=Ancestor(7, "slurmstepd", "slurm"))
    assert survey(submitit, step).stray is None  # its process has no name that identifies it
