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
    ("field", "value"),
    [
        ("container", "image.sif"),
        ("stage_code", "."),
        ("stage_environment", "env.tar"),
        ("stage_data", "images"),
        ("elastic", True),
        ("array", "0-3"),
        ("sweep", {"lr": [0.1, 0.2]}),
        ("command", "python x.py"),
        ("launcher", "none"),
    ],
)
def test_submitit_refuses_fields_it_lacks(no_job, field, value):
    with pytest.raises(UsageError, match="hpctrain submit -- ") as caught:
        hpctrain.submit(train, JobSpec(**{field: value}))
    assert field in caught.value.found
    assert caught.value.code == "HT811"


@pytest.mark.parametrize(
    ("call", "code", "found"),
    [
        (lambda: hpctrain.submit(3, JobSpec()), "HT813", r"submit\(3"),
        (lambda: hpctrain.submit(train, {"nodes": 2}), "HT813", "dict"),
        (lambda: hpctrain.submit(train, JobSpec(), args="ab"), "HT813", "args='ab'"),
        (lambda: hpctrain.submit("gone.py", JobSpec()), "HT805", "script 'gone.py' does not exist"),
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
