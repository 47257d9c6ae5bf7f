"""Starts that cannot be: each is refused at once, with its variable and a fix to type.

One table of environments, read in this process. A few of them are also shown by `hpctrain explain`
and opened as Sessions, and some processes are no rank at all.
"""

import contextlib
import os
import re
import secrets
import shlex
import subprocess
import sys
from dataclasses import dataclass

import launches
import pytest
import ranks
from launcher_env import HPCTRAIN, STEP, TORCHRUN, changed, started

import hpctrain
from hpctrain.cluster.launchers import LAUNCHERS, Process, detect, readings, survey
from hpctrain.errors import HpctrainError

FORKSERVER = ranks._CONTEXT  # its server knows torch


@dataclass(frozen=True)
class Case:
    """An environment that contradicts itself.

    Attributes:
        name: of the test.
        env: what a launcher, or several, and a person left.
        words: what the first line of the message has to have.
        fix: what the first fix has to have.
        code: of the error.
    """

    name: str
    env: dict[str, str]
    words: tuple[str, ...]
    fix: str = ""
    code: str = "HT102"  # a part of the variables is missing


def of_every_launcher():
    """What can be wrong with any of them, by its own table of variables."""
    for number, launcher in enumerate(LAUNCHERS):
        if "local_rank" not in launcher.variables:
            continue  # it never says enough
        name, table = launcher.name, launcher.variables
        rank, size, local = (table[field] for field in ("rank", "world_size", "local_rank"))
        for field, lost in (("rank", rank), ("world size", size), ("local rank", local)):
            env = started(name, **dict.fromkeys(lost))
            yield Case(f"{name} without {field}", env, (f"no {lost[0]}",), f"export {lost[0]}=")
        env = started(name, **{rank[0]: "4"})
        yield Case(f"{name} beyond", env, (f"{rank[0]}=4",), code="HT101")
        here = "3" if "local_world_size" in table or name == "slurm" else "4"
        env = started(name, **{local[0]: here})
        yield Case(f"{name} locally beyond", env, (f"{local[0]}={here}",), code="HT101")
        variable, value = ((rank[0], "one"), (size[0], "4.0"), (local[0], "$LOCALID"))[number % 3]
        env = started(name, **{variable: value})
        words = (f"{variable}={value!r}",)
        yield Case(f"{name} {variable} no number", env, words, code="HT103")


BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}

# Whole numbers to `int`, but to no launcher.
HOSTILE = ("1\n", "\n1", "1_0", "+1", " 1", "1 ", "0x1", "1e0", "²", "٣", "\uff11", "9" * 21, "\t")


def unreadable(name, env, word):
    """A value that has another form."""
    return Case(name, env, (word,), code="HT103")


SINGLE = (
    # Marks of which nothing else is left.
    Case(
        "a run id alone",
        {"TORCHELASTIC_RUN_ID": "none"},
        ("TORCHELASTIC_RUN_ID", "no RANK"),
    ),
    Case(
        "a step in a job",
        {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "8"},
        ("SLURM_STEP_ID", "no SLURM_PROCID"),
    ),
    Case(
        "submitit alone",
        {"SUBMITIT_EXECUTOR": "local"},
        ("SUBMITIT_EXECUTOR", "no SUBMITIT_LOCAL_GLOBALID"),
    ),
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
        code="HT101",
    ),
    Case(
        "tasks per node against the node",
        started("slurm", SLURM_NODEID="2"),
        ("SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE=3,1"),
        code="HT101",
    ),
    Case(
        "more nodes than tasks",
        started("slurm", SLURM_STEP_NUM_NODES="5", SLURM_STEP_NODELIST=None),
        ("SLURM_STEP_NUM_NODES=5",),
        code="HT101",
    ),
    Case(
        "the job's list under Open MPI",
        started("openmpi", SLURM_JOB_ID="8", SLURM_JOB_NODELIST="node[1-"),
        ("SLURM_JOB_NODELIST", "node[1-"),
        code="HT105",
    ),
    # What the job says.
    unreadable("tasks", {"SLURM_JOB_ID": "8", "SLURM_NTASKS": "2(x2)"}, "SLURM_NTASKS='2(x2)'"),
    unreadable("an index", {"LSB_JOBID": "8", "LSB_JOBINDEX": "1-4"}, "LSB_JOBINDEX='1-4'"),
    # What a person says.
    unreadable("no such launcher", {"HPCTRAIN_LAUNCHER": "Slurm"}, "HPCTRAIN_LAUNCHER='Slurm'"),
    unreadable(
        "a launcher in spaces", {"HPCTRAIN_LAUNCHER": " slurm"}, "HPCTRAIN_LAUNCHER=' slurm'"
    ),
    unreadable("a launcher in two lines", {"HPCTRAIN_LAUNCHER": "slurm\n"}, "HPCTRAIN_LAUNCHER"),
    Case("a launcher that is not there", {"HPCTRAIN_LAUNCHER": "flux"}, ("FLUX_TASK_RANK",)),
    Case(
        "another launcher than the one there",
        {**BY_HAND, "HPCTRAIN_LAUNCHER": "openmpi"},
        ("OMPI_COMM_WORLD_RANK",),
    ),
    unreadable("a port of one alone", {"MASTER_PORT": "tcp"}, "MASTER_PORT='tcp'"),
    *(
        unreadable(f"hostile {value[:6]!r}", {**BY_HAND, "RANK": value}, f"RANK={value!r}")
        for value in HOSTILE
    ),
)


def both(ours, theirs, variables, **changes):
    """Two launchers that neither started the other, with one value changed."""
    (change,) = changes
    name = f"{ours} and {theirs}, another {change}"
    env = {**started(ours), **started(theirs, **changes)}
    return Case(name, env, variables, code="HT104")


# Which of two is right nobody can know.
DISAGREE = (
    both("slurm", "env", ("SLURM_PROCID=1", "RANK=2"), RANK="2"),
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
    Case("env and PMIx", {**BY_HAND, "PMIX_RANK": "2"}, ("RANK=1", "PMIX_RANK=2"), code="HT104"),
    Case(
        "half a step under whole variables",
        {**BY_HAND, "SLURM_STEP_ID": "0"},
        ("no SLURM_PROCID",),
    ),
)


def lacks(env, present, missing):
    """Take an environment with a part of a launcher's variables, and the one to export."""
    words = (present, f"no {missing}")
    return Case(f"{present} without {missing}", env, words, f"export {missing.split()[0]}=")


PAIR = {**BY_HAND, "WORLD_SIZE": "2"}
HALF = (
    lacks({"RANK": "1"}, "RANK=1", "WORLD_SIZE"),
    lacks({"WORLD_SIZE": "2"}, "WORLD_SIZE=2", "RANK"),
    lacks({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2", "LOCAL_RANK or --local-rank"),
    lacks({"RANK": "1", "LOCAL_RANK": "0"}, "LOCAL_RANK=0", "WORLD_SIZE"),
    lacks(
        changed(STEP, SLURM_STEP_NUM_TASKS=None, SLURM_NTASKS=None),
        "SLURM_PROCID=3",
        "SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
    ),
    lacks({"HPCTRAIN_LAUNCHER": "slurm"}, "no value", "SLURM_PROCID"),
    lacks({"HPCTRAIN_LAUNCHER": "pmi"}, "", "PMI_RANK"),
)


def wrong(env, code="HT101", **changes):
    """Change numbers so that they do not fit; the error names the last of them."""
    shown = "".join(f" {name}={value}" for name, value in changes.items())
    *_, (name, value) = changes.items()
    return Case(
        f"{shown[1:]} of {len(env)}", changed(env, **changes), (name, value[:40]), code=code
    )


NUMBERS = (
    *(wrong(PAIR, "HT103", RANK=value) for value in ("1.0", " ")),
    *(wrong(PAIR, RANK=value) for value in ("2", "-1")),
    wrong(PAIR, "HT103", WORLD_SIZE="2 ranks"),
    *(wrong(PAIR, WORLD_SIZE=value) for value in ("0", "9" * 20)),
    wrong(PAIR, "HT103", LOCAL_RANK="$SLURM_LOCALID"),
    wrong(PAIR, LOCAL_RANK="2"),
    *(wrong(PAIR, LOCAL_WORLD_SIZE=value) for value in ("1", "3")),
    *(wrong(PAIR, "HT103", MASTER_PORT=value) for value in ("tcp", "65536", "-1")),
    wrong(PAIR, "HT103", HPCTRAIN_MAIN_PORT="70000"),
    wrong(TORCHRUN, GROUP_RANK="2"),
    wrong(TORCHRUN, GROUP_WORLD_SIZE="5"),
    wrong(TORCHRUN, GROUP_RANK="0", GROUP_WORLD_SIZE="1", LOCAL_WORLD_SIZE="2"),
    wrong(STEP, SLURM_NODEID="-1"),
    wrong(STEP, SLURM_STEP_NUM_TASKS="5"),
    *(
        wrong(STEP, "HT103", SLURM_STEP_TASKS_PER_NODE=value)
        for value in ("3;1", "3*1", "2(x2", "1(x999999999999)", "9" * 5000)
    ),
    wrong(STEP, SLURM_STEP_TASKS_PER_NODE="4"),
    wrong(STEP, SLURM_STEP_NUM_NODES="3"),
    wrong(STEP, "HT105", SLURM_STEP_NODELIST="node[1-"),
    wrong(STEP, "HT103", SLURM_RESTART_COUNT="often"),
    wrong(STEP, "HT103", SLURM_ARRAY_TASK_ID="1-3"),
    wrong(HPCTRAIN, HPCTRAIN_NUM_NODES="3"),
    wrong(HPCTRAIN, HPCTRAIN_HOSTS="node1"),
    # A rank of `hpctrain run` starts torchrun: its workers are not that rank.
    Case(
        "torchrun in hpctrain run",
        {**HPCTRAIN, **TORCHRUN},
        ("HPCTRAIN_WORLD_SIZE=3",),
        code="HT104",
    ),
)

CASES = (*of_every_launcher(), *SINGLE, *HALF, *NUMBERS, *DISAGREE)


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def refusal(env):
    """The error that an environment leads to; None where it leads to a world."""
    try:
        survey(env)
    except HpctrainError as error:
        return error
    return None


def test_refused_starts_cover_every_launcher():
    chosen = {launcher.name for launcher in LAUNCHERS if launcher.name != "none"}
    for name in chosen:
        assert any(f"({name})" in str(refusal(case.env)) or name in case.name for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES) >= 140


@by_name
def test_wrong_environment_is_refused_with_its_variable(case):
    error = refusal(case.env)
    assert error is not None
    assert (error.exit_code, error.code) == (2, case.code)
    for word in case.words:
        assert word in error.found
    assert error.expected
    assert case.fix in error.fixes[0]
    assert "\n" not in error.found
    assert not error.found.startswith(",")
    assert "HPCTRAIN_LAUNCHER=pmi" not in " ".join(error.fixes)  # it never says enough
    if error.fixes[0].startswith("hpctrain explain"):
        assert variables(error) <= {one.variable for one in readings(case.env)}


def variables(error):
    """The names of the variables that an error shows with their values."""
    return set(re.findall(r"([A-Z][A-Z0-9_]+)=", error.found))


# What a fix begins with where it changes no variable.
COMMANDS = ("hpctrain explain ", "start the ranks with srun", "scontrol show hostnames ")


def typed(fix, env):
    """The environment once a fix is typed; None where that is another command."""
    command, *words = shlex.split(fix)
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
def test_fix_leads_to_a_world_or_to_another_error(case):
    """Following the fixes never goes round in a circle."""
    env, said = case.env, []
    while env is not None and (error := refusal(env)):
        assert error.found not in said
        said.append(error.found)
        env = typed(error.fixes[0], env)
    fixes = " ".join(refusal(case.env).fixes)
    for name, value in re.findall(r"env (HPCTRAIN_LAUNCHER)=(\w+) COMMAND", fixes):
        error = refusal({**case.env, name: value})
        assert error is None or error.found != said[0]


@pytest.mark.parametrize("name", [one.name for one in LAUNCHERS if "local_rank" in one.variables])
def test_fix_of_missing_local_rank_makes_a_single_process(name):
    (launcher,) = (one for one in LAUNCHERS if one.name == name)
    env = started(name, **dict.fromkeys(launcher.variables["local_rank"]))
    fix = " ".join(refusal(env).fixes)
    if unset := re.search(r"unset ((?:[A-Z][A-Z0-9_]+ ?)+)", fix):
        env = {name: value for name, value in env.items() if name not in unset[1].split()}
    else:
        assert "env HPCTRAIN_LAUNCHER=none" in fix
        env = {**env, "HPCTRAIN_LAUNCHER": "none"}
    assert detect(env).world_size == 1


def test_fix_takes_the_local_rank_argument_out_and_unsets_no_option():
    process = Process(("python", "train.py", "--local_rank=x"))
    with pytest.raises(HpctrainError) as caught:
        survey({"RANK": "1", "WORLD_SIZE": "2"}, process)
    assert "unset --" not in str(caught.value)
    process = Process(("python", "train.py", "--local_rank", "0"))
    with pytest.raises(HpctrainError) as caught:
        survey(started("torchrun"), process)
    assert caught.value.code == "HT104"
    assert not caught.value.fixes[0].startswith("unset LOCAL_RANK")


def test_numbers_of_any_length_are_read():
    digits = "9" * 5000
    assert detect(started("slurm", SLURM_STEP_ID=digits)).launcher == "none"
    assert survey(started("slurm", SLURM_GPUS_ON_NODE=digits)).allocation.gpus is None


# One of each kind: half an environment, a number, two launchers that disagree.
REAL = [
    next(case for case in CASES if case.name == name)
    for name in (
        "a step in a job",
        "tasks per node against tasks",
        "slurm and env, another RANK",
    )
]


@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_explain_refuses_wrong_environment_and_shows_it(case, tmp_path):
    done = launches.start([sys.executable, "-m", "hpctrain", "explain"], tmp_path, **case.env)
    error = refusal(case.env)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hpctrain: error: {error}\n")
    assert done.stderr.count("hpctrain: error: ") == 1
    assert "Traceback" not in done.stderr
    if error.fixes[0].startswith("hpctrain explain"):
        assert all(name in done.stdout for name in variables(error))


def end(process):
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


# A program that starts what it is given, and gives it no environment.
DROPS = '#!/bin/sh\nenv -i $KEEP "$@"\nexit $?\n'
STRICT = [sys.executable, "-m", "hpctrain", "explain", "--strict"]


def test_explain_names_the_launcher_of_a_rank_whose_environment_was_dropped(tmp_path):
    program = tmp_path / "orted"
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
    assert "warning: no launcher's variable is set, but this process descends from orted" in out
    assert f"(pid {pid})" in out
    assert "env HPCTRAIN_LAUNCHER=none COMMAND" in out
    out, code, _ = ran(f"{keep} HPCTRAIN_LAUNCHER=none")
    assert (code, "warning" in out) == (0, False)


CHILDREN = """
import multiprocessing, sys
from hpctrain.cluster.launchers import detect, survey

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


@pytest.mark.parametrize(
    ("method", "env"), [("fork", started("slurm")), ("forkserver", BY_HAND), ("spawn", {})]
)
def test_multiprocessing_child_is_told_how_to_start_ranks(method, env, tmp_path):
    (tmp_path / "train.py").write_text(CHILDREN)
    done = launches.start([sys.executable, "train.py", method], tmp_path, **env)
    assert done.returncode == 0, done.stderr
    rank = "1" if env else "0"
    assert done.stdout.startswith(f"{rank} None this process was started by multiprocessing")
    assert f"rank {rank}" in done.stdout
    assert "hpctrain run --nproc-per-node N SCRIPT" in done.stdout
    assert "hpctrain.spawn(FUNCTION, N)" in done.stdout
    assert "hpctrain explain HT109" in done.stdout


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


@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_session_refuses_wrong_environment_before_the_rendezvous(case):
    """There it would say after a while that others did not come."""
    (error,) = children(case.env)
    assert (error.exit_code, str(error)) == (2, str(refusal(case.env)))


def test_session_in_a_multiprocessing_child_is_refused():
    (error,) = children({})
    assert isinstance(error, HpctrainError)
    assert (error.exit_code, error.code) == (2, "HT109")
    assert "multiprocessing" in error.found


def test_multiprocessing_child_with_launcher_none_trains_alone():
    assert children({"HPCTRAIN_LAUNCHER": "none"}) == [("none", 0, 1)]


def place(rank, **more):
    return {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", **more}


def test_mp_spawn_children_with_ranks_of_their_own_train_together():
    """As mp.spawn's functions do that set RANK themselves."""
    port = {"MASTER_PORT": str(20000 + secrets.randbelow(12000))}
    said = children(*(place(rank, LOCAL_RANK=str(rank), **port) for rank in range(3)))
    assert said == [("env", rank, 3) for rank in range(3)]


def test_local_rank_argument_ranks_train_together():
    port = {"MASTER_PORT": str(20000 + secrets.randbelow(12000))}
    arguments = [["--local_rank", str(rank)] for rank in range(3)]
    said = children(*(place(rank, **port) for rank in range(3)), arguments=arguments)
    assert said == [("env", rank, 3) for rank in range(3)]


def test_local_rank_argument_is_read_from_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text("import hpctrain; print(hpctrain.detect().local_rank)")
    command = [sys.executable, "-u", "train.py", "--lr", "1", "--local_rank"]
    done = launches.start([*command, "2"], tmp_path, **place(2, MASTER_PORT="29500"))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
