"""Check of a host before its ranks start."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from hpctrain.launch import preflight

HERE = Path()


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Return a function that makes an `nvidia-smi`, and the environment of a job with two GPUs."""
    monkeypatch.setattr(preflight, "_SECONDS_FOR_GPUS", 0.5)

    def make(text):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        return {"PATH": path, "SLURM_GPUS_ON_NODE": "2"}

    return make


def test_host_that_can_train():
    assert preflight.check(HERE, dict(os.environ)) == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo 'GPU 0: A100'; echo 'GPU 1: A100'", ""),
        ("echo 'GPU 0: A100'", "1 of the 2 GPUs of the job"),
        ("echo 'No devices were found' >&2; exit 6", "nvidia-smi: No devices were found"),
        ("exec sleep 60", "the driver of the GPUs does not answer: nvidia-smi: no answer within"),
    ],
)
def test_gpus_of_the_job(driver, text, found):
    seen = preflight.check(HERE, driver(text))
    assert seen.startswith(found)
    assert bool(seen) == bool(found)


def test_job_without_gpus_asks_no_driver(driver):
    env = driver("exit 1")
    assert preflight.check(HERE, {**env, "SLURM_GPUS_ON_NODE": ""}) == ""
    assert preflight.check(HERE, {**env, "PATH": "/none"}) == ""  # GPUs of another maker


def test_shared_folder_that_is_not_mounted():
    assert preflight.check(HERE / "none", {}) == "none cannot be written: No such file or directory"


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (errno.ENOSPC, ""),
        (errno.EDQUOT, ""),
        (errno.EROFS, ". cannot be written: Read-only file system"),
    ],
)
def test_full_shared_folder_is_not_the_fault_of_a_host(monkeypatch, number, found):
    real = tempfile.TemporaryFile

    def full(dir):
        if dir == str(HERE):
            raise OSError(number, os.strerror(number))
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert preflight.check(HERE, {}) == found


def test_little_memory_room_and_a_wrong_result(monkeypatch):
    monkeypatch.setattr(preflight, "_LEAST_MEMORY", 1 << 60)
    assert preflight.check(HERE, {}).endswith(" MiB of memory are free")
    monkeypatch.setattr(preflight, "_LEAST_MEMORY", 0)
    monkeypatch.setattr(preflight, "_LEAST_DISK", 1 << 60)
    assert " MiB are free in " in preflight.check(HERE, {})
    monkeypatch.setattr(preflight, "_LEAST_DISK", 0)
    monkeypatch.setattr(preflight, "_DIGEST", "0")
    assert preflight.check(HERE, {}).startswith("the processor computes ")
