"""Environments that contradict themselves: each is refused, with its variable and a fix.

One table of environments, read in this process. `hpctrain explain` and a Session also read some of
them. Other tests start processes that are not a rank.
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
from launcher_env import HPCTRAIN, STEP, TORCHRUN, changed, launcher_variables

import hpctrain
from hpctrain.cluster.launchers import LAUNCHERS, Process, detect, readings, survey
from hpctrain.errors import HpctrainError

FORKSERVER = ranks._CONTEXT  # its server knows torch


@dataclass(frozen=True)
class Case:
    """An environment that contradicts itself.

    Attributes:
        name: of the test.
        env: the variables of one or several launchers, and of a person.
        words: parts of the first line of the message.
        fix: a part of the first fix.
        code: of the error.
    """

    name: str
    env: dict[str, str]
    words: tuple[str, ...]
    fix: str = ""
    code: str = "HT102"  # a part of the variables is missing


def cases_of_every_launcher():
    """Yield the cases that apply to every launcher, from its table of variables."""
    for number, launcher in enumerate(LAUNCHERS):
        if "local_rank" not in launcher.variables:
            continue  # it never sets enough
        name, table = launcher.name, launcher.variables
        rank, size, local = (table[field] for field in ("rank", "world_size", "local_rank"))
        for field, names in (("rank", rank), ("world size", size), ("local rank", local)):
            env = launcher_variables(name, **dict.fromkeys(names))
            yield Case(f"{name} without {field}", env, (f"no {names[0]}",), f"export {names[0]}=")
        env = launcher_variables(name, **{rank[0]: "4"})
        yield Case(f"{name} beyond", env, (f"{rank[0]}=4",), code="HT101")
        local_size = "3" if "local_world_size" in table or name == "slurm" else "4"
        env = launcher_variables(name, **{local[0]: local_size})
        yield Case(f"{name} locally beyond", env, (f"{local[0]}={local_size}",), code="HT101")
        variable, value = ((rank[0], "one"), (size[0], "4.0"), (local[0], "$LOCALID"))[number % 3]
        env = launcher_variables(name, **{variable: value})
        words = (f"{variable}={value!r}",)
        yield Case(f"{name} {variable} no number", env, words, code="HT103")


ENV_LAUNCHER = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}

# Whole numbers for `int`, but not for a launcher.
HOSTILE = ("1\n", "\n1", "1_0", "+1", " 1", "1 ", "0x1", "1e0", "²", "٣", "\uff11", "9" * 21, "\t")


def malformed(name, env, word):
    """Return the case of a malformed value."""
    return Case(name, env, (word,), code="HT103")


SINGLE = (
    # Variables that mark a launcher, without any others of it.
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
    # PMI and PMIx alone never set enough.
    Case("a PMI rank", {"PMI_RANK": "1"}, ("PMI_RANK=1", "no LOCAL_RANK")),
    Case("a PMI size", {"PMI_SIZE": "4"}, ("PMI_SIZE=4", "no LOCAL_RANK")),
    Case("PMI", {"PMI_RANK": "1", "PMI_SIZE": "4"}, ("PMI_RANK=1, PMI_SIZE=4",)),
    Case("a PMIx rank", {"PMIX_RANK": "1"}, ("PMIX_RANK=1", "no LOCAL_RANK")),
    Case("prterun", {"PRTE_LAUNCHED": "1", "PMIX_RANK": "1"}, ("PMIX_RANK=1", "no LOCAL_RANK")),
    Case("prterun alone", {"PRTE_LAUNCHED": "1"}, ("PRTE_LAUNCHED=1", "no LOCAL_RANK")),
    Case(
        "prterun in a step",
        {**launcher_variables("slurm"), "PRTE_LAUNCHED": "1", "PMIX_RANK": "2"},
        ("PMIX_RANK=2", "no LOCAL_RANK"),
    ),
    Case("PALS without its ranks", {"PALS_APID": "3", "PMI_SIZE": "4"}, ("PMI_SIZE=4",)),
    # A step with variables that contradict each other.
    Case(
        "tasks per node against tasks",
        launcher_variables("slurm", SLURM_STEP_TASKS_PER_NODE="3(x2)"),
        ("SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_TASKS_PER_NODE=3(x2) (tasks: 6)"),
        code="HT101",
    ),
    Case(
        "tasks per node against the node",
        launcher_variables("slurm", SLURM_NODEID="2"),
        ("SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE=3,1"),
        code="HT101",
    ),
    Case(
        "more nodes than tasks",
        launcher_variables("slurm", SLURM_STEP_NUM_NODES="5", SLURM_STEP_NODELIST=None),
        ("SLURM_STEP_NUM_NODES=5",),
        code="HT101",
    ),
    Case(
        "the job's list under Open MPI",
        launcher_variables("openmpi", SLURM_JOB_ID="8", SLURM_JOB_NODELIST="node[1-"),
        ("SLURM_JOB_NODELIST", "node[1-"),
        code="HT105",
    ),
    # Variables of the job.
    malformed("tasks", {"SLURM_JOB_ID": "8", "SLURM_NTASKS": "2(x2)"}, "SLURM_NTASKS='2(x2)'"),
    malformed("an index", {"LSB_JOBID": "8", "LSB_JOBINDEX": "1-4"}, "LSB_JOBINDEX='1-4'"),
    # Variables that a person sets.
    malformed("no such launcher", {"HPCTRAIN_LAUNCHER": "Slurm"}, "HPCTRAIN_LAUNCHER='Slurm'"),
    malformed(
        "a launcher in spaces", {"HPCTRAIN_LAUNCHER": " slurm"}, "HPCTRAIN_LAUNCHER=' slurm'"
    ),
    malformed("a launcher in two lines", {"HPCTRAIN_LAUNCHER": "slurm\n"}, "HPCTRAIN_LAUNCHER"),
    Case("a launcher that is not there", {"HPCTRAIN_LAUNCHER": "flux"}, ("FLUX_TASK_RANK",)),
    Case(
        "another launcher than the one there",
        {**ENV_LAUNCHER, "HPCTRAIN_LAUNCHER": "openmpi"},
        ("OMPI_COMM_WORLD_RANK",),
    ),
    malformed("a port of one alone", {"MASTER_PORT": "tcp"}, "MASTER_PORT='tcp'"),
    *(
        malformed(f"hostile {value[:6]!r}", {**ENV_LAUNCHER, "RANK": value}, f"RANK={value!r}")
        for value in HOSTILE
    ),
)


def two_launchers(first, second, variables, **changes):
    """Return the case of two launchers, not nested, with one value changed."""
    (change,) = changes
    name = f"{first} and {second}, another {change}"
    env = {**launcher_variables(first), **launcher_variables(second, **changes)}
    return Case(name, env, variables, code="HT104")


# Two launchers that disagree: hpctrain cannot decide which is right.
DISAGREE = (
    two_launchers("slurm", "env", ("SLURM_PROCID=1", "RANK=2"), RANK="2"),
    two_launchers("openmpi", "env", ("OMPI_COMM_WORLD_RANK=1", "RANK=2"), RANK="2"),
    two_launchers("hydra", "env", ("PMI_RANK=1", "RANK=0"), RANK="0"),
    two_launchers("flux", "env", ("FLUX_JOB_SIZE=4", "WORLD_SIZE=2"), WORLD_SIZE="2"),
    two_launchers("hpctrain", "torchrun", ("HPCTRAIN_RANK=1", "RANK=0"), RANK="0"),
    two_launchers("hpctrain", "env", ("HPCTRAIN_WORLD_SIZE=4", "WORLD_SIZE=2"), WORLD_SIZE="2"),
    two_launchers("torchrun", "horovodrun", ("RANK=1", "HOROVOD_RANK=3"), HOROVOD_RANK="3"),
    two_launchers(
        "jsrun",
        "openmpi",
        ("JSM_NAMESPACE_RANK=1", "OMPI_COMM_WORLD_RANK=0"),
        OMPI_COMM_WORLD_RANK="0",
    ),
    two_launchers("mvapich2", "hydra", ("MV2_COMM_WORLD_RANK=1", "PMI_RANK=2"), PMI_RANK="2"),
    two_launchers("pals", "slurm", ("PALS_RANKID=1", "SLURM_PROCID=3"), SLURM_PROCID="3"),
    two_launchers("submitit", "env", ("SUBMITIT_LOCAL_GLOBALID=1", "RANK=0"), RANK="0"),
    Case(
        "env and PMIx", {**ENV_LAUNCHER, "PMIX_RANK": "2"}, ("RANK=1", "PMIX_RANK=2"), code="HT104"
    ),
    Case(
        "half a step under whole variables",
        {**ENV_LAUNCHER, "SLURM_STEP_ID": "0"},
        ("no SLURM_PROCID",),
    ),
)


def incomplete(env, present, missing):
    """Return the case of a launcher's variables of which one is missing."""
    words = (present, f"no {missing}")
    return Case(f"{present} without {missing}", env, words, f"export {missing.split()[0]}=")


PAIR = {**ENV_LAUNCHER, "WORLD_SIZE": "2"}
HALF = (
    incomplete({"RANK": "1"}, "RANK=1", "WORLD_SIZE"),
    incomplete({"WORLD_SIZE": "2"}, "WORLD_SIZE=2", "RANK"),
    incomplete({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2", "LOCAL_RANK or --local-rank"),
    incomplete({"RANK": "1", "LOCAL_RANK": "0"}, "LOCAL_RANK=0", "WORLD_SIZE"),
    incomplete(
        changed(STEP, SLURM_STEP_NUM_TASKS=None, SLURM_NTASKS=None),
        "SLURM_PROCID=3",
        "SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
    ),
    incomplete({"HPCTRAIN_LAUNCHER": "slurm"}, "no value", "SLURM_PROCID"),
    incomplete({"HPCTRAIN_LAUNCHER": "pmi"}, "", "PMI_RANK"),
)


def contradiction(env, code="HT101", **changes):
    """Return the case of numbers that do not fit; the error names the last one."""
    assignments = "".join(f" {name}={value}" for name, value in changes.items())
    *_, (name, value) = changes.items()
    return Case(
        f"{assignments[1:]} of {len(env)}", changed(env, **changes), (name, value[:40]), code=code
    )


NUMBERS = (
    *(contradiction(PAIR, "HT103", RANK=value) for value in ("1.0", " ")),
    *(contradiction(PAIR, RANK=value) for value in ("2", "-1")),
    contradiction(PAIR, "HT103", WORLD_SIZE="2 ranks"),
    *(contradiction(PAIR, WORLD_SIZE=value) for value in ("0", "9" * 20)),
    contradiction(PAIR, "HT103", LOCAL_RANK="$SLURM_LOCALID"),
    contradiction(PAIR, LOCAL_RANK="2"),
    *(contradiction(PAIR, LOCAL_WORLD_SIZE=value) for value in ("1", "3")),
    *(contradiction(PAIR, "HT103", MASTER_PORT=value) for value in ("tcp", "65536", "-1")),
    contradiction(PAIR, "HT103", HPCTRAIN_MAIN_PORT="70000"),
    contradiction(TORCHRUN, GROUP_RANK="2"),
    contradiction(TORCHRUN, GROUP_WORLD_SIZE="5"),
    contradiction(TORCHRUN, GROUP_RANK="0", GROUP_WORLD_SIZE="1", LOCAL_WORLD_SIZE="2"),
    contradiction(STEP, SLURM_NODEID="-1"),
    contradiction(STEP, SLURM_STEP_NUM_TASKS="5"),
    *(
        contradiction(STEP, "HT103", SLURM_STEP_TASKS_PER_NODE=value)
        for value in ("3;1", "3*1", "2(x2", "1(x999999999999)", "9" * 5000)
    ),
    contradiction(STEP, SLURM_STEP_TASKS_PER_NODE="4"),
    contradiction(STEP, SLURM_STEP_NUM_NODES="3"),
    contradiction(STEP, "HT105", SLURM_STEP_NODELIST="node[1-"),
    contradiction(STEP, "HT103", SLURM_RESTART_COUNT="often"),
    contradiction(STEP, "HT103", SLURM_ARRAY_TASK_ID="1-3"),
    contradiction(HPCTRAIN, HPCTRAIN_NUM_NODES="3"),
    contradiction(HPCTRAIN, HPCTRAIN_HOSTS="node1"),
    # A rank of `hpctrain run` starts torchrun: its workers are not that rank.
    Case(
        "torchrun in hpctrain run",
        {**HPCTRAIN, **TORCHRUN},
        ("HPCTRAIN_WORLD_SIZE=3",),
        code="HT104",
    ),
)

CASES = (*cases_of_every_launcher(), *SINGLE, *HALF, *NUMBERS, *DISAGREE)


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def error_of(env):
    """Return the error of an environment; None if it gives a World."""
    try:
        survey(env)
    except HpctrainError as error:
        return error
    return None


def test_refused_starts_cover_every_launcher():
    chosen = {launcher.name for launcher in LAUNCHERS if launcher.name != "none"}
    for name in chosen:
        assert any(f"({name})" in str(error_of(case.env)) or name in case.name for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES) >= 140


@by_name
def test_wrong_environment_is_refused_with_its_variable(case):
    error = error_of(case.env)
    assert error is not None
    assert (error.exit_code, error.code) == (2, case.code)
    for word in case.words:
        assert word in error.found
    assert error.expected
    assert case.fix in error.fixes[0]
    assert "\n" not in error.found
    assert not error.found.startswith(",")
    assert "HPCTRAIN_LAUNCHER=pmi" not in " ".join(error.fixes)  # it never sets enough
    if error.fixes[0].startswith("hpctrain explain"):
        assert shown_variables(error) <= {one.variable for one in readings(case.env)}


def shown_variables(error):
    """Return the names of the variables that an error shows with their values."""
    return set(re.findall(r"([A-Z][A-Z0-9_]+)=", error.found))


# The beginnings of fixes that change no variable.
COMMANDS = ("hpctrain explain ", "start the ranks with srun", "scontrol show hostnames ")


def apply_fix(fix, env):
    """Return the environment after a fix; None if the fix is another command."""
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
    """Apply one fix after another; no error comes twice."""
    env, seen = case.env, []
    while env is not None and (error := error_of(env)):
        assert error.found not in seen
        seen.append(error.found)
        env = apply_fix(error.fixes[0], env)
    fixes = " ".join(error_of(case.env).fixes)
    for name, value in re.findall(r"env (HPCTRAIN_LAUNCHER)=(\w+) COMMAND", fixes):
        error = error_of({**case.env, name: value})
        assert error is None or error.found != seen[0]


@pytest.mark.parametrize("name", [one.name for one in LAUNCHERS if "local_rank" in one.variables])
def test_fix_of_missing_local_rank_makes_a_single_process(name):
    (launcher,) = (one for one in LAUNCHERS if one.name == name)
    env = launcher_variables(name, **dict.fromkeys(launcher.variables["local_rank"]))
    fix = " ".join(error_of(env).fixes)
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


def test_numbers_of_any_length_are_read():
    digits = "9" * 5000
    assert detect(launcher_variables("slurm", SLURM_STEP_ID=digits)).launcher == "none"
    assert survey(launcher_variables("slurm", SLURM_GPUS_ON_NODE=digits)).allocation.gpus is None


# One of each kind: an incomplete environment, a wrong number, two launchers that disagree.
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
    error = error_of(case.env)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hpctrain: error: {error}\n")
    assert done.stderr.count("hpctrain: error: ") == 1
    assert "Traceback" not in done.stderr
    if error.fixes[0].startswith("hpctrain explain"):
        assert all(name in done.stdout for name in shown_variables(error))


def end_process(process):
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


# A program that runs a command without the environment.
DROPS = '#!/bin/sh\nenv -i $KEEP "$@"\nexit $?\n'
STRICT = [sys.executable, "-m", "hpctrain", "explain", "--strict"]


def test_explain_names_the_launcher_of_a_rank_whose_environment_was_dropped(tmp_path):
    program = tmp_path / "orted"
    program.write_text(DROPS)
    program.chmod(0o755)
    path = os.environ.get("PYTHONPATH")
    keep = f"PYTHONPATH={path}" if path else "A=B"

    def run(keep):
        process = subprocess.Popen(
            [program, *STRICT], env={**os.environ, "KEEP": keep}, stdout=subprocess.PIPE, text=True
        )
        return process.communicate(timeout=60)[0], process.returncode, process.pid

    out, code, pid = run(keep)
    assert code == 2
    assert "warning: no launcher's variable is set, but this process descends from orted" in out
    assert f"(pid {pid})" in out
    assert "env HPCTRAIN_LAUNCHER=none COMMAND" in out
    out, code, _ = run(f"{keep} HPCTRAIN_LAUNCHER=none")
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
    ("method", "env"),
    [("fork", launcher_variables("slurm")), ("forkserver", ENV_LAUNCHER), ("spawn", {})],
)
def test_multiprocessing_child_error_shows_how_to_start_ranks(method, env, tmp_path):
    (tmp_path / "train.py").write_text(CHILDREN)
    done = launches.start([sys.executable, "train.py", method], tmp_path, **env)
    assert done.returncode == 0, done.stderr
    rank = "1" if env else "0"
    assert done.stdout.startswith(f"{rank} None multiprocessing ")
    assert f"rank {rank}" in done.stdout
    assert "hpctrain run --nproc-per-node N SCRIPT" in done.stdout
    assert "hpctrain.spawn(FUNCTION, N)" in done.stdout
    assert "hpctrain explain HT109" in done.stdout


def open_session(pipe, env, arguments):
    os.environ.update(env)
    sys.orig_argv = ["python", "train.py", *arguments]  # this process has those of its server
    try:
        parsed = hpctrain.options().parse_args(["--batch-size", "1", *arguments])
        with hpctrain.Session(parsed, start_timeout=30) as session:
            pipe.send((session.world.launcher, session.world.local_rank, session.sum(1)))
    except HpctrainError as error:
        pipe.send(error)


def open_sessions(*environments, arguments=()):
    """Open Sessions in forked children of multiprocessing; return their results or errors."""
    with contextlib.ExitStack() as stack:
        pipes = []
        for env, options in zip(environments, arguments or [()] * len(environments), strict=True):
            receiver, sender = FORKSERVER.Pipe(duplex=False)
            process = FORKSERVER.Process(target=open_session, args=(sender, env, options))
            process.start()
            stack.callback(end_process, process)
            sender.close()
            pipes.append(stack.enter_context(receiver))
        results = []
        for pipe in pipes:
            assert pipe.poll(60)
            results.append(pipe.recv())
        return results


@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_session_refuses_wrong_environment_before_the_rendezvous(case):
    """Otherwise the rendezvous would end with a time-out that names missing ranks."""
    (error,) = open_sessions(case.env)
    assert (error.exit_code, str(error)) == (2, str(error_of(case.env)))


def test_session_in_a_multiprocessing_child_is_refused():
    (error,) = open_sessions({})
    assert isinstance(error, HpctrainError)
    assert (error.exit_code, error.code) == (2, "HT109")
    assert "multiprocessing" in error.found


def test_multiprocessing_child_with_launcher_none_is_a_single_process():
    assert open_sessions({"HPCTRAIN_LAUNCHER": "none"}) == [("none", 0, 1)]


def rank_variables(rank, **more):
    return {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", **more}


def test_mp_spawn_children_with_ranks_of_their_own_train_together():
    """Set RANK in each child, as functions of mp.spawn do."""
    port = {"MASTER_PORT": str(20000 + secrets.randbelow(12000))}
    results = open_sessions(
        *(rank_variables(rank, LOCAL_RANK=str(rank), **port) for rank in range(3))
    )
    assert results == [("env", rank, 3) for rank in range(3)]


def test_local_rank_argument_ranks_train_together():
    port = {"MASTER_PORT": str(20000 + secrets.randbelow(12000))}
    arguments = [["--local_rank", str(rank)] for rank in range(3)]
    results = open_sessions(
        *(rank_variables(rank, **port) for rank in range(3)), arguments=arguments
    )
    assert results == [("env", rank, 3) for rank in range(3)]


def test_local_rank_argument_is_read_from_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text("import hpctrain; print(hpctrain.detect().local_rank)")
    command = [sys.executable, "-u", "train.py", "--lr", "1", "--local_rank"]
    done = launches.start([*command, "2"], tmp_path, **rank_variables(2, MASTER_PORT="29500"))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
