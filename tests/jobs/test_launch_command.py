"""The command by which a rendered script starts the ranks."""

import pytest
from stand_ins import Machine

from hpctrain.errors import UsageError
from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine")


def launch_words(machine, spec, *arguments, **env):
    """Run the script; return the words of the command that starts the ranks."""
    code, output = machine.run(spec, *arguments, **env)
    assert code == 0, output
    return machine.calls()[-1]


def test_srun_takes_cpus_per_task_from_slurm(machine):
    spec = JobSpec(command="program", nodes=4, tasks_per_node=8, cpus_per_task=2)
    words = launch_words(machine, spec, SLURM_CPUS_PER_TASK="5")
    assert words == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=5", "program"]


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py -x", ["python", "-m", "torch.distributed.run"]),
        ("python -m my.train -x", ["python", "-m", "torch.distributed.run"]),
        ("/opt/python3.12 train.py -x", ["/opt/python3.12", "-m", "torch.distributed.run"]),
        ("python -u train.py -x", ["torchrun"]),
        ("./train -x", ["torchrun"]),
    ],
)
def test_torchrun_has_one_agent_per_host_with_cpus_of_its_ranks(machine, command, program):
    spec = JobSpec(command=command, launcher="torchrun", nodes=2)
    words = launch_words(machine, spec, "more", SLURM_CPUS_PER_TASK="3")
    nodes = ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=6"]
    assert words[: 6 + len(program)] == ["srun", "--kill-on-bad-exit=1", *nodes, *program]
    end = words[6 + len(program) :]
    assert end[:3] == ["--nnodes=3", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    host, _, port = end[3].removeprefix("--rdzv-endpoint=").partition(":")
    assert (host, end[4]) == ("node1", "--rdzv-id=7-0")
    assert 10_000 <= int(port) < 20_000
    as_python = program != ["torchrun"]
    rest = command.split()[1:] if as_python else command.split()
    assert end[5:] == [*([] if as_python else ["--no-python"]), "--", *rest, "more"]


def test_torchrun_rendezvous_port_differs_by_job_and_restart(machine):
    spec = JobSpec(command="program", launcher="torchrun")
    ports = set()
    for job in range(4):
        for start in range(3):
            env = {"SLURM_JOB_ID": str(981_000 + job), "SLURM_RESTART_COUNT": str(start)}
            words = launch_words(machine, spec, **env)
            ports |= {word for word in words if word.startswith("--rdzv-endpoint")}
    assert len(ports) == 12


@pytest.mark.parametrize(
    ("counts", "slots"),
    [("2(x3)", "2,2,2"), ("4,2(x2)", "4,2,2"), ("1,12,3", "1,12,3"), ("1(x2),16", "1,1,16")],
)
def test_horovodrun_gets_slots_of_each_host(machine, counts, slots):
    spec = JobSpec(command="python train.py", launcher="horovodrun", nodes=3)
    words = launch_words(machine, spec, SLURM_TASKS_PER_NODE=counts)
    hosts = ",".join(f"node{i}:{n}" for i, n in enumerate(slots.split(","), 1))
    assert words == ["horovodrun", "--gloo", "-np", "6", "-H", hosts, "python", "train.py"]
    elastic = JobSpec(command="python train.py", launcher="horovodrun", elastic=True)
    words = launch_words(machine, elastic, SLURM_TASKS_PER_NODE=counts)
    run = ["python", "-m", "hpctrain", "run", "--elastic", "--hosts", hosts]
    assert words == [*run, "train.py"]


def test_elastic_srun_is_hpctrain_run(machine):
    spec = JobSpec(command="python -m my.train", elastic=True, nodes=3)
    assert "#SBATCH --no-kill" in render(spec)
    run = ["python", "-m", "hpctrain", "run", "--elastic", "-m", "my.train"]
    assert launch_words(machine, spec) == run
    with pytest.raises(UsageError, match="elastic with the command"):
        render(JobSpec(command="./train", elastic=True))


def test_launcher_none_runs_program_without_shell_words(machine):
    spec = JobSpec(command=["eval", "touch canary"], launcher="none")
    code, output = machine.run(spec)
    assert (code, "eval" in output) == (127, True)
    assert not (machine.folder / "canary").exists()
    code, output = machine.run(JobSpec(launcher="none"))
    assert (code, output) == (2, "nothing to run: the command follows the script's name\n")


def test_container_gets_gpus_and_environment(machine):
    spec = JobSpec(command="program", container="x.sif", environment={"A": "1"})
    assert "--nv" not in launch_words(machine, spec)
    assert machine.variables()["APPTAINERENV_A"] == "1"
    assert "--nv" in launch_words(machine, spec, SLURM_GPUS_ON_NODE="4")
    pyxis = JobSpec(
        command="program", container="a#b", container_runtime="pyxis", environment={"A": "1"}
    )
    words = launch_words(machine, pyxis)
    assert "--container-image=a#b" in words
    assert "--container-env=OMP_NUM_THREADS,A" in words
