"""Attempts of `hpctrain run` on the hosts of a job: when the ranks start again, and where.

The agents are stand-ins. tests/launch/test_job_state.py has thousands of schedules of faults, and
tests/training/test_resume_on_slurm.py real ones.
"""

import dataclasses
import errno
import json
import os
import queue
import re
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path

import fake_slurm
import pytest

from hpctrain import rundir
from hpctrain.cli import main
from hpctrain.errors import CheckpointError, ContradictionError, StartError, UsageError, exit_codes
from hpctrain.errors.exit_codes import MOST_FRUITLESS
from hpctrain.launch import job_state, job_supervisor, starts
from hpctrain.launch.end import End
from hpctrain.launch.in_slurm import InSlurm
from hpctrain.launch.job_hosts import JobHosts
from hpctrain.launch.plan import Plan
from hpctrain.rundir import effective_time, host_ledger

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
    decided = job_state.settled(code, saved_code, stopped)
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
    decided = job_state.hopeless(FAILED, first, changed, fruitless, most)
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


class Link:
    """A stand-in for the link to the agent of a host."""

    address, host = "10.0.0.1", ""

    def __init__(self, hosts, name):
        self.hosts, self.name = hosts, name

    def send(self, **message):
        if "run" in message:
            self.hosts.run(self, Plan.of_host(*message["run"]))

    def end(self):
        pass


class Hosts(JobHosts):
    """A stand-in for the hosts, on which attempts end as the test sets; see `ended`.

    Attributes:
        plans: plan of the first host of each attempt.
        environs: environment of each process that starts agents, and its hosts.
    """

    unusable = "HT210.slurm-nodes-unusable"

    def __init__(self, directory, *ends):
        super().__init__(dict.fromkeys(ALL, 2), None)
        self.directory, self.ends, self.plans, self.environs = directory, list(ends), [], []
        self.answering, self.links, self.unfit = list(ALL), {}, {}

    def present(self):
        return list(self.answering)

    def answers(self, host):
        return host in self.answering

    def command(self, hosts, plan, environ, folder):
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        self.environs.append((list(hosts), environ))
        return list(hosts), environ

    def connect(self, names):
        for name in names:
            self.links[name] = Link(self, name)
            facts = {"address": "", "ports": (1, 2), "unfit": self.unfit.get(name, "")}
            self.put((self.links[name], {"name": name, "facts": facts}))

    def run(self, link, plan):
        assert plan.hosts[plan.index] == link.name
        if plan.index == 0:
            self.plans.append(plan)
        if plan.index < len(plan.hosts) - 1:
            return
        end = self.ends.pop(0)
        self.answering = end.present
        if end.step is not None:
            self.directory.checkpoint(end.step).mkdir(parents=True, exist_ok=True)
        for index, host in enumerate(plan.hosts):
            first = end.first if end.first and end.first["host"] == host else {}
            if not end.killed and (host in end.present or first):
                code = first.get("code", 1 if end.code is None else end.code)
                recorded = None if end.code is None or index else (end.code, "why")
                more = {"opened": end.session, "recorded": recorded, **end.more}
                told = End(**{"code": code, "ranks": 2 * len(plan.hosts), **more, **first})
                message = {"ended": plan.attempt, "end": told.as_json(), "ports": (3, 4)}
                self.put((self.links[host], message))
            if end.killed or host not in end.present:
                self.put((self.links[host], None))


class Step:
    """A stand-in for the process that starts agents."""

    def __init__(self, number, hosts, command, environ, folder, meanwhile, put):
        self.number, self.hosts, self.events = number, hosts, queue.SimpleQueue()

    def start(self):
        Step.job.connect(self.hosts)

    def join(self, seconds):
        pass


@dataclasses.dataclass
class Ended:
    code: int | None
    present: list[str]
    step: int | None
    session: bool
    first: dict | None
    killed: bool
    more: dict


def ended(code, present=ALL, step=None, session=True, first=None, killed=False, **more):
    """Return the end of an attempt.

    Args:
        code: code of the exit status file; None without the file.
        present: hosts that answer afterwards.
        step: step of the newest checkpoint; None without a new one.
        session: whether the program has opened a session.
        first: first rank that failed.
        killed: whether SIGKILL has ended all ranks and their agents.
        more: other fields of the end of each host.
    """
    return Ended(code, list(present), step, session, first, killed, more)


def failed(code, rank=3, **more):
    brief = f"with exit code {code}: ValueError: the cause"
    found = {"rank": rank, "host": "node2", "time": 5.0, "brief": brief, "code": code}
    return {**found, "caused_by_other_rank": False, **more}


@pytest.fixture(autouse=True)
def agents(monkeypatch):
    """Replace the processes and connections of agents."""

    class Links:
        def __init__(self, launch, secret, listener, put):
            Step.job.put, self.listener = put, listener

        def close(self):
            self.listener.close()

    monkeypatch.setattr(job_supervisor, "AgentLinks", Links)
    monkeypatch.setattr(job_supervisor, "_Step", Step)


def run(hosts, env=None, received=(), **rules):
    Step.job = hosts
    plan = Plan(["python", "train.py"], "", **rules)
    return job_supervisor.run(hosts, plan, hosts.directory, env or {}, received)


def run_attempts(tmp_path, *ends, env=None, name="run", **rules):
    hosts = Hosts(rundir.RunDirectory(tmp_path / name), *ends)
    exit_status = run(hosts, env, **rules)
    assert not hosts.ends
    assert not list(hosts.directory.path.glob(".*"))
    assert [plan.attempt for plan in hosts.plans] == list(range(len(hosts.plans)))
    return exit_status, hosts


def used(hosts):
    return [list(plan.hosts) for plan in hosts.plans]


def test_elastic_run_leaves_out_a_lost_host_and_uses_it_again(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, TWO, 10), ended(1, ALL, 20), ended(0, ALL, 30), elastic=True
    )
    assert exit_status == (0, "why")
    assert used(hosts) == [ALL, TWO, ALL]
    # Only the host that has returned gets a new agent.
    assert [names for names, _ in hosts.environs] == [ALL, ["node2"]]
    environs = [environ for _, environ in hosts.environs]
    assert {environ["HPCTRAIN_RUN_DIR"] for environ in environs} == {str(tmp_path / "run")}
    assert len({environ["HPCTRAIN_SECRET"] for environ in environs}) == 1
    assert all("SECRET" not in environ["HPCTRAIN_AGENT"] for environ in environs)
    assert {plan.launch for plan in hosts.plans} == {environs[0]["HPCTRAIN_START"]}
    assert [list(plan.ports) for plan in hosts.plans] == [[1, 2], [3, 4], [3, 4]]  # new stores
    output = capsys.readouterr().err
    assert "attempt 2: 2 of 3 hosts, without node2; from step 10 on" in output
    assert "attempt 3: 3 of 3 hosts; from step 20 on" in output


def test_lost_host_without_elastic_ends_with_75(tmp_path):
    exit_status, hosts = run_attempts(tmp_path, ended(None, TWO, 10))
    assert exit_status == (75, "node2 of the job's hosts are lost")
    assert len(hosts.plans) == 1


def test_spare_replaces_a_lost_host_once(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, TWO, 10), ended(None, ["node3"], 20), spares=1
    )
    assert exit_status == (75, "node1 of the job's hosts are lost")
    assert used(hosts) == [["node1", "node2"], TWO]
    assert [names for names, _ in hosts.environs] == [ALL]  # agents of the spare hosts, too
    assert "attempt 2: 2 of 3 hosts, without node2; from step 10 on" in capsys.readouterr().err


def test_spares_replace_a_host_that_is_missing_at_the_start_or_had_faults(tmp_path):
    def chosen(name, answering, end):
        hosts = Hosts(rundir.RunDirectory(tmp_path / name), end)
        hosts.answering = answering
        run(hosts, spares=1)
        return used(hosts)[0]

    assert chosen("a", TWO, ended(0, TWO)) == TWO
    host_ledger.note(Path(), ["node1", "node1"], host_ledger.LOST, "5")
    assert chosen("b", ALL, ended(0)) == ["node2", "node3"]
    assert chosen("c", TWO, ended(0, TWO)) == TWO  # there is no other one


def test_host_that_does_not_answer_is_lost_until_it_answers(tmp_path):
    """Slurm lists a host for minutes after it is gone."""

    class Silent(Hosts):
        def present(self):
            return ALL

    hosts = Silent(
        rundir.RunDirectory(tmp_path / "run"),
        *(ended(None, TWO, 10), ended(1, ALL, 20), ended(0, ALL, 30)),
    )
    code, _ = run(hosts, elastic=True)
    assert code == 0
    assert used(hosts) == [ALL, TWO, ALL]
    faults = host_ledger.LEDGER.read_text().splitlines()
    assert [json.loads(fault)["host"] for fault in faults] == ["node2"]


def test_host_that_failed_its_check_is_not_used_again(tmp_path, capsys):
    wrong = failed(1, error="HT318")
    hosts = Hosts(rundir.RunDirectory(tmp_path / "run"), ended(1, step=10, first=wrong))
    hosts.unfit = {"node1": "no memory is free"}
    code, reason = run(hosts, spares=1)
    assert (code, reason) == (75, "node2 of the job's hosts are lost")
    assert used(hosts) == [["node2", "node3"]]
    assert "node1: no memory is free" in capsys.readouterr().err
    faults = map(json.loads, host_ledger.LEDGER.read_text().splitlines())
    found = [(fault["host"], fault["kind"]) for fault in faults]
    assert found == [("node1", "preflight"), ("node2", "preflight")]


def test_agent_that_is_lost_on_a_host_that_answers_is_started_again(tmp_path):
    _, hosts = run_attempts(tmp_path, ended(None, step=10, killed=True), ended(0))
    assert used(hosts) == [ALL, ALL]
    assert [names for names, _ in hosts.environs] == [ALL, ALL]
    assert not host_ledger.LEDGER.exists()


def test_failure_after_a_checkpoint_is_tried_again_on_all_hosts(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, step=10, first=failed(1)), ended(0, step=20)
    )
    assert exit_status == (0, "why")
    assert used(hosts) == [ALL, ALL]
    output = capsys.readouterr().err
    assert re.fullmatch(
        "hpctrain: rank 3 on node2 failed first, with exit code 1: ValueError: the cause\n"
        r"hpctrain: attempt 2: 3 of 3 hosts; from step 10 on \(\d\d:\d\d:\d\d\)\n",
        output,
    )


def test_failure_of_a_full_disk_is_not_tried_again_and_blames_no_host(tmp_path, capsys):
    first = failed(1, rank=0, error="HT715", brief="the disk that holds run is full")
    exit_status, hosts = run_attempts(tmp_path, ended(1, step=10, first=first))
    assert exit_status == (1, "rank 0 on node2 failed, the disk that holds run is full")
    assert len(hosts.plans) == 1
    assert not host_ledger.LEDGER.exists()
    assert "given up" not in capsys.readouterr().err


@pytest.fixture
def full_disk(monkeypatch):
    """Return a function after which nothing can be written below a folder."""

    def fill(*names):
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        for owner, name in names:
            monkeypatch.setattr(owner, name, full)

    return fill


def test_launch_on_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, full_disk):
    full_disk((tempfile, "TemporaryFile"))
    directory = rundir.RunDirectory(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"is full .*: the files of this launch") as caught:
        run(Hosts(directory, ended(0)))
    assert caught.value.code == "HT715"
    assert not list(directory.path.iterdir())


def test_end_that_a_full_disk_does_not_record_keeps_the_exit_code(tmp_path, capsys, full_disk):
    directory = rundir.RunDirectory(tmp_path / "run")
    rundir.replace(directory.identity, "{}")
    full_disk((rundir, "replace"), (Path, "touch"))
    exit_status, _ = run_attempts(tmp_path, ended(None, first=failed(3)))
    assert exit_status[0] == 3
    assert f"{directory.summary} could not be written: [Errno 28]" in capsys.readouterr().err
    exit_status, _ = run_attempts(tmp_path, ended(0), received=[signal.SIGUSR2])
    assert "the run cannot be stopped by a file: [Errno 28]" in capsys.readouterr().err


def test_program_without_a_session_is_started_again_only_with_retry(tmp_path):
    # It has a checkpoint of a run before: without that, a first failure ends the run anyway.
    crash = ended(None, step=10, session=False, first=failed(1))
    exit_status, hosts = run_attempts(tmp_path, crash, name="once")
    assert exit_status == (1, "rank 3 on node2 failed, with exit code 1: ValueError: the cause")
    assert len(hosts.plans) == 1
    exit_status, hosts = run_attempts(
        tmp_path, crash, ended(0, session=False), plain=True, name="again"
    )
    assert exit_status == (0, "why")
    assert len(hosts.plans) == 2


def test_rank_that_fails_before_its_session_is_no_plain_program_if_it_had_one_before(tmp_path):
    exit_status, hosts = run_attempts(
        tmp_path,
        ended(None, step=10, first=failed(137)),
        ended(None, session=False, first=failed(134)),
        ended(0, step=20),
    )
    assert exit_status == (0, "why")
    assert len(hosts.plans) == 3


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (failed(137), "rank 3 on node2 failed first"),
        (None, "all agents have ended at once, as when a scheduler ends their step"),
    ],
)
def test_first_attempt_that_a_signal_killed_is_tried_again(tmp_path, capsys, first, why):
    crash = ended(None, first=first, killed=first is None)
    exit_status, hosts = run_attempts(tmp_path, crash, ended(0))
    assert exit_status == (0, "why")
    assert len(hosts.plans) == 2
    output = capsys.readouterr().err
    assert f"hpctrain: {why}" in output
    assert "attempt 2: 3 of 3 hosts; from the start, as there is no checkpoint" in output


@pytest.mark.parametrize("first", [failed(3), None])
def test_first_attempt_that_fails_by_itself_is_not_tried_again(tmp_path, first):
    exit_status, hosts = run_attempts(tmp_path, ended(None, first=first))
    brief = "rank 3 on node2 failed, with exit code 3: ValueError: the cause"
    assert exit_status == ((3, brief) if first else (1, ""))
    assert len(hosts.plans) == 1


def test_single_attempt_has_the_exit_code_and_the_cause_of_its_failure(tmp_path, capsys):
    exit_status, hosts = run_attempts(
        tmp_path, ended(None, TWO, 10, first=failed(139)), max_fruitless=1, elastic=True
    )
    assert exit_status == (139, "rank 3 on node2 failed, with exit code 139: ValueError: the cause")
    assert len(hosts.plans) == 1
    assert "attempt 2" not in capsys.readouterr().err


def test_program_is_not_started_again_after_a_signal(tmp_path):

    class Signalled(Hosts):
        def run(self, link, plan):
            super().run(link, plan)
            signal.raise_signal(signal.SIGTERM)

    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Signalled(directory, ended(None, step=10, first=failed(143)))
    code, _ = run(hosts)
    assert code == exit_codes.STOPPED
    assert used(hosts) == [ALL]


def test_no_rank_starts_after_a_signal_before_the_first_attempt(tmp_path):
    hosts = Hosts(rundir.RunDirectory(tmp_path / "run"))
    assert run(hosts, received=[signal.SIGTERM])[0] == exit_codes.STOPPED
    assert not hosts.plans


@pytest.mark.parametrize("most", [2, MOST_FRUITLESS])
def test_run_is_given_up_with_the_last_cause(tmp_path, capsys, most):
    directory = rundir.RunDirectory(tmp_path / "run")
    ends = [ended(1, step=10)] + [ended(None, first=failed(1))] * most
    rundir.replace(directory.identity, "{}")
    rundir.replace(directory.summary, json.dumps({"status": "failed", "step": 13}))
    rundir.append(directory.events, json.dumps({"time": 1.7e9, "event": "launched"}))
    exit_status, hosts = run_attempts(tmp_path, *ends, max_fruitless=most)
    assert exit_status == (
        76,
        f"{most} attempts in a row without a new checkpoint: "
        "rank 3 on node2 failed, with exit code 1: ValueError: the cause",
    )
    assert len(hosts.plans) == 1 + most
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
    late = failed(137, time=begun + 90)
    _, hosts = run_attempts(tmp_path, ended(None, step=10, first=late), ended(0))
    launched = {environ["HPCTRAIN_LAUNCHED"] for _, environ in hosts.environs}
    assert begun <= float(*launched) <= time.time()
    marks = directory.lines(directory.events)[1:]
    assert [mark["event"] for mark in marks] == ["noticed", "ended", "ended"]
    assert marks[0]["time"] == pytest.approx(begun + 90, abs=0.01)


def test_ranks_are_new_interpreters_after_an_attempt_that_asked_for_them(tmp_path):
    ends = [ended(None, step=10), ended(None, step=20, fresh=True), ended(None, step=30), ended(0)]
    _, hosts = run_attempts(tmp_path, *ends)
    assert [plan.fresh for plan in hosts.plans] == [False, False, True, True]


def test_refused_start_records_nothing(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    rundir.replace(directory.identity, "{}")
    rundir.append(directory.events, json.dumps({"time": 1.7e9, "event": "launched"}))
    run_attempts(tmp_path, ended(2, usage=True))
    assert len(directory.lines(directory.events)) == 1


def test_run_is_given_up_with_fewer_ranks_than_min_nproc(tmp_path):
    exit_status, _ = run_attempts(tmp_path, ended(1, TWO, 10), min_ranks=5, elastic=True)
    assert exit_status == (76, "4 ranks are left of at least 5")
    exit_status, _ = run_attempts(tmp_path, ended(1, [], 20), elastic=True, name="none")
    assert exit_status == (76, "0 ranks are left of at least 1")


def test_each_run_has_a_secret_of_its_own(tmp_path):
    found = []
    for name in ("one", "two"):
        env = {"HPCTRAIN_SECRET": "given", "OTHER": "x"}
        _, hosts = run_attempts(tmp_path, ended(0, step=10), env=env, name=name)
        _, environ = hosts.environs[0]
        assert environ["OTHER"] == "x"
        found += [environ["HPCTRAIN_SECRET"], environ["HPCTRAIN_START"]]
    assert len({*found, "given"}) == 5


def test_folders_of_killed_starts_of_the_job_are_removed(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    kept = [".launch-7-2-d", ".launch-70-0-e", ".launch-7_1-0-f", ".launch-7-later"]
    for name in (".launch-7-0-a", ".launch-7-1-b", ".launch-7-1-c", *kept):
        (directory.path / name / "0").mkdir(parents=True)
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    run(Hosts(directory, ended(0)), env)
    assert sorted(os.listdir(directory.path)) == sorted(kept)


def test_run_refuses_a_host_that_never_answered(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "run")
    hosts = Hosts(directory)
    hosts.answering = TWO
    with pytest.raises(StartError, match="node2 of 3 nodes cannot be used") as caught:
        run(hosts)
    assert caught.value.code == "HT210"
    assert "scontrol show node node2" in str(caught.value)
    assert not hosts.plans
    assert not directory.path.exists()


def test_first_failure_of_all_hosts_is_the_earliest_without_another_cause():
    consequence = End(1, 6, rank=0, host="node1", time=1.0, caused_by_other_rank=True)
    late = End(3, 6, rank=4, host="node2", time=9.0)
    early = End(4, 6, rank=5, host="node3", time=7.0)
    end = End.of_hosts([consequence, late, early])
    assert (end.rank, end.code, end.ranks, end.usage) == (5, 4, 6, False)
    assert End.of_hosts([consequence, End(137, 6)]).rank == 0


def test_end_of_lost_hosts_is_a_failure_that_is_tried_again():
    end = End.of_hosts([End(0, 2)], ["node2"])
    assert (end.code, end.rank, end.cause) == (137, None, "node2 was lost")


def test_error_of_an_agent_that_started_no_rank_gives_the_code():
    end = End.of_hosts([End(2, usage=True), End(137, 6)])
    assert (end.code, end.ranks, end.usage) == (2, 6, True)


def test_end_of_hosts_survives_its_message():
    end = End(75, 2, signal=12, rank=1, host="node1", recorded=(75, "a signal"), lost=("node2",))
    assert End.of_json(json.loads(json.dumps(end.as_json()))) == dataclasses.replace(
        end, lost=["node2"]
    )


def test_rank_that_failed_because_of_another_is_not_said_to_have_failed_first(tmp_path, capsys):
    consequence = failed(1, rank=0, caused_by_other_rank=True)
    for first, conclusion in ((failed(1, rank=2), "failed first"), (consequence, "ended")):
        end = ended(1, first=first)
        run_attempts(tmp_path, end, name=conclusion.replace(" ", "-"), max_fruitless=1)
        output = capsys.readouterr().err
        assert f"hpctrain: rank {first['rank']} on node2 {conclusion}, {first['brief']}\n" in output


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


# The ranks of each host by the tasks of the job, and by --nproc-per-node; 0 for one for each GPU.
@pytest.mark.parametrize(
    ("tasks", "nproc", "ranks"),
    [
        ("2(x2),1", None, [2, 2, 1]),
        ("1(x3)", None, [0, 0, 0]),
        ("", None, [0, 0, 0]),
        ("1(x3)", "4", [4, 4, 4]),
        ("2(x2),1", "auto", [0, 0, 0]),
        ("1(x3)", "3,2,1", [3, 2, 1]),
    ],
)
def test_ranks_of_a_host_in_slurm(tasks, nproc, ranks):
    hosts = InSlurm({**JOB, "SLURM_TASKS_PER_NODE": tasks}, nproc)
    assert list(hosts.counts.values()) == ranks


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


def started(hosts, names, tmp_path, variables=JOB):
    """Return the words of the srun that starts the agents."""
    environ = {**variables, "SLURM_NTASKS": "5", "SLURM_CPU_BIND": "none"}
    words, environ = hosts.command(names, Plan(["python"], "/folder"), environ, tmp_path)
    # srun would take the size and the binding of its step from them.
    names = {"SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND"}
    assert not {name.partition("_HET_GROUP")[0] for name in environ} & names
    assert environ["SLURM_JOB_ID"] == "815"
    return words


STEP = {"--kill-on-bad-exit=0", "--no-kill", "--overlap", "--mpi=none", "--wait=0"}


def test_srun_starts_one_agent_on_each_host(tmp_path):
    words = started(InSlurm(JOB), ["node1", "node3"], tmp_path)
    assert words[0] == "srun"
    assert words[-3:] == [sys.executable, "-m", "hpctrain.launch.agent"]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=node[1,3]"} < set(words)
    assert set(words) > STEP


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
def test_srun_starts_an_agent_on_each_host_of_all_parts_of_a_job(tmp_path, used, parts):
    called = " ".join(started(InSlurm(TWO_PARTS), used, tmp_path, TWO_PARTS))
    commands = called.removeprefix("srun ").split(" : ")
    assert len(commands) == len(parts)
    for command, (group, names, count) in zip(commands, parts, strict=True):
        words = command.split()
        assert words[0] == group
        assert {f"--nodes={count}", f"--ntasks={count}", f"--nodelist={names}"} < set(words)
        assert set(words) > STEP
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
        (["--retry", "--as", "slurm"], "--retry outside of a Slurm batch script"),
        (["--max-attempts", "2", "--nodes", "2"], "--max-attempts outside of a Slurm batch script"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, found, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    assert main(["run", *options, "train.py"]) == 2
    assert found in capsys.readouterr().err
