"""What a process shows besides its environment: its arguments and its ancestors."""

import subprocess
import sys

import pytest

from hpctrain.cluster.launchers.ancestors import (
    LAUNCHING,
    LOCAL_RANK_ARGUMENT,
    PARENT,
    Ancestor,
    Process,
)

# Prints the nearest ancestor that launches, and the facts that launchers read.
SHOWS = [
    *(sys.executable, "-c"),
    "from hpctrain.cluster.launchers import Process; p = Process.current(); a = p.launched_by; "
    "print(a and a.program, a and a.launcher, p.inherited, p.facts().keys())",
]
SHELL = '#!/bin/sh\n"$@"\nexit $?\n'
# The same in Python, and one that leaves its first argument out.
RUNS = "import subprocess, sys\nsys.exit(subprocess.run(sys.argv[1:]).returncode)\n"
SKIPS = RUNS.replace("[1:]", "[2:]")


def shown(*command):
    done = subprocess.run([*map(str, command), *SHOWS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def program(tmp_path):
    """Make a program of that name, which runs what is given to it and waits for it."""

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
    assert shown(program(name))[:2] == [name, LAUNCHING[name]]


def test_nearest_launcher_ancestor_behind_shells_counts(program):
    shell = program("wrapper.sh")
    assert shown(program("orted"), shell, program("torchrun"), shell)[0] == "torchrun"
    assert shown(program("torchrun"), shell, program("orted"), shell)[0] == "orted"


def test_slurmstepd_process_title_is_read_up_to_its_colon():
    run = ["bash", "-c", 'exec -a "slurmstepd: [815.0]" bash -c \'"$@"; exit\' bash "$@"', "bash"]
    assert shown(*run)[:2] == ["slurmstepd", "slurm"]


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
    assert shown(sys.executable, *command)[1] == "torchrun"


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
def test_argument_named_torchrun_is_no_launcher(command, program):
    program("train.py", SKIPS)
    assert shown(sys.executable, *command) == shown()


def test_process_name_cut_within_a_utf8_letter_is_read(program):
    """The kernel cuts at 15 bytes, and the last letter here has two."""
    assert len("entraînement-".encode()) == 14
    path = program("entraînement-élan")
    assert shown(program("orted"), path)[0] == "orted"


def test_process_without_launcher_has_none():
    launched = Process.current().launched_by  # of the tests themselves, which srun may run
    name, launcher = (launched.program, launched.launcher) if launched else (None, None)
    assert shown()[:3] == [str(name), str(launcher), "None"]


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
    """Where a launcher names no start of its own, the id of its process tells two apart."""
    process = Process(launched_by=Ancestor(815, "hydra_pmi_proxy", "hydra"))
    assert process.facts() == {PARENT: "hydra_pmi_proxy/815"}
