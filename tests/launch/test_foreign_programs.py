"""Programs that know nothing of hpctrain, under `hpctrain run`: torch, Horovod, shell, modules."""

import contextlib
import json
import os
import shutil
import signal
import socket
from pathlib import Path

import launches
import processes
import pytest
from processes import until
from programs import matrix

RUN = [launches.PYTHON, "-m", "hpctrain", "run"]
NONE_OF_THEM = "none of the 3 ranks has opened a Session, and no connection between them was seen"
SERVERS = ["hpctrain.backends.distributed.store_process", "hpctrain.rendezvous.http_store"]


@pytest.fixture
def background():
    """Return a function that starts commands; those that still run at the end are killed."""
    with processes.background() as begin:
        yield begin


def write(name, text):
    """Write a program to the folder of this test, and return its name."""
    Path(name).write_text(text)
    return name


def printed(output):
    """Return what each rank has printed: a line of JSON."""
    lines = dict(line.split(": ", 1) for line in output.splitlines())
    return [json.loads(lines[str(rank)]) for rank in range(len(lines))]


def servers(mark):
    """Return the modules of the servers of stores, with a text in their environment."""
    found = []
    for pid in processes.having(mark, "environ"):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found += words[2:3] if words[2:3] in [[server] for server in SERVERS] else []
    return sorted(found)


def listening(port, address="127.0.0.1"):
    with socket.socket() as probe:
        return probe.connect_ex((address, int(port))) == 0


def check_that_nothing_is_left(mark, ports):
    until(lambda: not processes.having(mark, "environ"))
    assert len(ports) == 2
    # A process that ends loses its environ before its sockets.
    until(lambda: not any(map(listening, ports)))


of_programs = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "torch" else pytest.mark.slow)
        for name, program in matrix.PROGRAMS.items()
        if not program.only_in_slurm
    ],
)


@pytest.fixture
def check(lacking, tmp_path):
    """Return a function that runs a program in a place, and checks that its ranks agree."""

    def check(name, where, cluster=None):
        if package := matrix.missing(matrix.PROGRAMS[name]):
            lacking(package, f"no module named {package}")
        assert matrix.run(name, where, tmp_path, cluster) == ""

    return check


@of_programs
def test_program_of_a_library_trains_with_equal_weights(check, name, monkeypatch):
    mark = f"training-{os.getpid()}"
    monkeypatch.setenv("MARK", mark)
    check(name, "this machine")
    until(lambda: not processes.having(mark, "environ"))


@pytest.mark.slow
@of_programs
def test_program_of_a_library_trains_in_tasks_of_mpirun(check, lacking, name):
    if shutil.which("mpirun.openmpi") is None:
        lacking("openmpi", "no mpirun.openmpi")
    check(name, "mpirun")


@pytest.mark.slow
@pytest.mark.parametrize("name", matrix.PROGRAMS)
@pytest.mark.parametrize("where", ["srun", "batch script"])
def test_program_of_a_library_trains_on_hosts_of_slurm(cluster, check, name, where):
    check(name, where, cluster)


MODULE = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
"""


# The variables of an agent in a job, the second of two.
AGENT = {
    "HPCTRAIN_LAUNCHER": "none",
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK"), "815"),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "1"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), "2"),
    **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), "2"),
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    **dict.fromkeys(("SLURM_JOBID", "SLURM_JOB_NAME", "SLURMD_NODENAME"), "kept"),
    # They are of the agent's own task.
    **dict.fromkeys(("SLURM_SRUN_COMM_PORT", "SLURM_CPU_BIND_TYPE", "PMI_FD", "PMIX_RANK"), "own"),
    # srun would take the binding of the agents' step from it.
    "HPCTRAIN_STEP": json.dumps({"SLURM_GPUS": "kept"}),
}


@pytest.mark.parametrize(
    ("options", "nodes", "job"),
    [((), [0, 0, 0], {}), (("--nodes", "2"), [0, 0, 1], {}), ((), [0, 0, 0], AGENT)],
    ids=["one", "two", "in-a-job"],
)
def test_variables_of_other_launchers_agree_with_those_of_hpctrain(tmp_path, options, nodes, job):
    write("shows.py", MODULE)
    layout = "2,1" if options else "3"
    command = [*RUN, *options, "--nproc-per-node", layout, "-m", "shows", "--", "-m"]
    done = launches.start(command, tmp_path, **job)
    assert done.returncode == 0, done.stderr
    ranks = printed(done.stdout)
    assert len(ranks) == 3
    for number, rank in enumerate(ranks):
        assert rank["argv"] == ["--", "-m"]
        env, node = rank["env"], nodes[number]
        place = {
            "RANK": number,
            "WORLD_SIZE": 3,
            "LOCAL_RANK": number - nodes.index(node),
            "LOCAL_WORLD_SIZE": nodes.count(node),
        }
        for name, value in place.items():
            assert env[name] == env[f"HPCTRAIN_{name}"] == str(value)
            horovod = "HOROVOD_" + name.replace("WORLD_", "")
            assert env[horovod] == str(value)
        slurm = {
            "SLURM_PROCID": number,
            "SLURM_LOCALID": place["LOCAL_RANK"],
            "SLURM_NODEID": node,
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), 3),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), 1),
            **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), 3),
        }
        for name, value in slurm.items():
            assert env.get(name) == (str(value) if job else None)
        kept = ["SLURM_JOBID", "SLURM_JOB_NAME", "SLURMD_NODENAME", "SLURM_GPUS"] if job else []
        assert sorted(name for name, value in env.items() if value == "kept") == sorted(kept)
        assert "own" not in env.values()
        assert env.get("SLURM_CPUS_PER_TASK") == (env["OMP_NUM_THREADS"] if job else None)
        assert env["GROUP_RANK"] == env["HPCTRAIN_NODE_RANK"] == str(node)
        assert env["HOROVOD_CROSS_SIZE"] == str(2 if number != 1 and options else 1)
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == env["MASTER_ADDR"] == "127.0.0.1"
    for name in ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT", "TORCHELASTIC_RUN_ID"):
        assert len({rank["env"][name] for rank in ranks}) == 1
    assert env["MASTER_PORT"] != env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    assert NONE_OF_THEM in done.stderr


def test_task_of_mpirun_keeps_what_its_user_has_chosen_for_horovod(tmp_path):
    write("shows.py", MODULE)
    chosen = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CYCLE_TIME": "7"}
    tasks = ["env", *(f"{name}={value}" for name, value in chosen.items()), *RUN, "-m", "shows"]
    command = [*RUN, "--nproc-per-node", "3", "--as", "mpi", "--", *tasks]
    ranks = printed(launches.start(command, tmp_path).stdout)
    assert [rank["env"]["HOROVOD_RANK"] for rank in ranks] == ["0", "1", "2"]
    assert all(chosen.items() <= rank["env"].items() for rank in ranks)


def test_program_that_never_connects_has_no_server_and_is_named(background):
    mark = f"alone-{os.getpid()}"
    line = "echo rank $RANK of $WORLD_SIZE; until [ -e go ]; do sleep 0.05; done"
    run = background([*RUN, "--nproc-per-node", "3", "--", "sh", "-c", line], MARK=mark)
    lines = {run.stdout.readline() for _ in range(3)}
    assert lines == {f"{rank}: rank {rank} of 3\n" for rank in range(3)}
    assert servers(mark) == []
    running = processes.having(mark, "environ")
    assert len(running) > 3
    for pid in running:
        with contextlib.suppress(OSError):  # it has ended
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    Path("go").touch()
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, "")
    assert NONE_OF_THEM in err
    until(lambda: not processes.having(mark, "environ"))


# A client of Horovod's store, and one that leaves torch's store before it has an answer.
CONNECTS = """
import http.client, json, os, socket, time
ports = [os.environ["MASTER_PORT"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]]
rank = os.environ["RANK"]
for method, path, body in (("PUT", rank, rank), ("GET", rank, None)):
    connection = http.client.HTTPConnection("127.0.0.1", int(ports[1]), timeout=60)
    connection.request(method, f"/scope/{path}", body)
    answer = connection.getresponse().read().decode()
socket.create_connection(("127.0.0.1", int(ports[0])), timeout=60).close()
print(json.dumps({"answer": answer, "ports": ports}), flush=True)
while "WAIT" in os.environ: time.sleep(0.05)
"""


def test_stores_end_with_kill_9_of_hpctrain_run(background):
    mark = f"stores-{os.getpid()}"
    command = [*RUN, "--nproc-per-node", "3", write("connects.py", CONNECTS)]
    run = background(command, MARK=mark, WAIT="1")
    ranks = printed("".join(run.stdout.readline() for _ in range(3)))
    assert [rank["answer"] for rank in ranks] == ["0", "1", "2"]
    until(lambda: servers(mark) == SERVERS)
    for port in ranks[0]["ports"]:
        # A socket with all addresses of this host has this one, too.
        assert listening(port)
        assert not listening(port, "127.0.0.2")
    os.kill(run.pid, signal.SIGKILL)
    run.wait(timeout=60)
    check_that_nothing_is_left(mark, ranks[0]["ports"])


@pytest.mark.parametrize("options", [(), ("--nodes", "3")])
def test_program_that_connects_is_not_named(tmp_path, options):
    mark = f"connected-{os.getpid()}"
    per_node = "1" if options else "3"
    command = [*RUN, *options, "--nproc-per-node", per_node, write("connects.py", CONNECTS)]
    done = launches.start(command, tmp_path, MARK=mark)
    assert done.returncode == 0, done.stderr
    assert "hpctrain: none of the" not in done.stderr
    check_that_nothing_is_left(mark, printed(done.stdout)[0]["ports"])
