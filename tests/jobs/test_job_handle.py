"""The handle of a job that was submitted from Python: what it says of a job in any state."""

import json
import os
import pickle
import threading
import time
from pathlib import Path

import fake_slurm
import pytest

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.jobs import find, handle, job_store

SHOWN = "JobId=7 JobName=x JobState={} Reason=None Dependency=(null) Restarts=0 BatchFlag=1"
FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def slurm(tmp_path):
    """A Slurm that has forgotten the job."""
    made = fake_slurm.FakeSlurm(tmp_path)
    made.command("scontrol", error=FORGOTTEN, code=1)
    made.command("scancel")
    return made


def says(slurm, state):
    slurm.command("scontrol", SHOWN.format(state))


def folder_of(outcomes, number="7", name="20260101-000000-a", **more):
    """Make the folder of a job of which some ranks have left a result; return its path."""
    folder = job_store.FOLDERS / name
    folder.mkdir(parents=True, mode=0o700)
    record = {
        "id": number,
        "via": "slurm",
        "ranks": len(outcomes),
        "run_dir": os.path.abspath("run"),
    }
    record |= {"title": "train", "process": None, **more}
    (folder / "job.json").write_text(json.dumps(record))
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            data = outcome if isinstance(outcome, bytes) else pickle.dumps(outcome)
            (folder / f"{number}_{rank}_result.pkl").write_bytes(data)
    return folder


def job_in(folder, env):
    return handle.Job(job_store.read(Path(folder)), env)


def good(value):
    return "success", value


def bad(trace):
    return "error", trace


@pytest.mark.parametrize("word", ["COMPLETED", None])
def test_job_results_by_rank_also_when_slurm_forgot_job(slurm, word):
    if word:
        says(slurm, word)
    job = job_in(folder_of([good(3), good({"top1": 0.5})]), slurm.env)
    assert job.state == "COMPLETED"
    assert job.results() == [3, {"top1": 0.5}]
    assert job.result() == 3


def test_job_result_names_first_failed_rank_with_traceback(slurm):
    says(slurm, "FAILED")
    folder = folder_of([bad("rank 0 lost rank 2"), None, bad("Traceback\nValueError: why")])
    os.utime(folder / "7_2_result.pkl", ns=(1, 1))
    job = job_in(folder, slurm.env)
    with pytest.raises(HpctrainError) as caught:
        job.results()
    found = "rank 2 of 3 of job 7 failed:\nTraceback\nValueError: why"
    assert str(caught.value) == f"{found}\n  more:     hpctrain explain HT822"


def test_job_state_of_forgotten_job_comes_from_sacct(slurm):
    job = job_in(folder_of([None, bad("why")]), slurm.env)
    assert job.state == "FAILED"
    slurm.command("sacct", "7|CANCELLED by 1000|0:15")
    assert job.state == "CANCELLED"


@pytest.mark.parametrize(
    ("word", "reason", "fixes"),
    [
        ("CANCELLED", "it was cancelled", 1),
        ("TIMEOUT", "its time ended", 2),
        ("OUT_OF_MEMORY", "more memory", 1),
        ("NODE_FAIL", "a host was lost", 1),
    ],
)
def test_job_result_prefers_slurm_state_to_rank_errors(slurm, word, reason, fixes):
    says(slurm, word)
    job = job_in(folder_of([bad("rank 0 lost rank 1"), None]), slurm.env)
    with pytest.raises(HpctrainError, match=f"job 7 ended as {word}: .*{reason}") as caught:
        job.result()
    assert (caught.value.code, len(caught.value.fixes)) == ("HT823", fixes)


def test_job_result_lost_shows_rank_and_end_of_log(slurm, monkeypatch):
    monkeypatch.setattr(handle, "_SECONDS_TO_ARRIVE", 0.1)
    says(slurm, "COMPLETED")
    folder = folder_of([good(1), None])
    (folder / "rank-1.log").write_text("first\n" * 50 + "last words\n")
    with pytest.raises(HpctrainError) as caught:
        job_in(folder, slurm.env).results()
    said = caught.value.found
    assert said.startswith("job 7 ended as COMPLETED: rank 1 of 2 of job 7 left no result")
    assert said.endswith("last words")
    assert said.count("first") < 50
    assert (caught.value.code, caught.value.fixes) == ("HT823", ())


def test_job_results_wait_for_late_file(slurm):
    says(slurm, "COMPLETED")
    folder = folder_of([good(1), None])
    path = folder / "7_1_result.pkl"

    def arrive():
        path.with_suffix(".new").write_bytes(pickle.dumps(good(2)))
        path.with_suffix(".new").rename(path)

    timer = threading.Timer(0.5, arrive)
    timer.start()
    assert job_in(folder, slurm.env).results() == [1, 2]
    timer.join()


def test_job_result_that_cannot_be_unpickled_says_why(slurm):
    says(slurm, "COMPLETED")
    job = job_in(folder_of([b"\x80\x04cnowhere_to_be_found\nThing\n."]), slurm.env)
    with pytest.raises(HpctrainError, match="cannot be read here: ModuleNotFoundError"):
        job.result()


def test_job_state_without_slurm_comes_from_results(tmp_path):
    nothing = {"PATH": str(tmp_path / "empty")}
    assert job_in(folder_of([good(1)]), nothing).results() == [1]
    unknown = job_in(folder_of([None], number="8", name="b"), nothing)
    assert unknown.state == unknown.wait(0) == unknown.wait(0.3) == "unknown"


def test_job_wait_continues_through_requeue(slurm):
    says(slurm, "RUNNING")
    folder = folder_of([None])
    job = job_in(folder, slurm.env)
    started = time.monotonic()
    assert job.wait(0.3) == "RUNNING"
    assert time.monotonic() - started < 60
    says(slurm, "PENDING")

    def end():
        says(slurm, "COMPLETED")
        (folder / "7_0_result.pkl").write_bytes(pickle.dumps(good(None)))

    timer = threading.Timer(0.5, end)
    timer.start()
    assert job.wait(60) == "COMPLETED"
    timer.join()


def test_job_curves_poll_slurm_less_and_less_often(slurm, monkeypatch):
    job = job_in(folder_of([None]), slurm.env)
    clock, asked = [0.0], []
    monkeypatch.setattr(handle.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(handle.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    monkeypatch.setattr(job, "_look", lambda: asked.append(clock[0]) or ("RUNNING", False))
    draw = handle.job_curves.follow
    rounds = iter(range(150))

    def rows():
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(handle.job_curves, "png", lambda rows, title: b"")
    monkeypatch.setattr(
        handle.job_curves, "follow", lambda title, _, wait, path: draw(title, rows, wait, path)
    )
    job.curves()
    assert clock[0] == pytest.approx(300, abs=5)
    assert len(asked) < 45
    assert asked[-1] - asked[-2] == pytest.approx(10, abs=0.5)


def test_job_cancel_calls_scancel_and_reports_failure(slurm, tmp_path):
    job = job_in(folder_of([None]), slurm.env)
    job.cancel()
    assert slurm.calls.read_text() == "scancel 7\n"
    with pytest.raises(HpctrainError, match="job 7 was not cancelled") as caught:
        job_in(job.folder, {"PATH": str(tmp_path / "empty")}).cancel()
    assert caught.value.code == "HT816"


def test_job_logs_of_batch_script_and_rank(slurm):
    folder = folder_of([None, None])
    job = job_in(folder, slurm.env)
    assert job.logs() == ""
    (folder / "7.log").write_text("module not found\n")
    (folder / "rank-1.log").write_bytes(b"of rank 1 \xff\n")
    assert job.logs(0) == "module not found\n"
    assert job.logs(1) == "of rank 1 \ufffd\n"
    with pytest.raises(UsageError, match=r"a rank from 0 to 1"):
        job.logs(2)


def test_job_html_for_notebook_is_escaped(slurm):
    says(slurm, "RUNNING")
    run = os.path.abspath("<script>alert(1)</script>\x1b[2J")
    job = job_in(folder_of([None], run_dir=run), slurm.env)
    os.makedirs(run)
    row = {"step": 3, "<img src=x>": "<b>"}
    (job.run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert job.metrics() == [row]
    shown = job._repr_html_()
    assert "<script>" not in shown
    assert "<img" not in shown
    assert "&lt;script&gt;" in shown
    assert "\x1b" not in repr(job)
    assert repr(job).startswith("Job(id='7', state='RUNNING', run_dir='")


def test_jobs_find_by_number_or_folder(slurm):
    old = folder_of([good("old")], name="20250101-000000-z")
    new = folder_of([good("new")], name="20260101-000000-a")
    folder_of([None], number="8", name="20240101-000000-a")
    assert find("7").folder == find(7).folder == new.absolute()
    assert find(old).result() == "old"
    with pytest.raises(UsageError, match="no job '9' was submitted") as caught:
        find("9")
    assert "one of 7, 7, 8" in str(caught.value)
    assert caught.value.code == "HT818"
    for folder in (".", "runs/.submitit", "runs/train-7"):
        Path("runs/train-7").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="is not the folder of one job") as caught:
            find(folder)
        assert f"one of 7 in {new.absolute()}, 7 in" in caught.value.expected
        assert caught.value.fixes == (f"hpctrain.jobs.find({str(new.absolute())!r})",)
        assert caught.value.code == "HT818"


def test_jobs_find_refuses_folder_writable_by_others(slurm):
    folder = folder_of([good(1)])
    folder.chmod(0o770)
    with pytest.raises(UsageError, match="results read from it can run code") as caught:
        find("7")
    assert caught.value.code == "HT820"
    assert caught.value.fixes == (f"chmod go-w {folder.absolute()} (where it is yours)",)
    folder.chmod(0o700)
    (folder / "job.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no job"):
        job_in(folder, slurm.env)
    with pytest.raises(UsageError, match="cannot be read"):
        job_in("nowhere", slurm.env)
