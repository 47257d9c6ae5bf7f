"""`hpctrain run --elastic`: when and where ranks start again, and when the run is given up."""

import json
import os
import stat

import fake_slurm
import pytest

from hpctrain import rundir
from hpctrain.cli import main
from hpctrain.errors import ContradictionError, StartError, UsageError, exit_codes
from hpctrain.errors.exit_codes import MOST_FRUITLESS
from hpctrain.launch import elastic
from hpctrain.launch.hosts import parse
from hpctrain.launch.in_slurm import InSlurm
from hpctrain.rundir.exit_status import write_exit_status

FAILED = (1, "rank 2 is lost")


@pytest.mark.parametrize(
    ("code", "saved_code", "stopped", "end"),
    [
        (1, FAILED, False, None),
        (1, None, False, None),  # rank 0 was on the lost host
        (143, None, False, None),
        (0, (0, "done"), False, 0),
        (0, None, False, 0),  # a script without a session
        (1, (0, "done"), False, 1),  # the script failed after its session
        (1, (2, "wrong use"), False, 2),
        (2, None, False, 2),  # argparse, under srun
        (1, (75, "stopped"), False, 75),
        (1, FAILED, True, 1),
        (143, None, True, 143),
    ],
)
def test_elastic_starts_again_after_a_failure_only(code, saved_code, stopped, end):
    decided = elastic.settled(code, saved_code, stopped)
    assert (decided and decided[0]) == end


@pytest.mark.parametrize(
    ("first", "changed", "fruitless", "end"),
    [
        (True, True, 0, None),
        (True, True, 1, None),  # a host was lost before the first checkpoint
        (True, False, 1, 1),
        (False, False, 1, None),
        (False, True, MOST_FRUITLESS, exit_codes.GIVEN_UP),  # one host after the other
        (False, False, MOST_FRUITLESS, exit_codes.GIVEN_UP),
    ],
)
def test_elastic_gives_up_without_progress(first, changed, fruitless, end):
    decided = elastic.hopeless(FAILED, first, changed, fruitless)
    assert (decided and decided[0]) == end


def test_elastic_hosts_option_is_a_hostlist_with_slots():
    assert parse("node[1-2]:4,node7", 2) == {"node1": 4, "node2": 4, "node7": 2}
    assert list(parse("b:1,a:3", 1).items()) == [("b", 1), ("a", 3)]
    for wrong in ("", ",", "a:1,a:2", "a:0", "[fd77::1]:2", "fd77::", "node[1-", "a:b"):
        with pytest.raises(UsageError) as caught:
            parse(wrong, 1)
        assert caught.value.code == ("HT105" if "[" in wrong else "HT213")


def test_elastic_run_directory_is_that_of_the_script_or_the_default(monkeypatch, tmp_path):
    def run_directory_of(*arguments, **env):
        return str(elastic.run_directory(arguments, "folder/train.py", env))

    assert run_directory_of("--run-dir", "a", "--lr", "1") == "a"
    assert run_directory_of("--run-dir", "a", "--run-dir=b", HPCTRAIN_RUN_DIR="c") == "b"
    assert run_directory_of("--lr", "1", HPCTRAIN_RUN_DIR="c") == "c"
    assert run_directory_of(SLURM_JOB_ID="815") == "runs/train-815"
    first = run_directory_of("--run-dir")
    assert first.startswith("runs/train-2")
    os.makedirs(first)
    assert run_directory_of() != first


class Hosts:
    """A stand-in for the hosts, on which starts end as the test sets.

    Each end is a tuple: the code of the exit status, the hosts that answer then, and the step of
    the newest checkpoint.
    """

    def __init__(self, directory, *ends, slots=None):
        self.slots = slots or {"node1": 2, "node2": 2, "node3": 2}
        self.directory, self.ends, self.starts = directory, list(ends), []
        self.answering = list(self.slots)

    def present(self, marker):
        name, _, value = marker.partition("=")
        assert all(start.environ[name] == value for _, start in self.starts)
        return list(self.answering)

    def run(self, hosts, start):
        self.starts.append((list(hosts), start))
        assert stat.S_IMODE(start.folder.stat().st_mode) == 0o700
        code, self.answering, step = self.ends.pop(0)
        if step is not None:
            self.directory.checkpoint(step).mkdir(parents=True, exist_ok=True)
        if code is not None:
            write_exit_status(str(start.exit_status_file), code, "why")
        return (1 if code is None else code), False


ALL, TWO = ["node1", "node2", "node3"], ["node1", "node3"]


def run_elastic(tmp_path, *ends, least=1, env=None):
    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Hosts(directory, *ends)
    exit_status = elastic.run(hosts, ["python", "train.py"], directory, env or {}, least)
    assert not hosts.ends
    assert not list(directory.path.glob(".*"))
    return exit_status, hosts


def test_elastic_leaves_out_a_lost_host_and_uses_it_again(tmp_path, capsys):
    exit_status, hosts = run_elastic(tmp_path, (None, TWO, 10), (1, ALL, 20), (0, ALL, 30))
    assert exit_status == (0, "why")
    assert [used for used, _ in hosts.starts] == [ALL, TWO, ALL]
    environs = [start.environ for _, start in hosts.starts]
    assert {environ["HPCTRAIN_RUN_DIR"] for environ in environs} == {str(tmp_path / "run")}
    assert len({environ["HPCTRAIN_SECRET"] for environ in environs}) == 1
    assert len({start.exit_status_file for _, start in hosts.starts}) == 3
    output = capsys.readouterr().err
    assert "start 2: 4 ranks on 2 of 3 hosts, without node2; from step 10 on" in output
    assert "start 3: 6 ranks on 3 of 3 hosts; from step 20 on" in output


def test_elastic_gives_up_after_starts_without_a_new_checkpoint(tmp_path, capsys):
    directory = rundir.RunDirectory(tmp_path / "run")
    ends = [(1, ALL, 10)] + [(1, ALL, None)] * MOST_FRUITLESS
    rundir.replace(directory.identity, "{}")
    rundir.replace(directory.summary, json.dumps({"status": "failed", "step": 13}))
    exit_status, hosts = run_elastic(tmp_path, *ends)
    assert exit_status == (76, "3 starts in a row without a new checkpoint: why")
    assert len(hosts.starts) == 1 + MOST_FRUITLESS
    summary = json.loads(directory.summary.read_text())
    assert (summary["status"], summary["step"]) == ("given-up", 13)
    assert "hpctrain: given up: 3 starts" in capsys.readouterr().err


def test_elastic_gives_up_with_fewer_ranks_than_min_nproc(tmp_path):
    exit_status, _ = run_elastic(tmp_path, (1, TWO, 10), least=5)
    assert exit_status == (76, "4 ranks are left of at least 5")
    exit_status, _ = run_elastic(tmp_path, (1, [], 20))
    assert exit_status == (76, "0 ranks are left of at least 1")


def test_elastic_keeps_a_given_secret(tmp_path):
    _, hosts = run_elastic(tmp_path, (0, ALL, 10), env={"HPCTRAIN_SECRET": "given", "OTHER": "x"})
    environ = hosts.starts[0][1].environ
    assert (environ["HPCTRAIN_SECRET"], environ["OTHER"]) == ("given", "x")


def test_elastic_refuses_a_host_that_never_answered(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Hosts(directory)
    hosts.answering = TWO
    with pytest.raises(StartError, match="node2 of 3 hosts cannot be used") as caught:
        elastic.run(hosts, ["python"], directory, {})
    assert caught.value.code == "HT210"
    assert not hosts.starts


JOB = {
    "SLURM_JOB_ID": "815",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_CPUS_PER_TASK": "3",
}


@pytest.fixture
def slurm(tmp_path):
    return fake_slurm.FakeSlurm(tmp_path)


def test_elastic_hosts_in_slurm_are_those_left_in_the_job(slurm):
    hosts = InSlurm(JOB)
    assert hosts.slots == {"node1": 2, "node2": 2, "node3": 1}
    slurm.command("squeue", "node[1,3]")
    assert InSlurm({**JOB, **slurm.env}).present("") == ["node1", "node3"]
    assert "--job 815" in slurm.calls.read_text()
    assert InSlurm({**JOB, "SLURM_TASKS_PER_NODE": ""}).slots["node3"] == 1
    with pytest.raises(ContradictionError, match="3 hosts") as caught:
        InSlurm({**JOB, "SLURM_TASKS_PER_NODE": "2"})
    assert caught.value.code == "HT101"


def test_elastic_keeps_all_hosts_if_squeue_does_not_answer(tmp_path, capsys):
    assert InSlurm({**JOB, "PATH": str(tmp_path)}).present("") == ["node1", "node2", "node3"]
    assert "squeue did not list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (["node1", "node2"], "--nodes=2 --ntasks=4 --nodelist=node[1-2] --ntasks-per-node=2"),
        (["node1", "node3"], "--ntasks=3 --nodelist=node[1,3] --distribution=arbitrary"),
    ],
)
def test_elastic_srun_gets_the_tasks_of_each_host(slurm, tmp_path, used, words):
    hosts = f'[ -z "$SLURM_HOSTFILE" ] || cat "$SLURM_HOSTFILE" >> {slurm.calls}'
    slurm.command("srun", more=hosts)
    folder = tmp_path / "folder"
    folder.mkdir()
    environ = {**JOB, **slurm.env}
    start = elastic.StartParameters(["python", "train.py"], environ, folder, folder / "exit-status")
    assert InSlurm(JOB).run(used, start) == (0, False)
    called, *tasks = slurm.calls.read_text().splitlines()
    assert called.startswith("srun --overlap --kill-on-bad-exit=1 --cpus-per-task=3 ")
    assert f"{words} python train.py" in called
    assert tasks == (["node1", "node1", "node3"] if "arbitrary" in words else [])


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--hosts", "a:1"], "--hosts without --elastic"),
        (["--min-nproc", "2"], "--min-nproc without --elastic"),
        (["--elastic"], "--elastic without --hosts, outside of a Slurm job"),
        (["--elastic", "--hosts", "a:1", "--as", "slurm"], "--elastic with --as"),
        (["--elastic", "--hosts", "a:1", "--nodes", "2"], "--elastic with --nodes"),
        (["--elastic", "--hosts", "a:1,a:1"], "--hosts a:1,a:1"),
        (["--elastic", "--hosts", "localhost:2", "--min-nproc", "0"], "--min-nproc 0"),
    ],
)
def test_elastic_options_that_do_not_go_together_are_refused(options, found, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    assert main(["run", *options, "train.py"]) == 2
    assert found in capsys.readouterr().err
