"""`hpctrain.submit`: refused fields and calls, each with a fix."""

import threading

import pytest

import hpctrain
from hpctrain import JobSpec
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import job_store


def train():
    return 1


@pytest.fixture
def no_job():
    """Check that a refused job leaves no files."""
    yield
    assert not list(job_store.FOLDERS.glob("*"))


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("container", "image.sif", "hpctrain submit"),
        ("stage_code", ".", "hpctrain submit"),
        ("stage_environment", "env.tar", "hpctrain submit"),
        ("stage_data", "images", "hpctrain submit"),
        ("elastic", True, "hpctrain submit"),
        ("array", "0-3", r"one submit\(\) for each index"),
        ("sweep", {"lr": [0.1, 0.2]}, r"kwargs=one"),
        ("command", "python x.py", "first argument"),
        ("launcher", "none", "hpctrain submit"),
    ],
)
def test_submitit_refuses_fields_it_lacks(no_job, field, value, instead):
    with pytest.raises(UsageError, match=instead) as caught:
        hpctrain.submit(train, JobSpec(**{field: value}))
    assert field in caught.value.found
    assert caught.value.code == "HT811"
    assert len(caught.value.fixes) == (2 if field in ("array", "sweep") else 1)


@pytest.mark.parametrize(
    ("call", "code", "found"),
    [
        (lambda: hpctrain.submit(3, JobSpec()), "HT813", r"submit\(3"),
        (lambda: hpctrain.submit(train, {"nodes": 2}), "HT813", "dict"),
        (lambda: hpctrain.submit(train, JobSpec(), args="ab"), "HT813", "args=.* with a str"),
        (lambda: hpctrain.submit("gone.py", JobSpec()), "HT805", "no file 'gone.py'"),
        (lambda: hpctrain.submit("gone.py", JobSpec(), kwargs={"lr": 1}), "HT813", "kwargs"),
        (
            lambda: hpctrain.submit(print, JobSpec(), args=[threading.Lock()]),
            "HT814",
            "cannot be sent",
        ),
    ],
)
def test_submit_function_wrong_calls(no_job, call, code, found):
    with pytest.raises(UsageError, match=found) as caught:
        call()
    assert caught.value.expected
    assert caught.value.code == code


def test_submit_function_checks_arguments(no_job):
    with pytest.raises(UsageError, match=r"train\(\) with .*'lr': 1"):
        hpctrain.submit(train, JobSpec(), kwargs={"lr": 1})


def test_submit_function_refuses_staged_python(no_job, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_SCRATCH", "/tmp/hpctrain-ada-7-0")
    monkeypatch.setattr("sys.executable", "/tmp/hpctrain-ada-7-0/environment/bin/python")
    with pytest.raises(UsageError, match="a temporary copy of this job") as caught:
        hpctrain.submit(train, JobSpec())
    assert caught.value.fixes == ("JobSpec(venv=…)", "JobSpec(conda=…)")


def test_submitit_refuses_percent_in_folder_name(monkeypatch, tmp_path):
    folder = tmp_path / "50%jobs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="without %j"):
        hpctrain.submit(train, JobSpec())
    assert not list(folder.glob("runs/.submitit/*"))


def test_submit_function_without_slurm_suggests_spawn(no_job, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match=r"hpctrain\.spawn"):
        hpctrain.submit(train, JobSpec())


def test_submit_function_refused_by_slurm_leaves_nothing(no_job, monkeypatch, tmp_path):
    for name, text in (("srun", ""), ("sbatch", "echo 'sbatch: error: no such thing' >&2; exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(StartError, match="no such thing"):
        hpctrain.submit(train, JobSpec())
