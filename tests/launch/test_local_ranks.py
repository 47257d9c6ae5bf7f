"""Ranks on this machine: their environment, their output, their exit codes, and their end."""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.run_options import AS
from hpctrain.cluster import env_vars
from hpctrain.cluster.launchers import LAUNCHERS
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.launch import rank_output, starts, supervisor
from hpctrain.launch.rank_environment import layout, of_rank
from hpctrain.launch.rank_processes import Rank

INHERITED = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASK_PID": "7",
    "HOROVOD_ELASTIC": "1",
    "HOROVOD_HOSTNAME": "elsewhere",
    "OMPI_COMM_WORLD_RANK": "7",
    "PMI_RANK": "7",
    "TORCHELASTIC_RUN_ID": "other",
    "RANK": "7",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "7",
    "MASTER_ADDR": "elsewhere",
    "MASTER_PORT": "1",
    "HPCTRAIN_RANK": "7",
    "HPCTRAIN_EXIT_STATUS_FILE": "/elsewhere",
    "HPCTRAIN_LAUNCHER": "env",
}
SETTINGS = {"HOROVOD_FUSION_THRESHOLD": "1", "HOROVOD_TIMELINE": "timeline.json"}


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Return a function that starts ranks, which run lines of Python in an empty folder.

    The launcher writes `ended-RANK` there when a rank has ended.
    """
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 0.5)
    monkeypatch.setattr(supervisor, "_SECONDS_TO_STOP", 0.5)
    reap = supervisor._Watch._reap

    def reap_and_record(self, rank):
        reap(self, rank)
        (tmp_path / f"ended-{rank.number}").touch()

    monkeypatch.setattr(supervisor._Watch, "_reap", reap_and_record)
    script = tmp_path / "script.py"

    def run(lines, tasks_per_node=(3,), env=None, launcher=None):
        script.write_text(
            "import json, os, signal, subprocess, sys, time\n"
            "from hpctrain.cluster.launchers import detect\n"
            f"os.chdir({str(tmp_path)!r})\n"
            f"launcher = {os.getpid()}\n"
            "world = detect()\n"
            "def until(*names):\n"
            "    while not all(map(os.path.exists, names)): time.sleep(0.01)\n" + lines
        )
        env = {**os.environ, **(env or {})}
        command = [sys.executable, str(script)]
        if launcher is None and len(tasks_per_node) == 1:
            return starts.on_this_machine(command, str(tasks_per_node[0]), env)
        return starts.simulated(command, tasks_per_node, env, launcher or "hpctrain", ())

    return run


class SignalAfterTheEnd(queue.SimpleQueue):
    """Events in which a signal to this process follows the end of each rank."""

    def get(self, *arguments, **keywords):
        event = super().get(*arguments, **keywords)
        if isinstance(event, Rank):
            self.put(signal.SIGTERM)
        return event


@pytest.mark.parametrize("command", ["exit 0", "kill -TERM $$", "sleep 60 & exit 3"])
def test_signal_that_comes_after_the_end_of_the_ranks_is_not_lost(tmp_path, command):
    """Slurm ends all processes of a job at once, in any order."""
    file, events = tmp_path / "start" / "exit-status", SignalAfterTheEnd()
    file.parent.mkdir()
    environ = {0: dict(os.environ)}
    outcome = supervisor.run(["sh", "-c", command], environ, file, False, events)
    assert outcome.signal == signal.SIGTERM


@pytest.mark.parametrize(
    ("per_node", "gpus", "expected"),
    [
        ("auto", [0], (1,)),
        ("auto", [4], (4,)),
        ("auto", [4, 0, 2], (4, 1, 2)),
        ("3", [8], (3,)),
        ("2", [0, 0, 0], (2, 2, 2)),
        ("2,1", [0, 8], (2, 1)),
        ("5", [0], (5,)),
    ],
)
def test_nproc_per_node_lays_ranks_out_over_hosts(per_node, gpus, expected):
    assert layout(per_node, gpus) == expected


@pytest.mark.parametrize(
    ("nodes", "per_node"),
    [
        (1, "0"),
        (1, "-1"),
        (1, "many"),
        (1, ""),
        (1, "1.5"),
        (1, "2,1"),
        (3, "2,1"),
        (2, "2,"),
        (2, "2,0"),
    ],
)
def test_bad_nproc_per_node_is_refused(nodes, per_node):
    with pytest.raises(UsageError) as caught:
        layout(per_node, [0] * nodes)
    assert f"--nproc-per-node {per_node} (nodes: {nodes})" in caught.value.found
    assert (caught.value.exit_code, caught.value.code) == (2, "HT213")


@pytest.mark.parametrize("launcher", AS.values())
def test_ranks_have_their_rank_and_no_variables_of_other_launchers(ranks, tmp_path, launcher):
    lines = (
        "import dataclasses\n"
        "place = {'world': dataclasses.asdict(world), 'env': dict(os.environ)}\n"
        "open(f'rank-{world.rank}', 'w').write(json.dumps(place))\n"
    )
    assert ranks(lines, (2, 1), {**INHERITED, **SETTINGS}, launcher=launcher) == 0
    places = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(3)]
    for rank, (node, local_rank, size) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 1)]):
        world, env = places[rank]["world"], places[rank]["env"]
        of_slurm = launcher == "slurm"  # its names of nodes lead to this machine
        hosts = ("127.0.0.1", "127.0.0.2") if of_slurm else ("node1", "node2")
        full = World(rank, 3, local_rank, size, node, 2, hosts, launcher)
        for name, value in dataclasses.asdict(full).items():
            known = world[name] is not None or launcher == "hpctrain"
            assert world[name] == (list(value) if name == "hosts" else value) or not known
        assert None not in (world["rank"], world["world_size"], world["local_rank"])
        own = next(one for one in LAUNCHERS if one.name == launcher).environ(full, (2, 1), 5)
        if launcher == "hpctrain":
            way = {"start": "5", "main_address": "127.0.0.1", "own_address": "127.0.0.1"}
            own = of_rank(full, (2, 1), INHERITED, **way, ports=(1, 2, 3))
            for name in ("RANK", "HOROVOD_RANK", "SLURM_PROCID"):
                assert env[name] == str(rank)
            assert env["MASTER_PORT"] != INHERITED["MASTER_PORT"]
        job = {}
        if launcher == "hpctrain":
            job = env_vars.of_the_job(INHERITED)
            job |= {name: value for name, value in own.items() if name.startswith("SLURM_")}
        assert job.items() | SETTINGS.items() <= env.items()
        assert launcher != "hpctrain" or env["SLURM_JOB_ID"] == "1"
        passed = {"HPCTRAIN_EXIT_STATUS_FILE"} | (
            {"MASTER_ADDR", "MASTER_PORT"} if of_slurm else set()
        )
        for name in INHERITED.keys() - own.keys() - job.keys() - passed:
            assert name not in env
        assert env["HPCTRAIN_HOSTNAME"] == hosts[node]
        assert env["HPCTRAIN_MAIN_ADDRESS"] == "127.0.0.1"
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert env["PATH"] == os.environ["PATH"]
    assert len({one["env"]["HPCTRAIN_EXIT_STATUS_FILE"] for one in places}) == 1
    assert not Path(places[0]["env"]["HPCTRAIN_EXIT_STATUS_FILE"]).parent.exists()


@pytest.mark.parametrize("tasks", [(1,), (3,)])
def test_output_lines_have_the_rank_if_there_are_several(ranks, capfd, tasks):
    lines = (
        "sys.stdout.buffer.write(b'first \\xff\\n' + b'x' * 100_000 + b'\\n')\n"
        "sys.stderr.write('no end of line')\n"
    )
    assert ranks(lines, tasks) == 0
    out, err = capfd.readouterr()
    expected_out, expected_err = [], []
    for rank in range(sum(tasks)):
        label = f"{rank}: " if sum(tasks) > 1 else ""
        expected_out += [label + "first \ufffd", label + "x" * 100_000]
        expected_err += [label + "no end of line"]
    assert sorted(out.splitlines()) == sorted(expected_out)
    lines = err.splitlines()
    if len(expected_err) > 1:
        assert lines[0].startswith("hpctrain: OMP_NUM_THREADS=")
        assert "has opened a Session, and no connection" in lines[-4]
        lines = lines[1:-4]
    assert sorted(lines) == sorted(expected_err)


def test_first_failed_rank_gives_the_exit_code_and_its_last_output(ranks, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 60.0)  # the others end by themselves
    lines = (
        "if world.rank == 1:\n"
        "    print('the cause', file=sys.stderr)\n"
        "    sys.exit(3)\n"
        "until('ended-1')\n"
        "sys.exit('a consequence')\n"
    )
    assert ranks(lines) == 3
    output = capfd.readouterr().err
    assert output.endswith(
        "hpctrain: rank 1 failed first, with exit code 3. Its last lines:\n  the cause\n"
    )
    assert "0: a consequence" in output


def test_wrong_use_of_one_rank_is_repeated(ranks, capfd):
    lines = (
        "if world.rank == 1:\n"
        "    print('no such option', file=sys.stderr)\n"
        "    sys.exit(2)\n"
        "time.sleep(3600)\n"
    )
    assert ranks(lines) == 2
    output = capfd.readouterr().err
    assert output.endswith(
        "rank 1 failed first, with exit code 2. Its last lines:\n  no such option\n"
    )


def test_wrong_use_of_all_ranks_is_not_repeated(ranks, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 60.0)  # all print it before they are ended
    assert ranks("print('no such option', file=sys.stderr)\nsys.exit(2)\n") == 2
    assert "failed first" not in capfd.readouterr().err


def test_traceback_with_which_all_ranks_end_is_printed_once(ranks, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 60.0)
    lines = "print(f'in {world.rank}', file=sys.stderr)\nimport no_such_package.part\n"
    assert ranks(lines) == 1
    output = capfd.readouterr().err
    assert output.count("Traceback (most recent call last)") == 1
    error = "ModuleNotFoundError: No module named 'no_such_package'"
    # In the traceback of one rank, and in the line about the first rank that failed.
    assert output.count(error) == 2
    assert all(f"{rank}: in {rank}\n" in output for rank in range(3))
    assert output.endswith(
        f" failed first, with exit code 1: {error}\n"
        f"  expected: no_such_package in the environment of {sys.executable}\n"
        "  fix:      activate the environment with no_such_package before hpctrain run\n"
    )


def test_chained_tracebacks_and_errors_of_syntax_are_printed_once(ranks, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 60.0)
    lines = (
        "try:\n"
        "    1 / 0\n"
        "except ZeroDivisionError as error:\n"
        "    raise ValueError('two lines\\n  of text') from error\n"
    )
    assert ranks(lines) == 1
    output, _, summary = capfd.readouterr().err.rpartition("hpctrain: rank ")
    assert "failed first" in summary
    assert [output.count(f": {kind}Error") for kind in ("ZeroDivision", "Value")] == [1, 1]
    assert output.count("direct cause") == 1
    assert output.count(":   of text\n") == 1
    assert ranks("a line that is no Python\n") == 1
    output = capfd.readouterr().err.rpartition("hpctrain: rank ")[0]
    assert output.count("a line that is no Python") == 1
    assert output.count("SyntaxError: ") == 1


def test_different_tracebacks_are_all_printed(ranks, capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 60.0)
    assert ranks("raise ValueError(f'of {world.rank // 2}')\n", (4,)) == 1
    output = capfd.readouterr().err.rpartition("hpctrain: rank ")[0]
    assert output.count("ValueError: of 0") == 1
    assert output.count("ValueError: of 1") == 1


def test_traceback_of_a_rank_that_goes_on_is_always_printed(ranks, capfd):
    lines = (
        "import traceback\n"
        "try:\n"
        "    1 / 0\n"
        "except ZeroDivisionError:\n"
        "    traceback.print_exc()\n"
        "print('goes on', file=sys.stderr)\n"
    )
    assert ranks(lines) == 0
    assert capfd.readouterr().err.count("ZeroDivisionError: ") == 3


def test_traceback_of_a_rank_that_hangs_is_printed(ranks, capfd, tmp_path, monkeypatch):
    """A thread may fail, and the rank then wait for it without a word."""
    # The rank ends when its launcher has written the traceback.
    write = rank_output._Sink.write

    def write_and_note(self, data):
        write(self, data)
        if b"ZeroDivisionError" in data:
            (tmp_path / "written").touch()

    monkeypatch.setattr(rank_output._Sink, "write", write_and_note)
    lines = (
        "import traceback\n"
        "if world.rank == 1:\n"
        "    try:\n"
        "        1 / 0\n"
        "    except ZeroDivisionError:\n"
        "        traceback.print_exc()\n"
        "until('written')\n"
    )
    assert ranks(lines) == 0
    assert "1: ZeroDivisionError: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("absent", "No such file or directory"),
        # Root may search any folder, so the system denies permission to run a folder instead.
        ("denied", "No such file or directory"),
        ("not executable", "Permission denied"),
    ],
)
def test_program_that_cannot_be_started_is_refused(kind, reason, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    if kind == "denied":
        (folder / "no-such-program").mkdir()
        folder.chmod(0)
    if kind == "not executable":
        (folder / "no-such-program").write_text("")
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    with pytest.raises(UsageError) as caught:
        starts.on_this_machine(["no-such-program"], "3", env)
    folder.chmod(0o700)
    assert caught.value.code == "HT806"
    assert caught.value.found == f"no-such-program cannot be started: {reason}"


def test_ctrl_c_waits_for_the_save_of_a_rank(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_SECONDS_TO_FAIL", 0.05)
    lines = (
        "try:\n"
        "    open(f'ready-{world.rank}', 'w').close()\n"
        "    if world.rank == 0:\n"
        "        until('ready-1', 'ready-2')\n"
        "        os.kill(launcher, signal.SIGINT)\n"
        "    until('never')\n"
        "except KeyboardInterrupt:\n"
        "    if world.rank: raise\n"
        "    until('ended-1', 'ended-2')\n"
        "    time.sleep(0.5)\n"  # longer than the limit for a hanging rank
        "    open('saved', 'w').close()\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert ranks(lines) == 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").exists()


def test_nohup_ignored_signals_stay_ignored(ranks):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ranks("os.kill(launcher, signal.SIGHUP); os.kill(0, signal.SIGHUP)") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_exit_codes_with_sigchld_ignored(ranks):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert ranks("sys.exit(7)", (1,)) == 7
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_exit_status_file_is_repeated_to_the_outer_one(ranks, tmp_path):
    lines = (
        "from hpctrain.rundir.exit_status import write_exit_status\n"
        "write_exit_status(os.environ['HPCTRAIN_EXIT_STATUS_FILE'], 75, 'stopped')\n"
    )
    outer = tmp_path / "outer"
    assert ranks(lines, (1,), {"HPCTRAIN_EXIT_STATUS_FILE": str(outer)}) == 75
    assert json.loads(outer.read_text()) == {"code": 75, "reason": "stopped"}


def test_launcher_variable_reaches_the_ranks(ranks):
    lines = "sys.exit(os.environ.get('HPCTRAIN_LAUNCHER') != 'hpctrain')\n"
    assert ranks(lines, (1,), {"HPCTRAIN_LAUNCHER": "hpctrain"}) == 0
    assert ranks(lines, (1,), {"HPCTRAIN_LAUNCHER": "slurm"}) == 1


def test_exit_code_of_a_rank_killed_by_a_signal_is_that_of_a_shell(ranks, capfd):
    lines = "if world.rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
    assert ranks(lines) == 137
    assert "rank 2 failed first, with signal SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_hanging_ranks_are_ended_after_another_failed(ranks, capfd, ignores_sigterm):
    lines = "if world.rank == 0: sys.exit(4)\n"
    if ignores_sigterm:
        lines += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    assert ranks(lines + "time.sleep(3600)\n") == 4
    assert "rank 0 failed first" in capfd.readouterr().err


def test_exit_status_file_of_rank_0_gives_the_exit_code(ranks, capfd):
    lines = (
        "from hpctrain.rundir.exit_status import write_exit_status\n"
        "path = os.environ['HPCTRAIN_EXIT_STATUS_FILE']\n"
        "if world.rank == 0: write_exit_status(path, {code}, 'why')\n"
        "sys.exit({leave})\n"
    )
    assert ranks(lines.format(code=75, leave=0)) == 75
    assert ranks(lines.format(code=75, leave=1)) == 75
    assert ranks(lines.format(code=76, leave=0), (1,)) == 76
    assert ranks(lines.format(code=0, leave=0)) == 0
    assert ranks(lines.format(code=0, leave=3), (1,)) == 3  # the script failed after its session


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_stop_signal_before_a_session_exits_with_75(ranks, tmp_path, number):
    lines = (
        "open(f'ready-{world.rank}', 'w').close()\n"
        "until('ready-0', 'ready-1', 'ready-2')\n"
        f"if world.rank == 0: os.kill(launcher, {int(number)})\n"
        "until('never')\n"  # one long sleep would miss a signal just before it
    )
    exit_status_file = tmp_path / "exit-status"
    assert ranks(lines, env={"HPCTRAIN_EXIT_STATUS_FILE": str(exit_status_file)}) == 75
    exit_status = json.loads(exit_status_file.read_text())
    assert (exit_status["code"], number.name in exit_status["reason"]) == (75, True)


def test_stop_file_variable_reaches_the_ranks(ranks):
    lines = "sys.exit(os.environ['HPCTRAIN_STOP_FILE'] != '/a/file')\n"
    assert ranks(lines, env={"HPCTRAIN_STOP_FILE": "/a/file"}) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM])
def test_signals_are_passed_on_and_handlers_put_back(ranks, number):
    def handler(caught, frame):
        raise AssertionError("the signal was not handled")

    before = signal.signal(number, handler)
    lines = (
        f"signal.signal({int(number)}, lambda number, frame: sys.exit(0))\n"
        "open(f'ready-{world.rank}', 'w').close()\n"
        "until('ready-0', 'ready-1', 'ready-2')\n"
        f"if world.rank == 0: os.kill(launcher, {int(number)})\n"
        "until('never')\n"  # one long sleep would miss a signal just before it
        "sys.exit(9)\n"
    )
    try:
        assert ranks(lines) == 0
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_simulated_hosts_have_gpus_of_their_own(tmp_path, capfd):
    script = tmp_path / "gpus.py"
    script.write_text("import os; print('GPUs', os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))\n")
    command = [sys.executable, str(script)]

    def gpus_of_ranks(tasks, gpus):
        assert starts.simulated(command, tasks, os.environ, "hpctrain", gpus) == 0
        return sorted(capfd.readouterr().out.splitlines())

    assert gpus_of_ranks((2, 1), ["0", "1", "5"]) == ["0: GPUs 0,1", "1: GPUs 0,1", "2: GPUs 5"]
    assert gpus_of_ranks((2, 1), ["0"]) == ["0: GPUs ", "1: GPUs ", "2: GPUs "]
    assert gpus_of_ranks((2,), ["0"]) == ["0: GPUs all", "1: GPUs all"]


def test_closed_output_pipe_does_not_hold_up_the_ranks(tmp_path):
    script = tmp_path / "talks.py"
    script.write_text("for _ in range(20000): print('a line that fills the pipe', flush=False)\n")
    command = f"{sys.executable} -m hpctrain run --nproc-per-node 2 '{script}' | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("a line that fills the pipe\n")
