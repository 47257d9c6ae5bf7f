"""Ranks are started with their place, heard with their number, and ended together."""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain import variables
from hpctrain.errors import UsageError
from hpctrain.launchers import LAUNCHERS
from hpctrain.local import AS, layout, start, watch
from hpctrain.world import World

INHERITED = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "7",
    "SLURM_STEP_ID": "0",
    "OMPI_COMM_WORLD_RANK": "7",
    "PMI_RANK": "7",
    "TORCHELASTIC_RUN_ID": "other",
    "RANK": "7",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "7",
    "MASTER_ADDR": "elsewhere",
    "MASTER_PORT": "1",
    "HPCTRAIN_RANK": "7",
    "HPCTRAIN_VERDICT": "/elsewhere",
    "HPCTRAIN_LAUNCHER": "env",
}


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Starts ranks that run some lines of Python in an empty folder."""
    monkeypatch.setattr(watch, "_SECONDS_TO_FAIL", 0.5)
    monkeypatch.setattr(watch, "_SECONDS_TO_STOP", 0.5)
    script = tmp_path / "script.py"

    def run(lines, tasks_per_node=(3,), env=None, **more):
        script.write_text(
            "import json, os, signal, subprocess, sys, time\n"
            "from hpctrain.launchers import detect\n"
            f"os.chdir({str(tmp_path)!r})\n"
            "world = detect()\n" + lines
        )
        env = {**os.environ, **(env or {})}
        return start([sys.executable, str(script)], tasks_per_node, env, **more)

    return run


@pytest.mark.parametrize(
    ("nodes", "per_node", "gpus", "expected"),
    [
        (1, "auto", 0, (1,)),
        (1, "auto", 4, (4,)),
        (2, "auto", 4, (2, 2)),
        (1, "3", 8, (3,)),
        (3, "2", 0, (2, 2, 2)),
        (2, "2,1", 0, (2, 1)),
        (1, "5", 0, (5,)),
    ],
)
def test_the_ranks_are_laid_out_over_the_hosts(nodes, per_node, gpus, expected):
    assert layout(nodes, per_node, gpus) == expected


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
def test_a_layout_that_cannot_be_is_refused(nodes, per_node):
    with pytest.raises(UsageError) as caught:
        layout(nodes, per_node, 0)
    assert f"--nproc-per-node {per_node} for {nodes} node" in caught.value.found
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("style", list(AS))
def test_every_rank_knows_its_place_and_nothing_of_other_launchers(ranks, tmp_path, style):
    lines = (
        "import dataclasses\n"
        "said = {'world': dataclasses.asdict(world), 'env': dict(os.environ)}\n"
        "open(f'rank-{world.rank}', 'w').write(json.dumps(said))\n"
    )
    assert ranks(lines, (2, 1), INHERITED, style=style) == 0
    said = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(3)]
    for rank, (node, local_rank, size) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 1)]):
        world, env = said[rank]["world"], said[rank]["env"]
        full = World(rank, 3, local_rank, size, node, 2, ("node1", "node2"), AS[style])
        for name, value in dataclasses.asdict(full).items():
            told = world[name] is not None or style == "hpctrain"
            assert world[name] == (list(value) if name == "hosts" else value) or not told
        assert None not in (world["rank"], world["world_size"], world["local_rank"])
        own = next(one for one in LAUNCHERS if one.name == AS[style]).environ(full, (2, 1), 5)
        job = variables.of_the_job(INHERITED) if style == "hpctrain" else {}
        assert job.items() <= env.items()
        for name in INHERITED.keys() - own.keys() - job.keys() - {"HPCTRAIN_VERDICT"}:
            assert name not in env
        assert env["HPCTRAIN_HOSTNAME"] == f"node{node + 1}"
        assert env["HPCTRAIN_MAIN_ADDRESS"] == "127.0.0.1"
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert env["PATH"] == os.environ["PATH"]
    assert len({one["env"]["HPCTRAIN_VERDICT"] for one in said}) == 1
    assert not Path(said[0]["env"]["HPCTRAIN_VERDICT"]).parent.exists()


@pytest.mark.parametrize("tasks", [(1,), (3,)])
def test_the_output_of_each_rank_carries_its_number_where_there_are_several(ranks, capfd, tasks):
    lines = (
        "sys.stdout.buffer.write(b'first \\xff\\n' + b'x' * 100_000 + b'\\n')\n"
        "sys.stderr.write('no end of line')\n"
    )
    assert ranks(lines, tasks) == 0
    out, err = capfd.readouterr()
    expected_out, expected_err = [], []
    for rank in range(sum(tasks)):
        label = f"{rank}: " if len(range(sum(tasks))) > 1 else ""
        expected_out += [label + "first \ufffd", label + "x" * 100_000]
        expected_err += [label + "no end of line"]
    assert sorted(out.splitlines()) == sorted(expected_out)
    first = err.splitlines()[:1] if len(expected_err) > 1 else []
    assert all(line.startswith("hpctrain: OMP_NUM_THREADS=") for line in first)
    assert sorted(err.splitlines()[len(first) :]) == sorted(expected_err)


def test_the_first_rank_that_fails_gives_the_code_and_its_last_words_are_repeated(
    ranks, capfd, monkeypatch
):
    monkeypatch.setattr(watch, "_SECONDS_TO_FAIL", 60.0)  # the others end by themselves
    lines = (
        "if world.rank == 1:\n"
        "    print('the cause', file=sys.stderr)\n"
        "    open('pid.new', 'w').write(str(os.getpid()))\n"
        "    os.rename('pid.new', 'pid')\n"
        "    sys.exit(3)\n"
        "while not os.path.exists('pid'): time.sleep(0.01)\n"
        "stat = '/proc/' + open('pid').read() + '/stat'\n"
        "while open(stat).read().split()[2] != 'Z': time.sleep(0.01)\n"
        "time.sleep(0.5)\n"  # the system tells of deaths that are closer together in any order
        "sys.exit('a consequence')\n"
    )
    assert ranks(lines) == 3
    told = capfd.readouterr().err
    assert told.endswith("hpctrain: rank 1 failed first, with exit code 3. It said:\n  the cause\n")
    assert "0: a consequence" in told


def test_wrong_use_of_one_rank_alone_is_told_too(ranks, capfd):
    lines = (
        "if world.rank == 1:\n"
        "    print('no such option', file=sys.stderr)\n"
        "    sys.exit(2)\n"
        "time.sleep(3600)\n"
    )
    assert ranks(lines) == 2
    told = capfd.readouterr().err
    assert told.endswith("rank 1 failed first, with exit code 2. It said:\n  no such option\n")


def test_wrong_use_of_all_ranks_is_not_told_again(ranks, capfd, monkeypatch):
    monkeypatch.setattr(watch, "_SECONDS_TO_FAIL", 60.0)  # none is ended before it says so too
    assert ranks("print('no such option', file=sys.stderr)\nsys.exit(2)\n") == 2
    assert "failed first" not in capfd.readouterr().err


def test_a_rank_that_was_interrupted_may_save_for_as_long_as_it_takes(ranks, tmp_path):
    lines = (
        "try:\n"
        "    open(f'ready-{world.rank}', 'w').close()\n"
        "    if world.rank == 0:\n"
        "        while len([n for n in os.listdir() if 'ready' in n]) < 3: time.sleep(0.01)\n"
        "        os.kill(os.getppid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    if world.rank: raise\n"
        "    time.sleep(2)\n"  # longer than a rank has that hangs after another one failed
        "    open('saved', 'w').close()\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert ranks(lines) == 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").exists()


def test_a_signal_that_is_ignored_stays_so_as_nohup_wants_it(ranks):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ranks("os.kill(os.getppid(), signal.SIGHUP); os.kill(0, signal.SIGHUP)") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_exit_codes_are_known_where_the_parent_ignored_its_children(ranks):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert ranks("sys.exit(7)", (1,)) == 7
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_verdict_is_repeated_to_whoever_waits_for_one(ranks, tmp_path):
    lines = (
        "from hpctrain.rundir import write_verdict\n"
        "write_verdict(os.environ['HPCTRAIN_VERDICT'], 75, 'stopped')\n"
    )
    outer = tmp_path / "outer"
    assert ranks(lines, (1,), {"HPCTRAIN_VERDICT": str(outer)}) == 75
    assert json.loads(outer.read_text()) == {"code": 75, "reason": "stopped"}


def test_a_person_may_insist_on_the_launcher_that_it_is(ranks):
    lines = "sys.exit(os.environ.get('HPCTRAIN_LAUNCHER') != 'hpctrain')\n"
    assert ranks(lines, (1,), {"HPCTRAIN_LAUNCHER": "hpctrain"}) == 0
    assert ranks(lines, (1,), {"HPCTRAIN_LAUNCHER": "slurm"}) == 1


def test_a_rank_that_a_signal_ends_counts_as_a_shell_counts_it(ranks, capfd):
    lines = "if world.rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
    assert ranks(lines) == 137
    assert "rank 2 failed first, with signal SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("deaf", [False, True])
def test_ranks_that_hang_after_another_failed_are_ended(ranks, capfd, deaf):
    lines = "if world.rank == 0: sys.exit(4)\n"
    if deaf:
        lines += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    assert ranks(lines + "time.sleep(3600)\n") == 4
    assert "rank 0 failed first" in capfd.readouterr().err


def test_the_verdict_of_rank_0_counts_whatever_the_ranks_leave_with(ranks, capfd):
    lines = (
        "from hpctrain.rundir import write_verdict\n"
        "if world.rank == 0: write_verdict(os.environ['HPCTRAIN_VERDICT'], {code}, 'why')\n"
        "sys.exit({leave})\n"
    )
    assert ranks(lines.format(code=75, leave=0)) == 75
    assert ranks(lines.format(code=75, leave=1)) == 75
    assert ranks(lines.format(code=76, leave=0), (1,)) == 76
    assert ranks(lines.format(code=0, leave=0)) == 0


def test_what_the_ranks_started_ends_with_them(ranks, tmp_path):
    lines = (
        "child = subprocess.Popen(['sleep', '3600'])\n"
        "open(f'child-{world.rank}', 'w').write(str(child.pid))\n"
    )
    assert ranks(lines) == 0
    for rank in range(3):
        try:
            handle = os.pidfd_open(int((tmp_path / f"child-{rank}").read_text()))
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([handle], [], [], 10.0)
        os.close(handle)
        assert ended


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_ranks_that_a_stop_ends_before_they_know_it_are_to_be_run_again(ranks, tmp_path, number):
    lines = (
        "open(f'ready-{world.rank}', 'w').close()\n"
        "while world.rank == 0 and len([n for n in os.listdir() if 'ready' in n]) < 3:\n"
        "    time.sleep(0.01)\n"
        f"if world.rank == 0: os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(20)\n"
    )
    verdict = tmp_path / "verdict"
    assert ranks(lines, env={"HPCTRAIN_VERDICT": str(verdict)}) == 75
    said = json.loads(verdict.read_text())
    assert (said["code"], number.name in said["reason"]) == (75, True)


def test_the_stop_file_of_a_script_is_that_of_its_ranks(ranks):
    lines = "sys.exit(os.environ['HPCTRAIN_STOP'] != '/a/file')\n"
    assert ranks(lines, env={"HPCTRAIN_STOP": "/a/file"}) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_is_passed_on_and_the_handler_is_put_back(ranks, number):
    def handler(caught, frame):
        raise AssertionError("nobody took the signal")

    before = signal.signal(number, handler)
    lines = (
        f"signal.signal({int(number)}, lambda number, frame: sys.exit(0))\n"
        "open(f'ready-{world.rank}', 'w').close()\n"
        "while world.rank == 0 and len([n for n in os.listdir() if 'ready' in n]) < 3:\n"
        "    time.sleep(0.01)\n"
        f"if world.rank == 0: os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(20)\n"
        "sys.exit(9)\n"
    )
    try:
        assert ranks(lines) == 0
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['HPCTRAIN_RANK'] + '.pid').write_text(str(os.getpid()))\n"
        "print('here', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", "3", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        for _ in range(3):
            assert launcher.stdout.readline().endswith("here\n")
        pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(3)]
        waits = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
    for pidfd in waits:
        assert select.select([pidfd], [], [], 20)[0], "a rank is still there"
        os.close(pidfd)


def test_pretended_hosts_have_gpus_of_their_own(tmp_path, capfd):
    script = tmp_path / "gpus.py"
    script.write_text("import os; print('GPUs', os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))\n")
    command = [sys.executable, str(script)]

    def seen(tasks, gpus):
        assert start(command, tasks, os.environ, gpus=gpus) == 0
        return sorted(capfd.readouterr().out.splitlines())

    assert seen((2, 1), ["0", "1", "5"]) == ["0: GPUs 0,1", "1: GPUs 0,1", "2: GPUs 5"]
    assert seen((2, 1), ["0"]) == ["0: GPUs ", "1: GPUs ", "2: GPUs "]
    assert seen((2,), ["0"]) == ["0: GPUs all", "1: GPUs all"]


def test_a_reader_that_leaves_does_not_hold_up_the_ranks(tmp_path):
    script = tmp_path / "talks.py"
    script.write_text("for _ in range(20000): print('a line that fills the pipe', flush=False)\n")
    command = f"{sys.executable} -m hpctrain run --nproc-per-node 2 {script} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("a line that fills the pipe\n")


def test_a_rank_that_fails_after_its_verdict_is_a_failure(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "path = pathlib.Path(os.environ['HPCTRAIN_VERDICT'])\n"
        'path.write_text(\'{"code": 0, "reason": "done"}\')\n'
        "sys.exit(3)\n"
    )
    assert start([sys.executable, str(script)], (1,), os.environ) == 3
