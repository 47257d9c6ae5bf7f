"""Attempts of `hpctrain run` on the hosts of a job: when the ranks start again, and where."""

import dataclasses
import json
import os
import shlex
import stat
import sys
import time
from pathlib import Path

import fake_slurm
import pytest

from hpctrain import rundir
from hpctrain.cli import main
from hpctrain.errors import ContradictionError, StartError, UsageError, exit_codes
from hpctrain.errors.exit_codes import MOST_FRUITLESS
from hpctrain.launch import attempts, starts
from hpctrain.launch.attempts import Policy
from hpctrain.launch.host_ends import End, Ends, FirstFailure, HostsEnd, read_ends
from hpctrain.launch.in_slurm import InSlurm
from hpctrain.launch.job_hosts import Attempt
from hpctrain.launch.supervisor import SECONDS_BETWEEN_CALLS
from hpctrain.rundir import effective_time, host_ledger
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
        (143, None, True, 75),  # before the first step
    ],
)
def test_ranks_start_again_after_a_failure_only(code, saved_code, stopped, end):
    decided = attempts.settled(code, saved_code, stopped)
    assert (decided and decided[0]) == end


@pytest.mark.parametrize(
    ("first", "changed", "fruitless", "most", "end"),
    [
        (True, True, 0, MOST_FRUITLESS, None),
        (True, True, 1, MOST_FRUITLESS, None),  # a host was lost before the first checkpoint
        (True, False, 1, MOST_FRUITLESS, 1),
        (False, False, 1, MOST_FRUITLESS, None),
        # One host after the other is lost.
        (False, True, MOST_FRUITLESS, MOST_FRUITLESS, exit_codes.GIVEN_UP),
        (False, False, MOST_FRUITLESS, MOST_FRUITLESS, exit_codes.GIVEN_UP),
        (False, False, MOST_FRUITLESS, 5, None),
        (False, False, 5, 5, exit_codes.GIVEN_UP),
        (True, True, 0, 1, 1),
        (False, True, 0, 1, 1),
    ],
)
def test_run_is_given_up_after_attempts_without_progress(first, changed, fruitless, most, end):
    decided = attempts.hopeless(FAILED, first, changed, fruitless, most)
    assert (decided and decided[0]) == end


def test_run_directory_is_that_of_the_script_or_the_default(monkeypatch, tmp_path):
    def run_directory_of(*arguments, **env):
        return str(starts.run_directory(arguments, "folder/train.py", env))

    assert run_directory_of("--run-dir", "a", "--lr", "1") == "a"
    assert run_directory_of("--run-dir", "a", "--run-dir=b", HPCTRAIN_RUN_DIR="c") == "b"
    assert run_directory_of("--lr", "1", HPCTRAIN_RUN_DIR="c") == "c"
    assert run_directory_of(SLURM_JOB_ID="815") == "runs/train-815"
    first = run_directory_of("--run-dir")
    assert first.startswith("runs/train-2")
    os.makedirs(first)
    assert run_directory_of() != first


ALL, TWO = ["node1", "node2", "node3"], ["node1", "node3"]


class Hosts:
    """A stand-in for the hosts, on which attempts end as the test sets; see `ended`."""

    unusable = "HT210.slurm-nodes-unusable"

    def __init__(self, directory, *ends):
        self.names = ALL
        self.directory, self.ends, self.attempts = directory, list(ends), []
        self.spares = []
        self.answering = list(ALL)

    def ranks(self, host):
        assert host in ALL
        return 2

    def answers(self, host):
        return False

    def present(self):
        return list(self.answering)

    def close(self):
        self.closed = True

    def run(self, hosts, attempt, following=None, spares=()):
        assert all(before.launch == attempt.launch for _, before in self.attempts)
        self.attempts.append((list(hosts), attempt))
        self.spares.append(list(spares))
        assert stat.S_IMODE(attempt.folder.stat().st_mode) == 0o700
        assert not list(attempt.folder.iterdir())
        code, self.answering, step, session, first = self.ends.pop(0)
        if session:
            (attempt.folder / "session-0").touch()
        if step is not None:
            self.directory.checkpoint(step).mkdir(parents=True, exist_ok=True)
        if code is not None:
            write_exit_status(str(attempt.folder / "exit-status-0"), code, "why")
        if first == "all killed":
            return HostsEnd(137, False, ranks=2 * len(hosts))
        code = first.code if first else 1 if code is None else code
        return HostsEnd(code, False, first, ranks=2 * len(hosts))


def ended(code, present=ALL, step=None, session=True, first=None):
    """Return the end of an attempt.

    Args:
        code: code of the exit status file; None without the file.
        present: hosts that answer afterwards.
        step: step of the newest checkpoint; None without a new one.
        session: whether the program has opened a session.
        first: first rank that failed; "all killed" if SIGKILL ended all of them and their agents.
    """
    return code, list(present), step, session, first


def failed(code, rank=3):
    brief = f"with exit code {code}: ValueError: the cause"
    return FirstFailure(rank, "node2", 5.0, False, brief, code)


def run_attempts(tmp_path, *ends, env=None, name="run", **policy):
    directory = rundir.RunDirectory(tmp_path / name)
    hosts = Hosts(directory, *ends)
    command = ["python", "train.py"]
    exit_status = attempts.run(hosts, command, directory, env or {}, Policy(**policy))
    assert not hosts.ends
    assert not list(directory.path.glob(".*"))
    assert [attempt.number for _, attempt in hosts.attempts] == list(range(len(hosts.attempts)))
    return exit_status, hosts


def test_elastic_run_leaves_out_a_lost_host_and_uses_it_again(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, TWO, 10), ended(1, ALL, 20), ended(0, ALL, 30), elastic=True
    )
    assert exit_status == (0, "why")
    assert [used for used, _ in hosts.attempts] == [ALL, TWO, ALL]
    environs = [attempt.environ for _, attempt in hosts.attempts]
    assert {environ["HPCTRAIN_RUN_DIR"] for environ in environs} == {str(tmp_path / "run")}
    assert len({environ["HPCTRAIN_SECRET"] for environ in environs}) == 1
    assert {environ["HPCTRAIN_START"] for environ in environs} == {hosts.attempts[0][1].launch}
    assert len({attempt.folder for _, attempt in hosts.attempts}) == 3
    output = capsys.readouterr().err
    assert "attempt 2: 2 of 3 hosts, without node2; from step 10 on" in output
    assert "attempt 3: 3 of 3 hosts; from step 20 on" in output


def test_lost_host_without_elastic_ends_with_75(tmp_path):
    exit_status, hosts = run_attempts(tmp_path, ended(None, TWO, 10))
    assert exit_status == (75, "node2 of the job's hosts are lost")
    assert len(hosts.attempts) == 1


def test_spare_replaces_a_lost_host_once(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, TWO, 10), ended(None, ["node3"], 20), spares=1
    )
    assert exit_status == (75, "node1 of the job's hosts are lost")
    assert [used for used, _ in hosts.attempts] == [["node1", "node2"], TWO]
    assert "attempt 2: 2 of 3 hosts, without node2; from step 10 on" in capsys.readouterr().err


def test_ranks_wait_on_the_spare_hosts_too(tmp_path):
    _, hosts = run_attempts(tmp_path, ended(None, step=10), ended(0, TWO), spares=1)
    assert hosts.spares == [["node3"], ["node3"]]
    _, hosts = run_attempts(tmp_path, ended(None, TWO, 10), ended(0), spares=1, name="lost")
    assert hosts.spares == [["node3"], []]


def test_spares_replace_a_host_that_is_missing_at_the_start_or_had_faults(tmp_path):
    def used(name, answering, end):
        directory = rundir.RunDirectory(tmp_path / name)
        hosts = Hosts(directory, end)
        hosts.answering = answering
        attempts.run(hosts, ["python", "a.py"], directory, {}, Policy(spares=1))
        return hosts.attempts[0][0]

    assert used("a", TWO, ended(0, TWO)) == TWO
    host_ledger.note(Path(), ["node1", "node1"], host_ledger.LOST, "5")
    assert used("b", ALL, ended(0)) == ["node2", "node3"]
    assert used("c", TWO, ended(0, TWO)) == TWO  # there is no other one


def test_host_that_does_not_answer_is_lost_until_it_answers(tmp_path):
    """Slurm lists a host for minutes after it is gone."""
    silent = [("node2",), (), ()]

    class Silent(Hosts):
        def answers(self, host):
            return len(self.attempts) == 2

        def run(self, hosts, attempt, following=None, spares=()):
            end = super().run(hosts, attempt, following)
            return dataclasses.replace(end, suspects=silent.pop(0))

    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Silent(directory, ended(None, ALL, 10), ended(1, ALL, 20), ended(0, ALL, 30))
    code, _ = attempts.run(hosts, ["python", "a.py"], directory, {}, Policy(elastic=True))
    assert code == 0
    assert [used for used, _ in hosts.attempts] == [ALL, TWO, ALL]
    faults = host_ledger.LEDGER.read_text().splitlines()
    assert [json.loads(fault)["host"] for fault in faults] == ["node2"]


def test_host_that_failed_its_check_is_not_used_again(tmp_path):
    wrong = dataclasses.replace(failed(1), error="HT318")

    class Unfit(Hosts):
        def run(self, hosts, attempt, following=None, spares=()):
            end = super().run(hosts, attempt, following)
            return dataclasses.replace(end, unfit=() if end.first else ("node1",))

    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Unfit(directory, ended(None, session=False), ended(1, step=10, first=wrong))
    code, reason = attempts.run(hosts, ["python", "a.py"], directory, {}, Policy(spares=1))
    assert (code, reason) == (75, "node2 of the job's hosts are lost")
    assert [used for used, _ in hosts.attempts] == [["node1", "node2"], ["node2", "node3"]]
    faults = map(json.loads, host_ledger.LEDGER.read_text().splitlines())
    found = [(fault["host"], fault["kind"]) for fault in faults]
    assert found == [("node1", "preflight"), ("node2", "preflight")]


def test_failure_after_a_checkpoint_is_tried_again_on_all_hosts(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, step=10, first=failed(1)), ended(0, step=20)
    )
    assert exit_status == (0, "why")
    assert [used for used, _ in hosts.attempts] == [ALL, ALL]
    output = capsys.readouterr().err
    assert output == (
        "hpctrain: rank 3 on node2 failed first, with exit code 1: ValueError: the cause\n"
        "hpctrain: attempt 2: 3 of 3 hosts; from step 10 on\n"
    )


def test_program_without_a_session_is_started_again_only_with_retry(tmp_path):
    # It has a checkpoint of a run before: without that, a first failure ends the run anyway.
    crash = ended(None, step=10, session=False, first=failed(1))
    exit_status, hosts = run_attempts(tmp_path, crash, name="once")
    assert exit_status == (1, "rank 3 on node2 failed, with exit code 1: ValueError: the cause")
    assert len(hosts.attempts) == 1
    exit_status, hosts = run_attempts(
        tmp_path, crash, ended(0, session=False), plain=True, name="again"
    )
    assert exit_status == (0, "why")
    assert len(hosts.attempts) == 2


def test_rank_that_fails_before_its_session_is_no_plain_program_if_it_had_one_before(tmp_path):
    exit_status, hosts = run_attempts(
        tmp_path,
        ended(None, step=10, first=failed(137)),
        ended(None, session=False, first=failed(134)),
        ended(0, step=20),
    )
    assert exit_status == (0, "why")
    assert len(hosts.attempts) == 3


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (failed(137), "rank 3 on node2 failed first"),
        (
            "all killed",
            "SIGKILL ended all ranks at once, as a scheduler does that ends their step",
        ),
    ],
)
def test_first_attempt_that_a_signal_killed_is_tried_again(tmp_path, capsys, first, why):
    exit_status, hosts = run_attempts(tmp_path, ended(None, first=first), ended(0))
    assert exit_status == (0, "why")
    assert len(hosts.attempts) == 2
    output = capsys.readouterr().err
    assert f"hpctrain: {why}" in output
    assert "attempt 2: 3 of 3 hosts; from the start, as there is no checkpoint" in output


@pytest.mark.parametrize("first", [failed(3), None])
def test_first_attempt_that_fails_by_itself_is_not_tried_again(tmp_path, first):
    exit_status, hosts = run_attempts(tmp_path, ended(None, first=first), plain=True)
    brief = "rank 3 on node2 failed, with exit code 3: ValueError: the cause"
    assert exit_status == ((3, brief) if first else (1, ""))
    assert len(hosts.attempts) == 1


def test_single_attempt_has_the_exit_code_and_the_cause_of_its_failure(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, TWO, 10, first=failed(139)), most=1, elastic=True
    )
    assert exit_status == (139, "rank 3 on node2 failed, with exit code 139: ValueError: the cause")
    assert len(hosts.attempts) == 1
    assert "attempt 2" not in capsys.readouterr().err


def test_program_is_not_started_again_after_a_signal(tmp_path):
    received = []

    class Signalled(Hosts):
        def present(self):
            if self.attempts:
                received.append(15)  # as the hosts of the next attempt are chosen
            return super().present()

    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Signalled(directory, ended(None, step=10, first=failed(143)))
    code, _ = attempts.run(hosts, ["checks.sh"], directory, {}, Policy(), received)
    assert code == exit_codes.STOPPED
    assert [attempt.stopping for _, attempt in hosts.attempts] == [False]


@pytest.mark.parametrize("most", [2, MOST_FRUITLESS])
def test_run_is_given_up_with_the_last_cause(tmp_path, capsys, most):
    directory = rundir.RunDirectory(tmp_path / "run")
    ends = [ended(1, step=10)] + [ended(None, first=failed(1))] * most
    rundir.replace(directory.identity, "{}")
    rundir.replace(directory.summary, json.dumps({"status": "failed", "step": 13}))
    rundir.append(directory.events, json.dumps({"time": 1.7e9, "event": "launched"}))
    exit_status, hosts = run_attempts(tmp_path, *ends, most=most)
    assert exit_status == (
        76,
        f"{most} attempts in a row without a new checkpoint: "
        "rank 3 on node2 failed, with exit code 1: ValueError: the cause",
    )
    assert len(hosts.attempts) == 1 + most
    summary = json.loads(directory.summary.read_text())
    assert (summary["status"], summary["step"]) == ("given-up", 13)
    printed = capsys.readouterr().err
    assert f"hpctrain: given up: {most} attempts" in printed
    effective = effective_time.measure(directory)
    assert f"hpctrain: {effective}\n" in printed
    assert summary.items() >= effective.as_json().items()
    # None of these attempts has come to a run: the time between is that of the queue.
    assert effective.lost_seconds["queue"] > 0


def test_attempts_tell_their_ranks_when_they_began_and_record_their_ends(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    rundir.replace(directory.identity, "{}")
    begun = time.time()
    rundir.append(directory.events, json.dumps({"time": begun + 60, "event": "launched"}))
    late = dataclasses.replace(failed(137), time=begun + 90)
    _, hosts = run_attempts(tmp_path, ended(None, step=10, first=late), ended(0))
    launched = {attempt.environ["HPCTRAIN_LAUNCHED"] for _, attempt in hosts.attempts}
    assert len(launched) == 1  # also if they have waited for their attempt
    assert begun <= float(*launched) <= time.time()
    marks = directory.lines(directory.events)[1:]
    assert [mark["event"] for mark in marks] == ["noticed", "ended", "ended"]
    assert marks[0]["time"] == pytest.approx(begun + 90, abs=0.01)


def test_ranks_are_new_interpreters_after_an_attempt_that_asked_for_them(tmp_path):

    class Asking(Hosts):
        def run(self, hosts, attempt, following=None, spares=()):
            found = super().run(hosts, attempt, following, spares)
            if attempt.number == 1:
                (attempt.folder / "fresh").touch()
            return found

    directory = rundir.RunDirectory(tmp_path / "run")
    ends = [ended(None, step=step) for step in (10, 20, 30)]
    hosts = Asking(directory, *ends, ended(0))
    attempts.run(hosts, ["python", "train.py"], directory, {}, Policy())
    asked = [attempt.environ.get("HPCTRAIN_FRESH_INTERPRETERS") for _, attempt in hosts.attempts]
    assert asked == [None, None, "1", "1"]


def test_refused_start_records_nothing(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    rundir.replace(directory.identity, "{}")
    rundir.append(directory.events, json.dumps({"time": 1.7e9, "event": "launched"}))
    hosts = Hosts(directory, ended(2))
    hosts.run = lambda *_, run=hosts.run: dataclasses.replace(run(*_), usage=True)
    attempts.run(hosts, ["train.py"], directory, {}, Policy())
    assert len(directory.lines(directory.events)) == 1


def test_run_is_given_up_with_fewer_ranks_than_min_nproc(tmp_path):
    exit_status, _ = run_attempts(tmp_path, ended(1, TWO, 10), least=5, elastic=True)
    assert exit_status == (76, "4 ranks are left of at least 5")
    exit_status, _ = run_attempts(tmp_path, ended(1, [], 20), elastic=True)
    assert exit_status == (76, "0 ranks are left of at least 1")


def test_each_run_has_a_secret_of_its_own(tmp_path):
    found = []
    for name in ("one", "two"):
        env = {"HPCTRAIN_SECRET": "given", "OTHER": "x"}
        _, hosts = run_attempts(tmp_path, ended(0, step=10), env=env, name=name)
        environ = hosts.attempts[0][1].environ
        assert environ["OTHER"] == "x"
        found += [environ["HPCTRAIN_SECRET"], environ["HPCTRAIN_START"]]
    assert len({*found, "given"}) == 5


def test_folders_of_killed_starts_of_the_job_are_removed(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    kept = [".attempts-7-2-d", ".attempts-70-0-e", ".attempts-7_1-0-f", ".attempts-7-later"]
    for name in (".attempts-7-0-a", ".attempts-7-1-b", ".attempts-7-1-c", *kept):
        (directory.path / name / "0").mkdir(parents=True)
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    attempts.run(Hosts(directory, ended(0)), ["python"], directory, env, Policy())
    assert sorted(os.listdir(directory.path)) == sorted(kept)


def test_run_refuses_a_host_that_never_answered(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Hosts(directory)
    hosts.answering = TWO
    with pytest.raises(StartError, match="node2 of 3 nodes cannot be used") as caught:
        attempts.run(hosts, ["python"], directory, {}, Policy())
    assert caught.value.code == "HT210"
    assert "scontrol show node node2" in str(caught.value)
    assert not hosts.attempts
    assert not directory.path.exists()


def test_first_failure_of_all_hosts_is_the_earliest_without_another_cause(tmp_path):
    def write(host, *, first, usage=False):
        end = End(1, 6, first, None, stop_unhandled=False, usage=usage)
        (tmp_path / f"end-{host}").write_text(json.dumps(dataclasses.asdict(end)))

    consequence = dataclasses.replace(failed(1, rank=0), time=1.0, caused_by_other_rank=True)
    write(0, first=consequence)
    write(1, first=dataclasses.replace(failed(3, rank=4), time=9.0))
    write(2, first=dataclasses.replace(failed(4, rank=5), time=7.0))
    (tmp_path / "end-3").write_text('{"code": ')  # its host was lost as it wrote
    end = read_ends(tmp_path, 143, stopped=False)
    assert (end.first.rank, end.code, end.ranks, end.usage) == (5, 4, 6, False)
    write(1, first=None)
    write(2, first=None)
    assert read_ends(tmp_path, 143, stopped=False).first == consequence


def test_launcher_is_not_waited_for_where_a_host_without_ranks_is_lost(tmp_path):
    """Slurm ends a step with a lost host after minutes."""
    alone, with_others = Ends(tmp_path, 2), Ends(tmp_path, 2, others=True)
    for host, code in ((0, 0), (1, 3)):
        assert not any(ends.overdue() for ends in [alone, with_others] for _ in range(10))
        end = End(code, 6, None, None)
        (tmp_path / f"end-{host}").write_text(json.dumps(dataclasses.asdict(end)))
    calls = int(3 / SECONDS_BETWEEN_CALLS)
    assert [with_others.overdue() for _ in range(calls)].index(True) == calls - 1
    assert not with_others.overdue()
    assert (with_others.given_up, with_others.code()) == (True, 3)


def test_rank_that_failed_because_of_another_is_not_said_to_have_failed_first(tmp_path, capsys):
    consequence = dataclasses.replace(failed(1, rank=0), caused_by_other_rank=True)
    for first, conclusion in ((failed(1, rank=2), "failed first"), (consequence, "ended")):
        end = ended(1, first=first)
        run_attempts(tmp_path, end, name=conclusion.replace(" ", "-"), most=1)
        where = f" on {first.host}" if first.host else ""
        output = capsys.readouterr().err
        assert f"hpctrain: rank {first.rank}{where} {conclusion}, {first.brief}\n" in output


def test_error_of_an_agent_gives_the_code_where_srun_has_ended_the_others(tmp_path):
    end = End(2, 0, None, None, stop_unhandled=False, usage=True)
    (tmp_path / "end-node2").write_text(json.dumps(dataclasses.asdict(end)))
    assert read_ends(tmp_path, 143, stopped=False) == HostsEnd(2, False, usage=True)


def test_end_without_a_file_of_any_host_has_the_code_of_srun(tmp_path):
    assert read_ends(tmp_path, 143, stopped=True) == HostsEnd(143, True)


JOB = {
    "SLURM_JOB_ID": "815",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_CPUS_PER_TASK": "3",
}


@pytest.fixture
def slurm(tmp_path):
    return fake_slurm.FakeSlurm(tmp_path)


def test_hosts_in_slurm_are_those_left_in_the_job(slurm):
    hosts = InSlurm(JOB)
    assert hosts.names == ["node1", "node2", "node3"]
    slurm.command("squeue", "815 node[1,3]")
    assert InSlurm({**JOB, **slurm.env}).present() == ["node1", "node3"]
    assert "--job=815" in slurm.calls.read_text()


def test_all_hosts_are_kept_if_squeue_does_not_answer(tmp_path, capsys):
    assert InSlurm({**JOB, "PATH": str(tmp_path)}).present() == ["node1", "node2", "node3"]
    assert "squeue did not list" in capsys.readouterr().err


# The ranks of each host by the tasks of the job, by --nproc-per-node, and in the plan of the agents
# on the first and the third host.
@pytest.mark.parametrize(
    ("tasks", "nproc", "ranks", "planned"),
    [
        ("2(x2),1", None, [2, 2, 1], "2,1"),
        ("1(x3)", None, [1, 1, 1], "auto"),  # one for each GPU: the agents count them
        ("", None, [1, 1, 1], "auto"),
        ("1(x3)", "4", [4, 4, 4], "4,4"),
        ("2(x2),1", "auto", [1, 1, 1], "auto"),
        ("1(x3)", "3,2,1", [3, 2, 1], "3,1"),
    ],
)
def test_ranks_of_a_host_in_slurm(slurm, tmp_path, tasks, nproc, ranks, planned):
    hosts = InSlurm({**JOB, "SLURM_TASKS_PER_NODE": tasks}, nproc)
    assert [hosts.ranks(host) for host in hosts.names] == ranks
    assert started_plan(hosts, ["node1", "node3"], slurm, tmp_path)["nproc"] == planned


def test_tasks_that_do_not_fit_the_hosts_of_the_job_are_refused():
    with pytest.raises(ContradictionError, match="nodes: 3") as caught:
        InSlurm({**JOB, "SLURM_TASKS_PER_NODE": "2"})
    assert caught.value.code == "HT101"
    with pytest.raises(ContradictionError, match=r"SLURM_TASKS_PER_NODE='2\*3'") as caught:
        InSlurm({**JOB, "SLURM_TASKS_PER_NODE": "2*3"})
    assert caught.value.code == "HT103"
    assert "STEP" not in caught.value.found


@pytest.mark.parametrize("nproc", ["3,2", "many", "0", ""])
def test_nproc_per_node_that_does_not_fit_the_hosts_of_the_job_is_refused(nproc):
    with pytest.raises(UsageError, match="nodes: 3") as caught:
        InSlurm(JOB, nproc)
    assert caught.value.code == "HT213"


def started_plan(hosts, used, slurm, tmp_path, variables=JOB):
    """Run an attempt with a fake srun, and return the plan that it gets for the agents."""
    seen = tmp_path / "seen"
    slurm.command("srun", more=f"env > {shlex.quote(str(seen))}")
    folder = tmp_path / "attempt"
    folder.mkdir()
    environ = {**variables, **slurm.env, "SLURM_NTASKS": "5", "SLURM_CPU_BIND": "none"}
    end = hosts.run(used, Attempt(["python", "train.py"], environ, folder, "abc", 2))
    assert end == HostsEnd(0, False)
    variables = dict(line.partition("=")[::2] for line in seen.read_text().splitlines())
    # srun would take the size and the binding of its step from them.
    assert not variables.keys() & {"SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND"}
    assert variables["SLURM_JOB_ID"] == "815"
    assert Path(variables["HPCTRAIN_STOP_FILE"]).parent == folder
    plan = json.loads(variables["HPCTRAIN_AGENT"])
    assert plan["command"] == ["python", "train.py"]
    assert (plan["folder"], plan["launch"], plan["attempt"]) == (str(folder), "abc", 2)
    return plan


def test_srun_starts_one_agent_on_each_host(slurm, tmp_path):
    started_plan(InSlurm(JOB), ["node1", "node3"], slurm, tmp_path)
    (called,) = slurm.calls.read_text().splitlines()
    words = called.split()
    assert words[0] == "srun"
    assert words[-3:] == [sys.executable, "-m", "hpctrain.launch.agent"]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=node[1,3]"} < set(words)
    assert {"--kill-on-bad-exit=1", "--overlap", "--mpi=none"} < set(words)


TWO_PARTS = {
    **JOB,
    "SLURM_CPUS_PER_TASK_HET_GROUP_0": "8",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "815",
    "SLURM_JOB_ID_HET_GROUP_1": "816",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]",
}


@pytest.mark.parametrize(
    ("used", "parts"),
    [
        (["node1", "node3"], [("--het-group=0", "node1", 1), ("--het-group=1", "node3", 1)]),
        (["node2", "node3"], [("--het-group=1", "node[2-3]", 2)]),
    ],
)
def test_srun_starts_an_agent_on_each_host_of_all_parts_of_a_job(slurm, tmp_path, used, parts):
    started_plan(InSlurm(TWO_PARTS), used, slurm, tmp_path, TWO_PARTS)
    assert "CPUS_PER_TASK" not in (tmp_path / "seen").read_text()
    (called,) = slurm.calls.read_text().splitlines()
    commands = called.removeprefix("srun ").split(" : ")
    assert len(commands) == len(parts)
    for command, (group, names, count) in zip(commands, parts, strict=True):
        words = command.split()
        assert words[0] == group
        assert {f"--nodes={count}", f"--ntasks={count}", f"--nodelist={names}"} < set(words)
        assert {"--kill-on-bad-exit=1", "--overlap", "--mpi=none"} < set(words)
        assert words[-3:] == [sys.executable, "-m", "hpctrain.launch.agent"]


def test_hosts_left_in_all_parts_of_a_job(slurm):
    slurm.command("squeue", "815 node1\n816 node3\n817 node2")
    assert InSlurm({**TWO_PARTS, **slurm.env}).present() == ["node1", "node3"]
    assert "--job=815,816" in slurm.calls.read_text()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--min-nproc", "2"], "--min-nproc 2 without --elastic"),
        (["--elastic"], "--elastic outside of a Slurm batch script"),
        (["--elastic", "--as", "slurm"], "--elastic outside of a Slurm batch script"),
        (["--retry"], "--retry outside of a Slurm batch script"),
        (["--max-attempts", "2"], "--max-attempts outside of a Slurm batch script"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, found, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    assert main(["run", *options, "train.py"]) == 2
    assert found in capsys.readouterr().err
