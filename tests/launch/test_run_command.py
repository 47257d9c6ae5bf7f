"""`hpctrain run` as a person types it: real processes, of which none is left at the end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import launches
import processes
import pytest
from processes import until

from hpctrain.cli import main
from hpctrain.errors import ContradictionError
from hpctrain.launch.supervisor import SECONDS_OF_ONE_SIGNAL

RUN = [launches.PYTHON, "-m", "hpctrain", "run"]
PRINT_WORLD = """
import dataclasses, json, os
from hpctrain import rendezvous
from hpctrain.cluster.launchers import survey
from hpctrain.rundir.exit_status import write_exit_status
start = survey()
roster = rendezvous.meet(start.world, start.rendezvous_point, {}, 120)
if roster.world.rank == 0 and "CODE" in os.environ:
    path = os.environ["HPCTRAIN_EXIT_STATUS_FILE"]
    write_exit_status(path, int(os.environ["CODE"]), "why")
print(json.dumps({**dataclasses.asdict(roster.world), "key": start.rendezvous_point.key}))
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def background():
    """Return a function that starts commands; those that still run at the end are killed."""
    with processes.background() as begin:
        yield begin


def worlds(text):
    """Return what the ranks of PRINT_WORLD printed, by rank."""
    worlds_of_ranks = [json.loads(line.partition(": ")[2]) for line in text.splitlines()]
    return sorted(worlds_of_ranks, key=lambda world: world["rank"])


def test_simulated_launcher_ranks_find_each_other_in_rendezvous(script, tmp_path):
    command = [
        *RUN,
        "--nodes",
        "2",
        "--nproc-per-node",
        "2,1",
        "--as",
        "slurm",
        script(PRINT_WORLD),
    ]
    done = launches.start(command, tmp_path, SLURM_JOB_ID="4711", SLURM_PROCID="9")
    assert done.returncode == 0, done.stderr
    worlds_of_ranks = worlds(done.stdout)
    assert [world["rank"] for world in worlds_of_ranks] == [0, 1, 2]
    for world in worlds_of_ranks:
        assert world["launcher"] == "slurm"
        assert world["hosts"] == ["127.0.0.1", "127.0.0.2"]
        assert world["node_rank"] == (0, 0, 1)[world["rank"]]
        assert world["local_world_size"] == (2, 2, 1)[world["rank"]]


def options_of_host(rank, nodes, counts, port):
    """Return the command of one of several real hosts."""
    place = ["--nodes", str(nodes), "--node-rank", str(rank), "--nproc-per-node", counts]
    return [*RUN, *place, "--main-address", "127.0.0.1", "--main-port", str(port)]


def test_manual_run_on_three_hosts_is_one_world_with_the_exit_code_of_rank_0(script, background):
    path, port = script(PRINT_WORLD), 20000 + os.getpid() % 10000
    starts = [
        background(
            [*options_of_host(rank, 3, "2,1,1", port), path],
            HPCTRAIN_HOSTNAME=f"real{rank}",
            CODE="75",
        )
        for rank in (2, 0, 1)
    ]
    outputs = [start.communicate(timeout=60) for start in starts]
    assert [start.returncode for start in starts] == [0, 75, 0], outputs
    worlds_of_ranks = worlds("".join(out for out, _ in outputs))
    assert [world["rank"] for world in worlds_of_ranks] == [0, 1, 2, 3]
    assert [world["node_rank"] for world in worlds_of_ranks] == [0, 0, 1, 2]
    assert [world["local_rank"] for world in worlds_of_ranks] == [0, 1, 0, 0]
    assert all(world["hosts"] == ["real0", "real1", "real2"] for world in worlds_of_ranks)
    assert len({world["key"] for world in worlds_of_ranks}) == 1


def test_manual_run_with_different_nproc_names_both_numbers(script, background):
    path, port = script("print('a rank')"), 20000 + (os.getpid() + 1) % 10000
    starts = [
        background(
            [*options_of_host(rank, 2, "21"[rank], port), path], HPCTRAIN_HOSTNAME=f"h{rank}"
        )
        for rank in range(2)
    ]
    outputs = [start.communicate(timeout=60) for start in starts]
    assert [out for out, _ in outputs] == ["", ""]
    assert [start.returncode for start in starts] == [ContradictionError.exit_code] * 2
    assert "--nproc-per-node 2 on h0, and 1 on h1" in outputs[0][1]
    assert "2 on h0, and 1 on h1" in outputs[1][1]


@pytest.mark.parametrize("style", ["slurm", "torchrun", "mpi", "horovod"])
def test_run_in_the_tasks_of_another_launcher_makes_each_one_rank(script, tmp_path, style):
    tasks = [*RUN, "--nodes", "2", "--nproc-per-node", "2,1", "--as", style, "--"]
    done = launches.start([*tasks, *RUN, script(PRINT_WORLD)], tmp_path)
    assert done.returncode == 0, done.stderr
    worlds_of_ranks = worlds(done.stdout)
    assert [world["rank"] for world in worlds_of_ranks] == [0, 1, 2]
    assert [world["node_rank"] for world in worlds_of_ranks] == [0, 0, 1]
    assert [world["local_rank"] for world in worlds_of_ranks] == [0, 1, 0]
    assert {world["launcher"] for world in worlds_of_ranks} == {"hpctrain"}
    assert len({world["key"] for world in worlds_of_ranks}) == 1


def test_run_with_nproc_in_a_task_of_each_host_starts_the_ranks_of_the_host(script, tmp_path):
    tasks = [*RUN, "--nodes", "2", "--nproc-per-node", "1", "--as", "slurm", "--"]
    command = [*tasks, *RUN, "--nproc-per-node", "2,1", script(PRINT_WORLD)]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0, done.stderr
    # Each line has the task in front of the rank.
    worlds_of_ranks = worlds("".join(line[3:] for line in done.stdout.splitlines(keepends=True)))
    assert [world["rank"] for world in worlds_of_ranks] == [0, 1, 2]
    assert [world["node_rank"] for world in worlds_of_ranks] == [0, 0, 1]
    assert len({world["key"] for world in worlds_of_ranks}) == 1
    assert "3 ranks on 2 hosts, 2, 1 on each" in done.stderr


def test_run_with_nproc_in_several_tasks_of_a_host_is_refused(script, tmp_path):
    tasks = [*RUN, "--nodes", "2", "--nproc-per-node", "2,1", "--as", "slurm", "--"]
    command = [*tasks, *RUN, "--nproc-per-node", "2", script("print('a rank')")]
    done = launches.start(command, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "3 tasks on 2 nodes each started hpctrain run" in done.stderr
    assert "srun --ntasks-per-node=1 hpctrain run --nproc-per-node N" in done.stderr


HAND = ("--nodes", "2", "--node-rank", "0", "--main-address", "h0", "--main-port", "8888")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (HAND[:4], ["--node-rank without --main-address and --main-port", "--main-port 8888"]),
        (HAND[4:6], ["--main-address without --nodes"]),
        (HAND[6:], ["--main-port without"]),
        (HAND[2:], ["without --nodes"]),
        ((*HAND, "--node-rank", "2"), ["--node-rank 2 with --nodes 2", "0 to --nodes minus 1"]),
        ((*HAND, "--node-rank", "-1"), ["--node-rank -1"]),
        ((*HAND, "--main-address", ""), ["--main-address is empty"]),
        ((*HAND, "--as", "slurm"), ["--as slurm with --node-rank"]),
        ((*HAND, "--nproc-per-node", "1,1,1"), ["1,1,1 (nodes: 2)", "HT213"]),
        (
            ("--nodes", "3", "--ntasks-per-node", "2,1"),
            ["--nproc-per-node 2,1 (nodes: 3)", "HT213"],
        ),
        (("--nproc-per-node", "10000"), ["10000 ranks", "at most", "HT213"]),
        (("--once",), ["--once outside of a Slurm batch script", "hpctrain run without --once"]),
        (("--setting", "--lr 1"), ["--setting outside"]),
        (("--container", "a.sif", "--nodes", "2"), ["--container outside"]),
        (("--direct", "--nproc-per-node", "2"), ["--nproc-per-node with --direct"]),
        (("--once", "--container", "a.sif"), ["--container with --once"]),
    ],
)
def test_run_refuses_wrong_options_before_a_rank_starts(options, words, script, capfd):
    assert main(["run", *options, script("print('a rank')")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("error:") == 1
    assert "fix:" in err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "words",
    [("--nodes", "0"), ("--main-port", "70000"), ("--min-nproc", "x"), ("--max-attempts", "0")],
)
def test_run_refuses_wrong_numbers(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *words, "program.py"])
    assert caught.value.code == 2
    assert f"argument {words[0]}: '{words[1]}' is no " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "word"),
    [("", "empty"), ("no-such.py", "no-such.py does not exist"), (".", "is a folder, not a file")],
)
def test_run_refuses_a_script_that_is_not_a_file(name, word, capfd):
    assert main(["run", "--nproc-per-node", "3", name]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("error:")) == ("", 1)
    assert word in err


def test_failed_start_of_a_rank_ends_all_ranks(script, background):
    path = script("import time; time.sleep(600)")
    command = f"ulimit -n 24; exec {' '.join(RUN)} --nproc-per-node 60 '{path}'"
    start = background(["bash", "-c", command], MARK="no-room")
    _, err = start.communicate(timeout=60)
    assert start.returncode == 1
    assert "cannot be started on this node" in err
    assert "ulimit -n" in err
    until(lambda: not processes.having("MARK=no-room", "environ"))


FAMILY = """
import multiprocessing, os, subprocess, sys, time
context = multiprocessing.get_context("fork")
workers = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
for worker in workers: worker.start()
sleep = "import time; time.sleep(600)"
subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
subprocess.Popen(["setsid", "sleep", "600"])
subprocess.Popen(["sh", "-c", "sleep 600 & wait"], env={"LEFT": os.environ["MARK"]})
print("ready", os.path.dirname(os.environ["HPCTRAIN_EXIT_STATUS_FILE"]), flush=True)
time.sleep(600)
"""


def test_kill_9_of_hpctrain_run_leaves_no_rank_no_child_and_no_file(script, background):
    mark = f"kill-nine-{os.getpid()}"
    start = background([*RUN, "--nproc-per-node", "3", script(FAMILY)], MARK=mark)
    lines = [start.stdout.readline() for _ in range(3)]
    assert all("ready" in line for line in lines), lines
    assert len(processes.having(mark, "environ")) >= 3 * 6
    os.kill(start.pid, signal.SIGKILL)
    start.wait(timeout=60)
    until(lambda: not processes.having(mark, "environ"))
    folder = Path(lines[0].split(maxsplit=2)[2].rstrip())
    until(lambda: not folder.exists() and not processes.having(folder))


def test_normal_exit_leaves_no_child_process(script, background):
    mark = f"normal-end-{os.getpid()}"
    text = FAMILY.replace("time.sleep(600)\n", "os._exit(0)\n").replace("print", "0 and print")
    start = background([*RUN, "--nproc-per-node", "2", script(text)], MARK=mark)
    start.communicate(timeout=60)
    assert start.returncode == 0
    assert not processes.having(mark, "environ")


SAVES = """
import os, pathlib, signal, sys, time
rank = os.environ["HPCTRAIN_RANK"]
if rank == "2" and "IGNORE" in os.environ:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
worker = os.fork()
if worker == 0:
    time.sleep(600); os._exit(0)
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    stat = pathlib.Path(f"/proc/{worker}/stat").read_text()
    pathlib.Path(f"saved-{rank}").write_text(stat)
    if "IGNORE" in os.environ: print("saved", flush=True)
"""


def test_ctrl_c_reaches_each_rank_once_and_not_its_workers(script, background, tmp_path):
    start = background([*RUN, "--nproc-per-node", "3", script(SAVES)])
    assert all("ready" in start.stdout.readline() for _ in range(3))
    os.kill(start.pid, signal.SIGINT)
    _, err = start.communicate(timeout=60)
    assert start.returncode == 0, err
    assert "SIGINT is forwarded" in err
    assert "Traceback" not in err
    for rank in range(3):
        # Child processes are not interrupted: a rank needs its loader workers for the save.
        assert (tmp_path / f"saved-{rank}").read_text().split()[2] in "SRD"


def test_second_ctrl_c_kills_a_rank_that_ignores_the_first(script, background):
    start = background([*RUN, "--nproc-per-node", "3", script(SAVES)], IGNORE="1")
    assert all("ready" in start.stdout.readline() for _ in range(3))
    os.kill(start.pid, signal.SIGINT)
    assert all("saved" in start.stdout.readline() for _ in range(2))
    time.sleep(SECONDS_OF_ONE_SIGNAL)
    os.kill(start.pid, signal.SIGINT)
    start.communicate(timeout=60)
    assert start.returncode == 128 + signal.SIGINT


def test_signal_that_arrives_twice_at_once_counts_once(script, background, tmp_path):
    """Ignore a repeat: a scheduler signals all processes, and timeout(1) sends the signal on."""
    start = background([*RUN, "--nproc-per-node", "2", script(SAVES)])
    assert all("ready" in start.stdout.readline() for _ in range(2))
    os.kill(start.pid, signal.SIGINT)
    assert "SIGINT is forwarded" in start.stderr.readline()
    os.kill(start.pid, signal.SIGINT)
    _, err = start.communicate(timeout=60)
    assert start.returncode == 0, err
    assert (tmp_path / "saved-0").exists()


SLOW_TO_LEAVE = """
import atexit, os, pathlib, sys, time
rank = os.environ["HPCTRAIN_RANK"]
def until(name):
    while not pathlib.Path(name).exists(): time.sleep(0.01)
def ended(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
def linger():
    until("consequence")
    pid = int(pathlib.Path("consequence").read_text())
    while not ended(pid): time.sleep(0.01)
if rank == "2":
    atexit.register(linger)
    sys.excepthook = lambda *error: (
        sys.__excepthook__(*error), sys.stderr.flush(), pathlib.Path("cause").touch()
    )
    def deep(n):
        if n: deep(n - 1) if n % 2 else deep(n - 1)
        raise ValueError("the cause")
    deep(60)
until("cause")
if rank == "0":
    pathlib.Path("pid").write_text(str(os.getpid()))
    os.rename("pid", "consequence")
    print("x" * 100, file=sys.stderr)
    raise RuntimeError("lost rank 2")
"""


def test_first_failure_is_printed_last_also_where_its_rank_exits_last(script, tmp_path):
    done = launches.start([*RUN, "--nproc-per-node", "3", script(SLOW_TO_LEAVE)], tmp_path)
    assert done.returncode == 1
    report = "hpctrain: rank 2 failed first, with exit code 1. Its last lines:\n"
    last_lines = done.stderr.rpartition(report)[2]
    assert last_lines != done.stderr
    lines = last_lines.splitlines()
    assert lines[0].startswith("  Traceback")
    assert lines[-1] == "  ValueError: the cause"


@pytest.mark.slow
def test_output_of_100_megabytes_without_newline_takes_little_memory(script, tmp_path):
    path = script(
        "import sys\nfor _ in range(1600): sys.stdout.buffer.write(b'x' * 65536)\n"
        "sys.stdout.buffer.write(b'\\xff\\0 the end')\n"
    )
    measured = (
        "import resource, subprocess, sys\n"
        f"command = {[*RUN, '--nproc-per-node', '2', path]!r}\n"
        "code = subprocess.call(command, stdout=open('out', 'wb'))\n"
        "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = launches.start([sys.executable, "-c", measured], tmp_path)
    code, kilobytes = map(int, done.stdout.split())
    assert code == 0
    assert kilobytes < 80_000
    lines = (tmp_path / "out").read_bytes().splitlines()
    assert sum(line.count(b"x") for line in lines) == 2 * 1600 * 65536
    assert sum(line.endswith(b"\xff\0 the end") for line in lines) == 2
    assert all(line[:3] in (b"0: ", b"1: ") for line in lines)


def test_output_of_one_rank_is_passed_on_unchanged(script, tmp_path):
    path = script("import sys; sys.stdout.buffer.write(bytes(range(256)) * 300)")
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([*RUN, path], stdout=out, env=launches.environ(), timeout=60, check=True)
    assert (tmp_path / "out").read_bytes() == bytes(range(256)) * 300


def test_two_runs_in_one_folder_have_a_rendezvous_each(script, background):
    path = script(PRINT_WORLD)
    starts = [background([*RUN, "--nproc-per-node", "2", path]) for _ in range(2)]
    keys = set()
    for start in starts:
        out, err = start.communicate(timeout=60)
        assert start.returncode == 0, err
        worlds_of_ranks = worlds(out)
        assert [world["rank"] for world in worlds_of_ranks] == [0, 1]
        keys |= {world["key"] for world in worlds_of_ranks}
    assert len(keys) == 2


def test_omp_num_threads_is_divided_and_logged_once(script, tmp_path):
    path = script("import os; print(os.environ['OMP_NUM_THREADS'])")
    environ = {name: value for name, value in launches.environ().items() if "OMP_NUM" not in name}
    cores = len(os.sched_getaffinity(0))

    def run(*options, **more):
        done = subprocess.run(
            [*RUN, *options, path], env={**environ, **more}, capture_output=True, text=True
        )
        return done.stdout.split(), done.stderr

    share = str(max(1, cores // 3))
    out, err = run("--nproc-per-node", "3")
    assert sorted(out) == sorted(["0:", share, "1:", share, "2:", share])
    assert err.startswith(f"hpctrain: OMP_NUM_THREADS={share} for each of 3 ranks: {cores} core")
    assert err.count("OMP_NUM_THREADS") == 1
    assert run("--nproc-per-node", "1") == ([str(cores)], "")
    out, err = run("--nproc-per-node", "2", OMP_NUM_THREADS="5")
    assert sorted(out) == ["0:", "1:", "5", "5"]
    assert "OMP_NUM_THREADS" not in err


def test_run_dir_on_one_machine_is_passed_to_the_ranks(script, tmp_path):
    path = script("import os; print(os.environ['HPCTRAIN_RUN_DIR'])")
    done = launches.start([*RUN, "--run-dir", "here", path], tmp_path)
    assert done.stdout == "here\n", done.stderr
    done = launches.start([*RUN, "--run-dir", "here", path], tmp_path, HPCTRAIN_RUN_DIR="there")
    assert done.stdout == "there\n"


def test_run_dash_m_starts_a_module(tmp_path):
    done = launches.start(
        [*RUN, "--nproc-per-node", "2", "-m", "hpctrain", "explain", "--json"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [world["world_size"] for world in worlds(done.stdout)] == [2, 2]
