"""The handle of a job submitted from Python: state, results, logs and errors."""

import json
import math
import os
import pickle
import threading
import time
from pathlib import Path

import fake_slurm
import pytest

from hpctrain import jobs
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.jobs import find, handle, job_store

SHOWN = "JobId=7 JobName=x JobState={} Reason=None Dependency=(null) Restarts=0 BatchFlag=1"
FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return a fake Slurm that no longer knows the job."""
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    made.command("scontrol", error=FORGOTTEN, code=1)
    made.command("scancel")
    return made


def set_state(slurm, state):
    slurm.command("scontrol", SHOWN.format(state))


def make_job_folder(outcomes, number="7", name="20260101-000000-a", **more):
    """Make the folder of a job of which some ranks have left a result; return its path."""
    folder = job_store.FOLDERS / name
    folder.mkdir(parents=True, mode=0o700)
    record = {
        "id": number,
        "ranks": len(outcomes),
        "run_dir": os.path.abspath("run"),
    }
    record |= more
    (folder / "job.json").write_text(json.dumps(record))
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            data = outcome if isinstance(outcome, bytes) else pickle.dumps(outcome)
            (folder / f"{number}_{rank}_result.pkl").write_bytes(data)
    return folder


def success(value):
    return "success", value


def failure(trace):
    return "error", trace


@pytest.mark.parametrize("word", ["COMPLETED", None])
def test_job_results_by_rank_also_of_forgotten_job(slurm, word):
    if word:
        set_state(slurm, word)
    job = find(make_job_folder([success(3), success({"top1": 0.5})]))
    assert job.state == "COMPLETED"
    assert job.results() == [3, {"top1": 0.5}]
    assert job.result() == 3


def test_job_result_names_first_failed_rank_with_traceback(slurm):
    set_state(slurm, "FAILED")
    folder = make_job_folder(
        [failure("rank 0 lost rank 2"), None, failure("Traceback\nValueError: why")]
    )
    os.utime(folder / "7_2_result.pkl", ns=(1, 1))
    job = find(folder)
    with pytest.raises(HpctrainError) as caught:
        job.results()
    found = "rank 2 of 3 of job 7 failed:\nTraceback\nValueError: why"
    fix = "job.logs(2) (returns the output of the rank)"
    assert (caught.value.code, caught.value.found) == ("HT822", found)
    assert caught.value.fixes == (fix,)


def record_end(reason):
    """Make a run that has failed."""
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    Path("run/summary.json").write_text(json.dumps({"status": "failed", "reason": reason}))


def test_job_result_names_the_rank_and_host_that_the_run_has_recorded(slurm):
    set_state(slurm, "FAILED")
    record_end("rank 2 on node3 failed, ValueError: why")
    folder = make_job_folder([failure("rank 0 lost rank 2"), None, failure("ValueError: why")])
    os.utime(folder / "7_0_result.pkl", ns=(1, 1))
    with pytest.raises(HpctrainError) as caught:
        find(folder).results()
    assert caught.value.found == "rank 2 of 3 of job 7 failed on node3:\nValueError: why"


def test_job_result_names_a_killed_rank_and_how_to_continue(slurm):
    set_state(slurm, "FAILED")
    reason = "3 attempts in a row: rank 2 on node3 failed, with signal SIGKILL"
    record_end(reason)
    folder = make_job_folder([failure("lost rank 2"), failure("lost rank 2"), None])
    (folder / "7_2_log.out").write_text("step 30\n")
    with pytest.raises(HpctrainError) as caught:
        find(folder).results()
    found = f"job 7 ended as FAILED: {reason}; the last output of rank 2:\nstep 30"
    assert (caught.value.found, caught.value.fixes) == (found, ("hpctrain requeue 7",))


def test_job_state_of_forgotten_job_comes_from_sacct(slurm):
    job = find(make_job_folder([None, failure("why")]))
    assert job.state == "FAILED"
    slurm.command("sacct", "7|CANCELLED by 1000|0:15")
    assert job.state == "CANCELLED"


@pytest.mark.parametrize(
    ("word", "reason", "fixes"),
    [
        ("CANCELLED", "it was cancelled", 1),
        ("TIMEOUT", "at its time limit", 2),
        ("OUT_OF_MEMORY", "more memory", 1),
        ("NODE_FAIL", "a node was lost", 1),
    ],
)
def test_job_result_prefers_slurm_state_to_rank_errors(slurm, word, reason, fixes):
    set_state(slurm, word)
    job = find(make_job_folder([failure("rank 0 lost rank 1"), None]))
    with pytest.raises(HpctrainError, match=f"job 7 ended as {word}: .*{reason}") as caught:
        job.result()
    assert (caught.value.code, len(caught.value.fixes)) == ("HT823", fixes)


def test_job_result_lost_shows_rank_and_end_of_log(slurm, monkeypatch):
    monkeypatch.setattr(handle, "_SECONDS_FOR_RESULT", 0.1)
    set_state(slurm, "COMPLETED")
    folder = make_job_folder([success(1), None])
    (folder / "7_1_log.out").write_text("first\n" * 50 + "last words\n")
    with pytest.raises(HpctrainError) as caught:
        find(folder).results()
    found = caught.value.found
    assert found.startswith("job 7 ended as COMPLETED: rank 1 of 2 has no result")
    assert found.endswith("last words")
    assert found.count("first") < 50
    assert (caught.value.code, caught.value.fixes) == ("HT823", ())


def test_job_results_wait_for_late_file(slurm):
    set_state(slurm, "COMPLETED")
    folder = make_job_folder([success(1), None])
    path = folder / "7_1_result.pkl"

    def write_result():
        path.with_suffix(".new").write_bytes(pickle.dumps(success(2)))
        path.with_suffix(".new").rename(path)

    timer = threading.Timer(0.5, write_result)
    timer.start()
    assert find(folder).results() == [1, 2]
    timer.join()


def test_job_result_that_cannot_be_unpickled_names_the_reason(slurm):
    set_state(slurm, "COMPLETED")
    job = find(make_job_folder([b"\x80\x04cnowhere_to_be_found\nThing\n."]))
    with pytest.raises(HpctrainError, match="cannot be read here: ModuleNotFoundError"):
        job.result()


def test_job_state_without_slurm_comes_from_results(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find(make_job_folder([success(1)])).results() == [1]
    unknown = find(make_job_folder([None], number="8", name="b"))
    assert unknown.state == unknown.wait(0) == unknown.wait(0.3) == "unknown"


def test_job_wait_continues_through_requeue(slurm):
    set_state(slurm, "RUNNING")
    folder = make_job_folder([None])
    job = find(folder)
    started = time.monotonic()
    assert job.wait(0.3) == "RUNNING"
    assert time.monotonic() - started < 60
    set_state(slurm, "PENDING")

    def end_job():
        set_state(slurm, "COMPLETED")
        (folder / "7_0_result.pkl").write_bytes(pickle.dumps(success(None)))

    timer = threading.Timer(0.5, end_job)
    timer.start()
    assert job.wait(60) == "COMPLETED"
    timer.join()


def test_job_wait_polls_slurm_less_and_less_often(slurm, monkeypatch):
    job = find(make_job_folder([None]))
    clock, polls = [0.0], []
    monkeypatch.setattr(handle.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(handle.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    monkeypatch.setattr(job, "_look", lambda: polls.append(clock[0]) or ("RUNNING", False))
    assert job.wait(300) == "RUNNING"
    assert clock[0] == polls[-1] == 300  # Slurm is queried once more at the end
    assert len(polls) < 45
    assert polls[-2] - polls[-3] == pytest.approx(10)


ROWS = """\
{"step": 10, "epoch": 0, "time": 1.5, "loss": 2.0, "lr": 0.1, "samples_per_second": 5}
{"step": 20, "epoch": 0, "time": 2.5, "loss": NaN, "lr": 0.1, "note": "text", "flag": true}
{"step": null, "loss": 9.0}
{"loss": 9.0}
{"step": 30, "epoch": 1, "time": 3.0, "loss": 1.0, "top1": 0.5}
{"step": 40, "lo"""


def test_job_curves_are_steps_and_values_by_metric(slurm):
    job = find(make_job_folder([None]))
    assert job.curves() == {}
    Path("run").mkdir()
    with pytest.raises(UsageError, match="no run is in run"):
        jobs.curves("run")
    Path("run/run.json").write_text("{}")
    assert job.curves() == {}
    Path("run/metrics.jsonl").write_text(ROWS)
    curves = job.curves()
    steps, (first, odd, last) = curves.pop("loss")
    assert (steps, first, last) == ([10, 20, 30], 2.0, 1.0)
    assert math.isnan(odd)
    assert curves == {
        "lr": ([10, 20], [0.1, 0.1]),
        "samples_per_second": ([10], [5]),
        "top1": ([30], [0.5]),
    }
    assert jobs.curves("run").keys() == {"loss", *curves}


def test_job_cancel_calls_scancel_and_reports_failure(slurm, tmp_path, monkeypatch):
    job = find(make_job_folder([None]))
    job.cancel()
    assert slurm.calls.read_text() == "scancel 7\n"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(HpctrainError, match="job 7 was not cancelled") as caught:
        job.cancel()
    assert caught.value.code == "HT816"


def test_job_logs_of_batch_script_and_rank(slurm):
    folder = make_job_folder([None, None])
    job = find(folder)
    assert job.logs() == ""
    (folder / "7.log").write_text("module not found\n")
    (folder / "7_1_log.out").write_bytes(b"of rank 1 \xff\n")
    assert job.logs(0) == "module not found\n"
    assert job.logs(1) == "of rank 1 \ufffd\n"
    with pytest.raises(UsageError, match=r"a rank from 0 to 1"):
        job.logs(2)


def test_job_shows_state_and_metrics(slurm):
    set_state(slurm, "RUNNING")
    run = os.path.abspath("\x1b[2J")
    job = find(make_job_folder([None], run_dir=run))
    os.makedirs(run)
    row = {"step": 3, "loss": 0.5}
    (job.run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert job.metrics() == [row]
    assert "\x1b" not in repr(job)
    assert repr(job).startswith("Job(id='7', state='RUNNING', run_dir='")


def test_jobs_find_by_number_or_folder(slurm):
    old = make_job_folder([success("old")], name="20250101-000000-z")
    new = make_job_folder([success("new")], name="20260101-000000-a")
    make_job_folder([None], number="8", name="20240101-000000-a")
    assert find("7").folder == find(7).folder == new.absolute()
    assert find(old).result() == "old"
    with pytest.raises(UsageError, match="submitted no job '9'") as caught:
        find("9")
    assert "(7, 7, 8)" in str(caught.value)
    assert caught.value.code == "HT818"
    with pytest.raises(UsageError, match=r"submitted no job 'runs/.submitit'"):
        find("runs/.submitit")


def test_jobs_find_refuses_folder_writable_by_others(slurm):
    folder = make_job_folder([success(1)])
    folder.chmod(0o770)
    with pytest.raises(UsageError, match="reading results from it can run code") as caught:
        find("7")
    assert caught.value.code == "HT820"
    assert caught.value.fixes == (f"chmod go-w {folder.absolute()} (if it is yours)",)
    folder.chmod(0o700)
    (folder / "job.json").write_text("{}")
    with pytest.raises(UsageError, match="no job"):
        find(folder)
