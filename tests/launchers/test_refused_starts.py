"""Starts that cannot be: each is refused at once, with its variable and something to type.

One table of environments, in three ways: read in this process, shown by `hpctrain explain`, and
in real processes that open a Session. Then the processes that are no rank at all.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import launches
import pytest
import ranks

import hpctrain
from hpctrain.errors import HpctrainError
from hpctrain.launchers import LAUNCHERS, survey
from hpctrain.world import World

FORKSERVER = ranks._CONTEXT  # its server knows torch


@dataclass(frozen=True)
class Case:
    """An environment that contradicts itself.

    Attributes:
        name: of the test.
        env: what a launcher, or several, and a person left.
        words: what the first line of the message has to have.
    """

    name: str
    env: dict[str, str]
    words: tuple[str, ...]


def started(name, **changes):
    """What a launcher sets in rank 1 of 4, 3 of them on its host; with changes, None for unset."""
    (launcher,) = (one for one in LAUNCHERS if one.name == name)
    world = World(1, 4, 1, 3, 0, 2, ("node1", "node2"), name)
    env = {**launcher.environ(world, (3, 1), 77), **changes}
    return {name: value for name, value in env.items() if value is not None}


def of_every_launcher():
    """What can be wrong with any of them, by its own table of variables."""
    for number, launcher in enumerate(LAUNCHERS):
        if "local_rank" not in launcher.variables:
            continue  # it never says enough
        name, table = launcher.name, launcher.variables
        rank, size, local = (table[field] for field in ("rank", "world_size", "local_rank"))
        for field, lost in (("rank", rank), ("world size", size), ("local rank", local)):
            env = started(name, **dict.fromkeys(lost))
            yield Case(f"{name} without {field}", env, (lost[0],))
        yield Case(f"{name} beyond", started(name, **{rank[0]: "4"}), (f"{rank[0]}=4",))
        here = "3" if "local_world_size" in table or name == "slurm" else "4"
        env = started(name, **{local[0]: here})
        yield Case(f"{name} locally beyond", env, (f"{local[0]}={here}",))
        variable, value = ((rank[0], "one"), (size[0], "4.0"), (local[0], "$LOCALID"))[number % 3]
        env = started(name, **{variable: value})
        yield Case(f"{name} {variable} no number", env, (f"{variable}={value!r}",))


BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}

# Whole numbers to `int`, but to no launcher.
HOSTILE = ("1\n", "\n1", "1_0", "+1", " 1", "1 ", "0x1", "1e0", "²", "٣", "\uff11", "9" * 21, "\t")

SINGLE = (
    # Marks of which nothing else is left.
    Case("a run id alone", {"TORCHELASTIC_RUN_ID": "none"}, ("no RANK",)),
    Case("a step alone", {"SLURM_STEP_ID": "0"}, ("no SLURM_PROCID",)),
    Case("a step in a job", {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "8"}, ("no SLURM_PROCID",)),
    Case("submitit alone", {"SUBMITIT_EXECUTOR": "local"}, ("no SUBMITIT_LOCAL_GLOBALID",)),
    Case("an Open MPI size", {"OMPI_COMM_WORLD_SIZE": "4"}, ("no OMPI_COMM_WORLD_RANK",)),
    Case("a Horovod size", {"HOROVOD_SIZE": "4"}, ("no HOROVOD_RANK",)),
    Case("a hydra local rank", {"MPI_LOCALRANKID": "0"}, ("no PMI_RANK",)),
    Case("a PALS rank", {"PALS_RANKID": "1"}, ("no PMI_SIZE",)),
    Case("a Flux rank", {"FLUX_TASK_RANK": "1"}, ("no FLUX_JOB_SIZE",)),
    Case("empty values", {"RANK": "1", "WORLD_SIZE": "", "LOCAL_RANK": ""}, ("no WORLD_SIZE",)),
    Case(
        "submitit partially",
        {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1"},
        ("no SUBMITIT_LOCAL_NTASKS",),
    ),
    # PMI and PMIx alone never say enough.
    Case("a PMI rank", {"PMI_RANK": "1"}, ("PMI_RANK=1", "no LOCAL_RANK")),
    Case("a PMI size", {"PMI_SIZE": "4"}, ("PMI_SIZE=4", "no LOCAL_RANK")),
    Case("PMI", {"PMI_RANK": "1", "PMI_SIZE": "4"}, ("PMI_RANK=1, PMI_SIZE=4",)),
    Case("a PMIx rank", {"PMIX_RANK": "1"}, ("PMIX_RANK=1", "no LOCAL_RANK")),
    Case("prterun", {"PRTE_LAUNCHED": "1", "PMIX_RANK": "1"}, ("PMIX_RANK=1", "no LOCAL_RANK")),
    Case("prterun alone", {"PRTE_LAUNCHED": "1"}, ("PRTE_LAUNCHED=1", "no LOCAL_RANK")),
    Case(
        "prterun in a step",
        {**started("slurm"), "PRTE_LAUNCHED": "1", "PMIX_RANK": "2"},
        ("PMIX_RANK=2", "no LOCAL_RANK"),
    ),
    Case("PALS without its ranks", {"PALS_APID": "3", "PMI_SIZE": "4"}, ("PMI_SIZE=4",)),
    # A step whose variables do not fit each other.
    Case(
        "tasks per node against tasks",
        started("slurm", SLURM_STEP_TASKS_PER_NODE="3(x2)"),
        ("SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_TASKS_PER_NODE=3(x2) (6 tasks)"),
    ),
    Case(
        "tasks per node against the node",
        started("slurm", SLURM_NODEID="2"),
        ("SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE=3,1"),
    ),
    Case(
        "more nodes than tasks",
        started("slurm", SLURM_STEP_NUM_NODES="5", SLURM_STEP_NODELIST=None),
        ("SLURM_STEP_NUM_NODES=5",),
    ),
    Case(
        "a host list that never ends",
        started("slurm", SLURM_STEP_NODELIST="node[1-2"),
        ("SLURM_STEP_NODELIST", "node[1-2"),
    ),
    Case(
        "the job's list under Open MPI",
        started("openmpi", SLURM_JOB_ID="8", SLURM_JOB_NODELIST="node[1-"),
        ("SLURM_JOB_NODELIST", "node[1-"),
    ),
    # What the job says.
    Case("restarts", {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "x"}, ("SLURM_RESTART_COUNT",)),
    Case("tasks", {"SLURM_JOB_ID": "8", "SLURM_NTASKS": "2(x2)"}, ("SLURM_NTASKS='2(x2)'",)),
    Case("an index", {"LSB_JOBID": "8", "LSB_JOBINDEX": "1-4"}, ("LSB_JOBINDEX='1-4'",)),
    # What a person says.
    Case("no such launcher", {"HPCTRAIN_LAUNCHER": "Slurm"}, ("HPCTRAIN_LAUNCHER='Slurm'",)),
    Case("a launcher in spaces", {"HPCTRAIN_LAUNCHER": " slurm"}, ("HPCTRAIN_LAUNCHER=' slurm'",)),
    Case("a launcher that is not there", {"HPCTRAIN_LAUNCHER": "flux"}, ("FLUX_TASK_RANK",)),
    Case(
        "another launcher than the one there",
        {**BY_HAND, "HPCTRAIN_LAUNCHER": "openmpi"},
        ("OMPI_COMM_WORLD_RANK",),
    ),
    Case("a port of one alone", {"MASTER_PORT": "tcp"}, ("MASTER_PORT='tcp'",)),
    Case("a port that is none", {**BY_HAND, "MASTER_PORT": "65536"}, ("MASTER_PORT=65536",)),
    Case(
        "a port of ours that is none",
        {**BY_HAND, "HPCTRAIN_MAIN_PORT": "-1"},
        ("HPCTRAIN_MAIN_PORT=-1",),
    ),
    *(
        Case(f"hostile {value[:6]!r}", {**BY_HAND, "RANK": value}, (f"RANK={value!r}",))
        for value in HOSTILE
    ),
    Case("twenty digits", {**BY_HAND, "RANK": "9" * 20}, ("RANK=9999",)),
)


def both(ours, theirs, variables, **changes):
    """Two launchers that neither started the other, with one value changed."""
    (change,) = changes
    name = f"{ours} and {theirs} with another {change}"
    return Case(name, {**started(ours), **started(theirs, **changes)}, variables)


# Which of two is right nobody can know.
DISAGREE = (
    both("slurm", "env", ("SLURM_PROCID=1", "RANK=2"), RANK="2"),
    both("slurm", "env", ("SLURM_STEP_NUM_TASKS=4", "WORLD_SIZE=8"), WORLD_SIZE="8"),
    both("slurm", "env", ("SLURM_LOCALID=1", "LOCAL_RANK=0"), LOCAL_RANK="0"),
    both("openmpi", "env", ("OMPI_COMM_WORLD_RANK=1", "RANK=2"), RANK="2"),
    both("hydra", "env", ("PMI_RANK=1", "RANK=0"), RANK="0"),
    both("flux", "env", ("FLUX_JOB_SIZE=4", "WORLD_SIZE=2"), WORLD_SIZE="2"),
    both("hpctrain", "torchrun", ("HPCTRAIN_RANK=1", "RANK=0"), RANK="0"),
    both("hpctrain", "env", ("HPCTRAIN_WORLD_SIZE=4", "WORLD_SIZE=2"), WORLD_SIZE="2"),
    both("torchrun", "horovodrun", ("RANK=1", "HOROVOD_RANK=3"), HOROVOD_RANK="3"),
    both(
        "jsrun",
        "openmpi",
        ("JSM_NAMESPACE_RANK=1", "OMPI_COMM_WORLD_RANK=0"),
        OMPI_COMM_WORLD_RANK="0",
    ),
    both("mvapich2", "hydra", ("MV2_COMM_WORLD_RANK=1", "PMI_RANK=2"), PMI_RANK="2"),
    both("pals", "slurm", ("PALS_RANKID=1", "SLURM_PROCID=3"), SLURM_PROCID="3"),
    both("submitit", "env", ("SUBMITIT_LOCAL_GLOBALID=1", "RANK=0"), RANK="0"),
    Case(
        "env and PMIx",
        {**BY_HAND, "PMIX_RANK": "2"},
        ("RANK=1", "PMIX_RANK=2"),
    ),
    # Variables of an earlier start, which a shell or a container kept.
    Case(
        "a step under stale variables",
        {**started("slurm"), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        ("SLURM_PROCID=1", "RANK=0"),
    ),
    Case(
        "half a step under whole variables",
        {**BY_HAND, "SLURM_STEP_ID": "0"},
        ("no SLURM_PROCID",),
    ),
    Case(
        "half of torch's variables in a step",
        {**started("slurm"), "WORLD_SIZE": "8"},
        ("SLURM_STEP_NUM_TASKS=4", "WORLD_SIZE=8"),
    ),
)

CASES = (*of_every_launcher(), *SINGLE, *DISAGREE)

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def refusal(env):
    """The error that an environment leads to; None where it leads to a world."""
    try:
        survey(env)
    except HpctrainError as error:
        return error
    return None


def test_every_launcher_is_in_the_table():
    chosen = {launcher.name for launcher in LAUNCHERS if launcher.name != "none"}
    for name in chosen:
        assert any(f"({name})" in str(refusal(case.env)) or name in case.name for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@by_name
def test_it_is_refused_with_its_variable(case):
    error = refusal(case.env)
    assert error is not None
    assert error.exit_code == 2
    for word in case.words:
        assert word in error.found
    assert error.expected
    assert error.fix


# What a fix begins with where it changes no variable.
COMMANDS = ("hpctrain explain    ", "start the ranks with srun", "scontrol show hostnames ")


def typed(fix, env):
    """The environment once the first remedy is typed; None where that is another command."""
    command, *words = shlex.split(re.split(" {4}|, or ", fix)[0])
    if command == "unset":
        assert words
        return {name: value for name, value in env.items() if name not in words}
    if command != "export":
        assert fix.startswith(COMMANDS)
        return None
    assignments = dict(word.split("=", 1) for word in words)
    for name, value in assignments.items():
        if value == "…":  # for a person to fill in: rank 1 of 4
            assignments[name] = "4" if "SIZE" in name or "TASKS" in name else "1"
        elif value.startswith("$"):
            assignments[name] = env[value[1:]]
    return {**env, **assignments}


@by_name
def test_what_it_says_to_type_leads_on(case):
    """To a world, or to another error; never round in a circle."""
    env, said = case.env, []
    while env is not None and (error := refusal(env)):
        assert error.found not in said
        said.append(error.found)
        env = typed(error.fix, env)
    for name, value in re.findall(r"env (HPCTRAIN_LAUNCHER)=(\w+) COMMAND", refusal(case.env).fix):
        error = refusal({**case.env, name: value})
        assert error is None or error.found != said[0]


def explain(case, folder):
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "explain"],
        cwd=folder,
        env={**os.environ, **case.env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return case, done


def check_output(case, code, err):
    """One error, in full, and no traceback."""
    assert code == 2, (case.name, err)
    error = refusal(case.env)
    assert err.startswith(f"hpctrain: error: {error.found}\n"), case.name
    assert err.count("hpctrain: error: ") == 1, case.name
    assert f"  expected: {error.expected}\n" in err, case.name
    assert f"  to mend:  {error.fix}\n" in err, case.name
    assert "Traceback" not in err, case.name


def test_explain_refuses_each_and_shows_what_it_found(tmp_path):
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        for case, done in pool.map(lambda case: explain(case, tmp_path), CASES):
            check_output(case, done.returncode, done.stderr)
            if refusal(case.env).fix.startswith("hpctrain explain"):
                for word in case.words:
                    assert word in done.stdout


def opens(pipe, folder, environments):
    """Open a Session in one environment after the other, as a notebook may."""
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
    clean = dict(os.environ)
    for env in environments:
        os.environ.update(env)
        try:
            hpctrain.Session(batch_size=1, start_timeout=300)
        except HpctrainError as error:
            caught = sys.exc_info()
            pipe.send((error.exit_code, str(error)))
        for name in env:
            del os.environ[name]
        assert os.environ == clean
    sys.excepthook(*caught)  # which gets the last one as if nobody had caught it


def end(process):
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


def test_a_session_refuses_each_before_it_meets_anybody(tmp_path):
    """Waiting for others would take 300 s, and this test gives each 60."""
    shares = [CASES[first : first + 12] for first in range(0, len(CASES), 12)]
    with contextlib.ExitStack() as stack:
        running = []
        for number, share in enumerate(shares):
            folder = tmp_path / str(number)
            folder.mkdir()
            ours, theirs = FORKSERVER.Pipe(duplex=False)
            environments = [case.env for case in share]
            process = FORKSERVER.Process(target=opens, args=(theirs, folder, environments))
            process.start()
            stack.callback(end, process)
            theirs.close()
            running.append((share, folder, stack.enter_context(ours), process))
        for share, folder, pipe, process in running:
            for case in share:
                assert pipe.poll(60), f"{case.name}: the session waits"
                assert pipe.recv() == (2, str(refusal(case.env))), case.name
            process.join(60)
            check_output(share[-1], process.exitcode, (folder / "stderr").read_text())
            assert [path.name for path in folder.iterdir()] == ["stderr"]


# A program that starts what it is given, and gives it no environment.
DROPS = '#!/bin/sh\nenv -i $KEEP "$@"\nexit $?\n'
STRICT = [sys.executable, "-m", "hpctrain", "explain", "--strict"]


@pytest.mark.parametrize("name", ["orted", "hydra_pmi_proxy", "torchrun"])
def test_a_rank_whose_environment_was_dropped_is_told_from_whom_it_descends(name, tmp_path):
    program = tmp_path / name
    program.write_text(DROPS)
    program.chmod(0o755)
    path = os.environ.get("PYTHONPATH")
    keep = f"PYTHONPATH={path}" if path else "A=B"

    def ran(keep):
        process = subprocess.Popen(
            [program, *STRICT], env={**os.environ, "KEEP": keep}, stdout=subprocess.PIPE, text=True
        )
        return process.communicate(timeout=60)[0], process.returncode, process.pid

    out, code, pid = ran(keep)
    assert code == 2
    assert f"warning: no launcher's variable is set, but this process descends from {name}" in out
    assert f"(pid {pid})" in out
    assert "env HPCTRAIN_LAUNCHER=none COMMAND" in out
    out, code, _ = ran(f"{keep} HPCTRAIN_LAUNCHER=none")
    assert (code, "warning" in out) == (0, False)


UNDER_TORCHRUN = """
import json, multiprocessing, os, sys
import hpctrain
from torch.utils.data import Dataset

class Places(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return hpctrain.detect().rank

def opens(pipe=None):
    try:
        with hpctrain.Session(batch_size=1, workers=1) as session:
            loader = session.loader(Places(), train=False)
            return [int(place) for batch in loader for place in batch]
    except hpctrain.HpctrainError as error:
        if pipe:
            pipe.send(str(error))
        return str(error)

told = {"workers": opens()}
ours, theirs = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=opens, args=(theirs,))
child.start()
told["child"] = ours.recv()
child.join()
# What env -i does, without another start of Python.
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    os.environ.clear()
    os.write(writer, opens().encode())
    os._exit(0)
os.waitpid(pid, 0)
told["dropped"] = os.read(reader, 1 << 16).decode()
json.dump(told, open("told.json", "w"))
"""


def test_under_torchrun_ranks_open_sessions_and_what_they_start_does_not(tmp_path):
    """A loader's worker may ask who it is; a child, or a rank without variables, may not train."""
    (tmp_path / "train.py").write_text(UNDER_TORCHRUN)
    command = [launches.BIN / "torchrun", "--nproc-per-node", "1", "train.py"]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["workers"] == [0, 0, 0, 0]
    assert "multiprocessing" in told["child"]
    assert "its place is that of its parent: rank 0 (RANK)" in told["child"]
    assert "descends from torchrun" in told["dropped"]


CHILDREN = """
import multiprocessing, sys
from hpctrain.launchers import detect, survey

def child(pipe):
    stray = survey().stray
    pipe.send((detect().rank, str(stray) if stray else None))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    rank, stray = ours.recv()
    process.join()
    print(rank, survey().stray, stray)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("env", [{}, BY_HAND, started("slurm"), started("hpctrain")])
def test_a_child_of_multiprocessing_is_told_how_ranks_are_started(method, env, tmp_path):
    (tmp_path / "train.py").write_text(CHILDREN)
    done = launches.start([sys.executable, "train.py", method], tmp_path, **env)
    assert done.returncode == 0, done.stderr
    rank = "1" if env else "0"
    assert done.stdout.startswith(f"{rank} None this process was started by multiprocessing")
    assert f"rank {rank}" in done.stdout
    assert "hpctrain run --nproc-per-node N SCRIPT" in done.stdout
    assert "hpctrain.spawn(FUNCTION, N)" in done.stdout


def answers(pipe, env, arguments):
    os.environ.update(env)
    sys.orig_argv = ["python", "train.py", *arguments]  # this process has its server's
    try:
        parsed = hpctrain.options().parse_args(["--batch-size", "1", *arguments])
        with hpctrain.Session(parsed, start_timeout=30) as session:
            pipe.send((session.world.launcher, session.world.local_rank, session.sum(1)))
    except HpctrainError as error:
        pipe.send(error)


def children(*environments, arguments=()):
    """What forked children of multiprocessing say that open a Session together."""
    with contextlib.ExitStack() as stack:
        pipes = []
        for env, own in zip(environments, arguments or [()] * len(environments), strict=True):
            ours, theirs = FORKSERVER.Pipe(duplex=False)
            process = FORKSERVER.Process(target=answers, args=(theirs, env, own))
            process.start()
            stack.callback(end, process)
            theirs.close()
            pipes.append(stack.enter_context(ours))
        said = []
        for pipe in pipes:
            assert pipe.poll(60)
            said.append(pipe.recv())
        return said


def test_a_session_in_a_child_is_refused():
    (error,) = children({})
    assert isinstance(error, HpctrainError)
    assert error.exit_code == 2
    assert "multiprocessing" in error.found


def test_a_child_that_is_meant_to_train_alone_does():
    assert children({"HPCTRAIN_LAUNCHER": "none"}) == [("none", 0, 1)]


def place(rank, **more):
    return {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", **more}


def test_children_that_were_given_places_of_their_own_train_together():
    """As mp.spawn's functions do that set RANK themselves."""
    port = {"MASTER_PORT": str(20000 + secrets.randbelow(12000))}
    said = children(*(place(rank, LOCAL_RANK=str(rank), **port) for rank in range(3)))
    assert said == [("env", rank, 3) for rank in range(3)]


@pytest.mark.parametrize("form", ["--local_rank={}", "--local-rank={}", "--local_rank {}"])
def test_ranks_that_get_their_local_rank_as_an_argument_train_together(form):
    port = {"MASTER_PORT": str(20000 + secrets.randbelow(12000))}
    arguments = [form.format(rank).split() for rank in range(3)]
    said = children(*(place(rank, **port) for rank in range(3)), arguments=arguments)
    assert said == [("env", rank, 3) for rank in range(3)]


def test_a_local_rank_that_argument_and_variable_dispute_is_refused():
    (error,) = children(place(1, LOCAL_RANK="1"), arguments=[["--local_rank=0"]])
    assert "LOCAL_RANK=1 and --local-rank=0" in error.found
    assert error.fix.startswith("take --local-rank out of the command")


def test_the_argument_is_read_from_the_command_line_of_a_script(tmp_path):
    (tmp_path / "train.py").write_text("import hpctrain; print(hpctrain.detect().local_rank)")
    command = [sys.executable, "-u", "train.py", "--lr", "1", "--local_rank"]
    for rank in range(3):
        done = launches.start([*command, str(rank)], tmp_path, **place(rank, MASTER_PORT="29500"))
        assert (done.returncode, done.stdout) == (0, f"{rank}\n"), done.stderr
