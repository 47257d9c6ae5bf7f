"""The arguments and the ancestors of a process, by which a launcher is detected."""

import os
import subprocess
import sys

import pytest
from launcher_env import launcher_variables

from hpctrain.cluster import system
from hpctrain.cluster.launchers import survey
from hpctrain.cluster.launchers.ancestors import (
    LAUNCHING,
    LOCAL_RANK_ARGUMENT,
    PARENT,
    Ancestor,
    Process,
)

# Prints the nearest ancestor that is a launcher, and the variables that launchers read.
SHOWS = [
    *(sys.executable, "-c"),
    "from hpctrain.cluster.launchers import Process; p = Process.current(); a = p.launched_by; "
    "print(a and a.program, a and a.launcher, p.inherited, p.facts().keys())",
]
SHELL = '#!/bin/sh\n"$@"\nexit $?\n'
# The same in Python, and a program that drops its first argument.
RUNS = "import subprocess, sys\nsys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
SKIPS = RUNS.replace("[1:]", "[2:]")


def launched_by(*command):
    done = subprocess.run([*map(str, command), *SHOWS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def program(tmp_path):
    """Return a function that makes a program, which runs the command given to it and waits."""

    def make(name, text=SHELL):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    return make


@pytest.mark.parametrize(
    "name", ["orted", "prterun", "hydra_pmi_proxy", "mpiexec.openmpi", "torchrun", "flux-shell"]
)
def test_launcher_ancestor_is_found_by_name(name, program):
    assert launched_by(program(name))[:2] == [name, LAUNCHING[name]]


def test_nearest_launcher_ancestor_behind_shells_counts(program):
    shell = program("wrapper.sh")
    assert launched_by(program("orted"), shell, program("torchrun"), shell)[0] == "torchrun"
    assert launched_by(program("torchrun"), shell, program("orted"), shell)[0] == "orted"


def test_slurmstepd_process_title_is_read_up_to_its_colon():
    run = ["bash", "-c", 'exec -a "slurmstepd: [815.0]" bash -c \'"$@"; exit\' bash "$@"', "bash"]
    assert launched_by(*run)[:2] == ["slurmstepd", "slurm"]


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun"],
        ["-u", "torchrun"],
        ["-X", "utf8", "-W", "ignore", "./torchrun"],
        ["-Xutf8", "-Eu", "torchrun"],
        ["-m", "torch.distributed.run"],
        ["-u", "-m", "torch.distributed.launch"],
        ["-um", "torch.distributed.run"],
        ["-mtorch.distributed.run"],
    ],
    ids=" ".join,
)
def test_torchrun_is_found_behind_python_options(command, program):
    for name in ("torchrun", "torch/distributed/run.py", "torch/distributed/launch.py"):
        program(name, RUNS)
    for package in ("torch", "torch/distributed"):
        program(f"{package}/__init__.py", "")
    assert launched_by(sys.executable, *command)[1] == "torchrun"


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "torchrun"],
        ["-X", "torchrun", "train.py", "-"],
        ["-m", "train", "torchrun"],
        ["-c", SKIPS, "torchrun"],
    ],
    ids=lambda command: command[0],
)
def test_argument_named_torchrun_is_not_a_launcher(command, program):
    program("train.py", SKIPS)
    assert launched_by(sys.executable, *command) == launched_by()


def test_process_name_cut_within_a_utf8_letter_is_read(program):
    """Cut a letter of two bytes in half: the kernel keeps 15 bytes of a name."""
    assert len("entraînement-".encode()) == 14
    path = program("entraînement-élan")
    assert launched_by(program("orted"), path)[0] == "orted"


def test_process_without_launcher():
    launched = Process.current().launched_by  # srun may run the tests themselves
    name, launcher = (launched.program, launched.launcher) if launched else (None, None)
    assert launched_by()[:3] == [str(name), str(launcher), "None"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--local_rank", "2"], "2"),
        (["--local-rank", "2"], "2"),
        (["--local_rank=2"], "2"),
        (["--local-rank=2", "--local-rank=3"], "2"),
        (["--width", "64", "--local-rank=2", "--local-ranks"], "2"),
        (["--local-rank="], ""),
        (["--local-rank"], ""),
        (["--local-rank=a\nb"], "a\nb"),
        (["--local-ranks=2"], None),
        (["--no-local-rank", "local_rank", "2"], None),
        ([], None),
    ],
)
def test_local_rank_argument_forms(arguments, value):
    facts = Process(("python", "train.py", *arguments)).facts()
    assert facts == ({} if value is None else {LOCAL_RANK_ARGUMENT: value})


def test_launcher_process_id_is_recorded():
    """Two starts of a launcher without an id of its own differ in the launcher's process id."""
    process = Process(launched_by=Ancestor(815, "hydra_pmi_proxy", "hydra"))
    assert process.facts() == {PARENT: "hydra_pmi_proxy/815"}


# --- a job that a rank of another job has submitted

OWN = {"SLURM_JOB_ID": "815", "SLURM_NTASKS": "1", "A": "x", "HPCTRAIN_STOP_FILE": "/outer/stop"}


def in_step(name, terminal=False, **started):
    """Return a process below the slurmstepd of a step, which started its child with variables."""
    title = f"slurmstepd: [815.{name}]"
    launched_by = Ancestor(7, "slurmstepd", "slurm", title, started=started)
    return Process(launched_by=launched_by, terminal=terminal)


@pytest.mark.parametrize("name", ["hpctrain", "torchrun", "horovodrun", "openmpi", "hydra"])
def test_batch_script_has_no_variables_of_the_rank_that_submitted_it(name):
    # torchrun sets one more variable, which describes no rank.
    env = {**OWN, **launcher_variables(name, TORCH_NCCL_ASYNC_ERROR_HANDLING=None)}
    assert survey(env, in_step("batch")).world.rank == 1
    assert in_step("batch", **env).own(env) == OWN
    world = survey(env, in_step("batch", **env)).world
    assert (world.launcher, world.world_size) == ("none", 1)


OF_A_KERNEL, OF_A_SHELL = {"JPY_PARENT_PID": "7"}, {"SLURM_PTY_PORT": "40000"}


@pytest.mark.parametrize("step", ["batch", "0"])
def test_job_that_a_notebook_or_a_shell_has_submitted_is_neither(step):
    """Include tasks of srun in the shell of `srun --pty`."""
    env = {**OWN, **OF_A_KERNEL, **OF_A_SHELL}
    assert in_step(step, **env).own(env) == OWN
    assert in_step(step, **OF_A_SHELL).own(env) == {**OWN, **OF_A_KERNEL}  # a kernel of this job


def test_shell_of_srun_has_a_terminal():
    env = {**OWN, **OF_A_SHELL}
    assert in_step("0", terminal=True, **env).own(env) == env


def test_task_of_srun_is_found_among_the_ancestors(monkeypatch):
    for pid in (os.getpid(), os.getppid()):
        monkeypatch.setenv("SLURM_TASK_PID", str(pid))
        assert list(Process.current().task) == system.arguments(pid)
    monkeypatch.setenv("SLURM_TASK_PID", "1")  # of another process
    assert Process.current().task == ()
    monkeypatch.delenv("SLURM_TASK_PID")
    assert Process.current().task == ()


def test_variables_of_a_launcher_below_the_batch_script_are_kept():
    outer = {**OWN, **launcher_variables("hpctrain")}
    ranks = {**outer, "HPCTRAIN_START": "78", "HPCTRAIN_RANK": "0"}
    assert in_step("batch", **outer).own(ranks) == ranks
    torchrun = {**outer, **launcher_variables("torchrun")}
    assert in_step("batch", **outer).own(torchrun) == torchrun


def test_variables_of_ranks_outside_of_a_batch_script_are_kept():
    rank = {**OWN, **launcher_variables("hpctrain")}
    for process in (in_step("0", **rank), in_step("interactive", **rank), Process()):
        assert process.own(rank) == rank
    manual = {**OWN, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "8888"}
    assert in_step("batch", **manual).own(manual) == manual
