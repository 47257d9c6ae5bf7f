"""The notebooks of examples/, executed unchanged on a host of a real Slurm."""

import json

import notebooks
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


@pytest.fixture
def execute(cluster, tmp_path):
    """Return a function that executes a notebook, and returns the outputs of its cells."""

    def run(name):
        env = {**cluster.environ(), **notebooks.environ(tmp_path)}
        done = cluster.run(notebooks.command(name), cwd=tmp_path, env=env, timeout=600)
        assert done.returncode == 0, done.stderr
        return notebooks.outputs(tmp_path)

    return run


def test_notebook_submits_and_trains_on_slurm(execute, tmp_path):
    (samples,), job, accuracy, (figure,), (confusion,), log, row = execute("notebook")
    assert "Job(id='" in notebooks.text(job[0])
    assert all(one["data"]["image/png"] for one in (samples, figure, confusion))
    assert "of 360 test images are right" in notebooks.text(accuracy[0])
    assert float(notebooks.text(accuracy[0]).partition("%")[0]) > 80
    assert "top-1 " in notebooks.text(log[0])  # the end of the log
    assert "'top1'" in notebooks.text(row[0])
    (run,) = (tmp_path / "runs").glob("train-*")
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    assert json.loads((run / "run.json").read_text())["world"]["num_nodes"] == 2


def test_sweep_submits_a_job_for_each_setting(execute, tmp_path):
    execute("sweep")
    notebooks.check_sweep(tmp_path, "slurm")
