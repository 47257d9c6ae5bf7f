"""The batch job around `hpctrain run`: its own variables, its run directory, and its requeue."""

import os
import shlex
import signal
from dataclasses import replace

import fake_slurm
import pytest
from fake_slurm import job

from hpctrain.cluster.job import detect
from hpctrain.errors import UsageError, exit_codes
from hpctrain.launch import slurm_job
from hpctrain.launch.slurm_job import SlurmJob, own_environment, stop_signals
from hpctrain.rundir import STOP_REASON, RunDirectory, host_ledger

OWN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
OF_THE_ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return a fake Slurm in which job 7 runs, and whose `scontrol requeue` succeeds."""
    monkeypatch.setattr(slurm_job, "_SECONDS_UNTIL_END", 0.0)
    made = fake_slurm.FakeSlurm(tmp_path)
    made.jobs(job("7"))
    made.command("scontrol")
    return made


@pytest.fixture
def make(slurm, tmp_path):
    """Return a function that makes the job of this process from variables."""

    def make(max_restarts=None, **more):
        env = {**slurm.env, **OWN, "SLURM_SUBMIT_DIR": str(tmp_path)}
        return SlurmJob.here({**env, **more}, max_restarts)

    return make


def requeues(slurm):
    return slurm.calls.read_text().splitlines() if slurm.calls.exists() else []


# --- variables of an outer job


def test_array_and_restart_count_of_an_outer_job_are_removed(slurm, make):
    slurm.jobs(job("7"), job("5_3", JobID="8", RestartCnt="2"))
    own = make(SLURM_RESTART_COUNT="2", SLURM_ARRAY_TASK_COUNT="4", **OF_THE_ARRAY)
    assert own.allocation.label == "7"
    assert own.allocation.restart_count == 0
    assert not [name for name in own.env if name.startswith("SLURM_ARRAY_")]


def test_heterogeneous_job_has_the_hosts_and_tasks_of_all_its_parts(make):
    parts = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-2]",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "4",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)",
    }
    own = make(SLURM_JOB_NODELIST="a1", SLURM_TASKS_PER_NODE="4", **parts).env
    assert (own["SLURM_JOB_NODELIST"], own["SLURM_TASKS_PER_NODE"]) == ("a1,b[1-2]", "4,2(x2)")
    # Inherited, as this job was submitted in a heterogeneous one.
    parts["SLURM_JOB_ID_HET_GROUP_0"] = "6"
    own = make(SLURM_JOB_NODELIST="c1", SLURM_TASKS_PER_NODE="1", **parts).env
    assert (own["SLURM_JOB_NODELIST"], own["SLURM_TASKS_PER_NODE"]) == ("c1", "1")


def test_array_task_keeps_its_index_and_gets_its_own_restart_count(slurm, make):
    # The id of the last task is that of the array.
    slurm.jobs(job("7_0", JobID="8", RestartCnt="5"), job("7_3", RestartCnt="1"))
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "9"}
    own = make(**array)
    assert own.allocation.label == "7_3"
    assert own.allocation.restart_count == 1


def test_environment_without_traces_of_an_outer_job_asks_slurm_nothing(slurm):
    slurm.jobs(None)
    env = {"SLURM_JOB_ID": "7", "HPCTRAIN_RUN_DIR": "runs/given", "A": "x"}
    assert own_environment({**slurm.env, **env}) == {**slurm.env, **env}


def test_environment_is_kept_if_slurm_does_not_answer(slurm):
    slurm.jobs(None)
    env = {**slurm.env, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", **OF_THE_ARRAY}
    assert own_environment(env) == env


def test_run_directory_and_stop_file_of_an_outer_job_are_ignored(capsys):
    outer = {"HPCTRAIN_STOP_FILE": "/outer/stop", "HPCTRAIN_RUN_DIR": "/outer/run"}
    assert own_environment({"SLURM_JOB_ID": "7", **outer}) == {"SLURM_JOB_ID": "7"}
    assert "HPCTRAIN_RUN_DIR is ignored" in capsys.readouterr().err
    assert own_environment({"SLURM_JOB_ID": "7", "HPCTRAIN_STOP_FILE": "/x"}) == {
        "SLURM_JOB_ID": "7"
    }
    assert not capsys.readouterr().err


# --- run directory


@pytest.mark.parametrize(
    ("given", "env", "path"),
    [
        (None, {}, "runs/train-7"),
        (None, {"SLURM_JOB_NAME": "a/b"}, "runs/a_b-7"),
        ("my run", {}, "my run"),
        ("/abs/run", {}, "/abs/run"),
        ("mine", {"HPCTRAIN_RUN_DIR": "runs/other"}, "runs/other"),
        ("mine", {"HPCTRAIN_RUN_DIR": "/abs/x"}, "/abs/x"),
        (None, OF_THE_ARRAY, "runs/train-5_3"),
        ("mine", OF_THE_ARRAY, "mine/3"),
        ("mine", {**OF_THE_ARRAY, "HPCTRAIN_RUN_DIR": "x", "SLURM_ARRAY_TASK_COUNT": "1"}, "x"),
    ],
)
def test_run_directory_is_the_same_for_all_starts_of_a_job(tmp_path, given, env, path):
    top = tmp_path / "submit"  # a script may change its working directory
    for restarts in ("0", "2"):
        own = {**OWN, "SLURM_SUBMIT_DIR": str(top), "SLURM_RESTART_COUNT": restarts, **env}
        assert SlurmJob(own, detect(own)).run_directory(given) == top / path


def test_run_directory_of_all_tasks_of_an_array_is_refused():
    own = {**OWN, **OF_THE_ARRAY, "HPCTRAIN_RUN_DIR": "x", "SLURM_ARRAY_TASK_COUNT": "2"}
    with pytest.raises(UsageError, match="HPCTRAIN_RUN_DIR=x: one directory for the 2 tasks"):
        SlurmJob(own, detect(own)).run_directory(None)


# --- requeue


@pytest.mark.parametrize("code", [0, 1, 2, 3, exit_codes.GIVEN_UP, 137, 143])
def test_job_that_ended_is_not_requeued(slurm, make, tmp_path, capsys, code):
    assert make().after(code, "why", tmp_path) == code
    assert not [call for call in requeues(slurm) if "requeue" in call]
    assert not capsys.readouterr().err


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
def test_stopped_job_is_requeued_by_its_own_label(slurm, make, tmp_path, state):
    slurm.jobs(job("7", State=state))
    make().after(exit_codes.STOPPED, "USR2", tmp_path)
    slurm.jobs(job("7_0", JobID="8"), job("7_3", State=state))
    make(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3").after(75, "USR2", tmp_path)
    calls = [call for call in requeues(slurm) if "show" not in call]
    assert calls == ["scontrol requeue incomplete 7", "scontrol requeue incomplete 7_3"]


def test_requeue_ends_the_process_by_sigterm(slurm, make, tmp_path):
    """Send SIGTERM as Slurm does; a process that ignores it is killed much later."""
    slurm.command("scontrol", more="kill -TERM $PPID")
    child = os.fork()
    if not child:
        try:
            with stop_signals(in_batch=True):
                make().after(exit_codes.STOPPED, "USR2", tmp_path)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", "RUNNING"])
@pytest.mark.parametrize("max_restarts", [None, 1])
def test_job_that_was_requeued_by_another_command_is_left_to_slurm(
    slurm, make, tmp_path, capsys, state, max_restarts
):
    """`scontrol requeue` counts the restart, and then ends the processes of the job."""
    RunDirectory(tmp_path).checkpoint(40).mkdir(parents=True)
    slurm.jobs(job("7", State=state, RestartCnt="2"))
    own = make(max_restarts, SLURM_RESTART_COUNT="1")
    own = replace(own, allocation=replace(own.allocation, restart_count=1))
    assert own.after(exit_codes.STOPPED, "SIGTERM", tmp_path) == exit_codes.STOPPED
    assert [call for call in requeues(slurm) if "requeue" in call] == []
    assert capsys.readouterr().err == "hpctrain: Slurm itself starts job 7 again\n"


@pytest.mark.parametrize(
    ("seconds", "code", "warned"),
    [(60, 75, True), (120, 76, True), (600, 75, False), (600, 76, False), (None, 75, False)],
)
def test_job_with_a_limit_too_short_to_train_is_told_to_ask_for_more(
    slurm, make, tmp_path, capsys, seconds, code, warned
):
    RunDirectory(tmp_path).checkpoint(40).mkdir(parents=True)
    own = make()
    end = "Unknown" if seconds is None else f"{own.began + seconds:.0f}"
    slurm.command("scontrol", f"JobId=7 EndTime={end} Deadline=N/A")
    assert own.after(code, "SIGUSR2", tmp_path) == code
    error = capsys.readouterr().err
    fix = f"  fix:      hpctrain submit --time 10m or longer … --run-dir {tmp_path} -- … --resume\n"
    assert (fix in error) == warned
    # It would only repeat what has happened.
    assert ("hpctrain requeue" in error) == (not warned or code == exit_codes.STOPPED)
    assert ("scontrol requeue incomplete 7" in requeues(slurm)) == (code == exit_codes.STOPPED)


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PREEMPTED", "PENDING"])
def test_cancelled_job_is_not_requeued(slurm, make, tmp_path, capsys, state):
    slurm.jobs(job("7", State=state))
    assert make().after(exit_codes.STOPPED, "USR2", tmp_path) == exit_codes.STOPPED
    assert not requeues(slurm)
    assert f"job 7 is not started again: its state is {state}\n" in capsys.readouterr().err


REQUEUES = "JobId=7 Requeue=1 Restarts=0\nPartitionName=main PreemptMode=REQUEUE State=UP\n"
PREEMPTS = "PreemptType = preempt/partition_prio\n"


@pytest.mark.parametrize(
    ("version", "shown", "called"),
    [
        ("22.05.8", REQUEUES + PREEMPTS, True),
        ("24.05.0", REQUEUES + PREEMPTS, False),
        ("26.05.5", REQUEUES + PREEMPTS, False),
        # Slurm would not requeue these.
        ("26.05.5", REQUEUES.replace("=REQUEUE", "=CANCEL") + PREEMPTS, True),
        ("26.05.5", REQUEUES.replace("Requeue=1", "Requeue=0") + PREEMPTS, True),
        ("26.05.5", REQUEUES + "PreemptType = preempt/qos\n", True),
    ],
)
@pytest.mark.parametrize("name", ["slurm", "slurm-wlm"])  # the latter is Debian's
def test_job_in_the_grace_time_of_a_preemption_is_requeued_once(
    slurm, make, tmp_path, capsys, version, shown, called, name
):
    slurm.jobs(job("7", PreemptTime="2026-11-26T02:45:46"))
    slurm.command("scontrol", f"{name} {version}\n{shown}")
    assert make().after(exit_codes.STOPPED, "TERM", tmp_path) == exit_codes.STOPPED
    assert ("scontrol requeue incomplete 7" in requeues(slurm)) == called
    said = "Slurm itself starts job 7 again" in capsys.readouterr().err
    assert said == (not called)


def test_job_with_the_label_of_another_one_is_not_requeued(slurm, make, tmp_path, capsys):
    """Slurm did not answer at the begin, so the label is that of the outer job."""
    slurm.jobs(None)
    own = make(**OF_THE_ARRAY)
    assert own.allocation.label == "5_3"
    slurm.jobs(job("7"), job("5_3", JobID="8"))
    assert own.after(exit_codes.STOPPED, "USR2", tmp_path) == exit_codes.STOPPED
    assert not requeues(slurm)
    assert "its state is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("jobs", "error", "why"),
    [
        ([None], "", "Unable to contact slurm controller"),
        ([], "", "its state is unknown"),
        ([job("7")], "Requested operation is disabled", "Requested operation is disabled"),
    ],
)
def test_stopped_job_that_cannot_be_requeued_ends_with_75(
    slurm, make, tmp_path, capsys, jobs, error, why
):
    slurm.jobs(*jobs)
    slurm.command("scontrol", error=error, code=1)
    assert make().after(exit_codes.STOPPED, "USR2", tmp_path) == exit_codes.STOPPED
    assert why in capsys.readouterr().err


def test_stopped_job_on_a_host_without_slurms_commands_ends_with_75(make, tmp_path, capsys):
    assert make(PATH="/nowhere").after(75, "USR2", tmp_path) == exit_codes.STOPPED
    assert "job 7 is not started again: no squeue" in capsys.readouterr().err


# Of four nodes, all usable; node4 has had a fault in this job.
NODES = "".join(f"main* node{n} idle 2 1900 (null) a,b\n" for n in range(1, 5))
REQUESTED = " ReqNodeList={} ExcNodeList={} NodeList= MinTmpDiskNode=0 Features={} DelayBoot=0 "


@pytest.mark.parametrize(
    ("required", "excluded", "features", "nodes", "update", "said"),
    [
        ("(null)", "(null)", "(null)", NODES, "node4", "leaves out node4"),
        ("(null)", "node1", "(null)", NODES, "node[1,4]", "leaves out node4"),
        # It could not start without it: the job requires it,
        ("node[3-4]", "(null)", "(null)", NODES, "", "node4 had faults, but the job requires it"),
        ("node4", "(null)", "(null)", NODES, "", "node4 had faults, but the job requires it"),
        # or too few others are left: by what is excluded already, by state, size or features.
        ("(null)", "node[1-2]", "(null)", NODES, "", ""),
        ("(null)", "(null)", "(null)", NODES.replace("idle", "down", 2), "", ""),
        ("(null)", "(null)", "(null)", NODES.replace(" 2 ", " 1 ", 2), "", ""),
        ("(null)", "(null)", "(null)", NODES.replace(" 1900", " 900", 2), "", ""),
        ("(null)", "(null)", "(null)", NODES.replace("(null)", "gpu:2", 2), "", ""),
        ("(null)", "(null)", "a", NODES.replace("a,b", "b", 2), "", ""),
        ("(null)", "(null)", "a", NODES.replace("a,b", "b,c,a", 2), "node4", "leaves out node4"),
        ("(null)", "(null)", "(null)", NODES.replace("a,b", "b", 2), "node4", "leaves out node4"),
    ],
)
def test_requeued_job_excludes_a_faulty_node_only_if_it_can_start_without(
    slurm, make, tmp_path, capsys, required, excluded, features, nodes, update, said
):
    slurm.command("sinfo", nodes)
    slurm.command("scontrol", REQUESTED.format(required, excluded, features))
    host_ledger.note(tmp_path, ["node4"], host_ledger.LOST, "7")
    make(SLURM_JOB_NODELIST="node[3-4]").after(exit_codes.STOPPED, "a node was lost", tmp_path)
    updates = [call for call in requeues(slurm) if "update" in call]
    expected = f"scontrol update JobId=7 ExcNodeList={update}"
    assert updates == ([expected] if update else [])
    error = capsys.readouterr().err
    assert said in error
    assert ("faults" in error) == bool(said)


def test_run_stopped_by_the_file_stop_is_not_requeued(slurm, make, tmp_path, capsys):
    assert make().after(75, f"{STOP_REASON}, after step 12", tmp_path) == exit_codes.STOPPED
    assert not requeues(slurm)
    assert f"job 7 is not started again: stopped by {STOP_REASON}" in capsys.readouterr().err


@pytest.mark.parametrize(("restarts", "code"), [(1, 75), (2, 76), (3, 76)])
def test_max_restarts_exit_codes(slurm, make, tmp_path, capsys, restarts, code):
    slurm.jobs(job("7", RestartCnt=str(restarts)))
    own = make(max_restarts=2, SLURM_RESTART_COUNT="1")
    assert own.after(exit_codes.STOPPED, "USR2", tmp_path) == code
    assert bool(requeues(slurm)) == (code == exit_codes.STOPPED)
    assert ("the limit is 2" in capsys.readouterr().err) == (code == exit_codes.GIVEN_UP)


@pytest.mark.parametrize("array", [False, True])
def test_stopped_job_prints_how_its_run_continues(slurm, make, tmp_path, capsys, array):
    slurm.command("scontrol", code=1)
    slurm.jobs(job("5_3", JobID="7") if array else job("7"))
    own = make(**OF_THE_ARRAY) if array else make()
    own.after(exit_codes.STOPPED, "USR2", tmp_path)
    assert "checkpoints" not in capsys.readouterr().err
    run = tmp_path / "it's a run"
    RunDirectory(run).checkpoint(40).mkdir(parents=True)
    own.after(exit_codes.STOPPED, "USR2", run)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert lines[0] == f"hpctrain: its checkpoints are in {run}"
    assert lines[1].split()[1:] == ["hpctrain", "requeue", "5_3" if array else "7"]
    words = shlex.split(lines[2].partition(":")[2].partition("(")[0])
    more = ["--array=3"] if array else []
    assert words == [f"HPCTRAIN_RUN_DIR={run}", "sbatch", *more, "SCRIPT", "--resume"]


# --- signals


@pytest.mark.parametrize("in_batch", [True, False])
def test_stop_signals_are_collected_also_if_the_script_ignored_them(in_batch):
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]
    numbers += [signal.SIGHUP, signal.SIGINT] if in_batch else []
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        with stop_signals(in_batch) as received:
            for number in numbers:
                os.kill(os.getpid(), number)
            assert received == numbers
            assert signal.getsignal(signal.SIGINT) != signal.SIG_DFL
        assert all(signal.getsignal(number) == signal.SIG_IGN for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
