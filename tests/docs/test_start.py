"""The commands of docs/start.md, in their order."""

import json
import os

import launches
import pages
import pytest

pytestmark = pytest.mark.e2e

PAGE = (launches.TOP / "docs" / "start.md").read_text()
LAPTOP, CLUSTER = PAGE.split("## On a cluster")
PATH = f"{launches.BIN}:{os.environ['PATH']}"


def commands(text):
    """Return the lines of the blocks, without those that install."""
    lines = [line for block in pages.blocks_in(text, "bash") for line in pages.commands(block)]
    return [line for line in lines if line.startswith("hpctrain ")]


@pytest.mark.slow
def test_start_page_trains_and_resumes_on_a_laptop(tmp_path):
    train, resume, doctor = commands(LAPTOP)
    (tmp_path / "examples").symlink_to(launches.TOP / "examples")
    run, ends = tmp_path / "runs" / "first", []
    for command in (train, resume):
        done = launches.start(["bash", "-c", command], tmp_path, PATH=PATH)
        assert done.returncode == 0, done.stderr
        ends.append(json.loads((run / "summary.json").read_text())["step"])
    assert ends[1] == 2 * ends[0]
    starts = [json.loads(line)["step"] for line in (run / "starts.jsonl").read_text().splitlines()]
    assert starts == [0, ends[0]]
    done = launches.start(["bash", "-c", doctor], tmp_path, PATH=PATH)
    assert "python" in done.stdout


@pytest.mark.slow
def test_start_page_submits_and_follows_a_job_on_a_cluster(cluster, tmp_path):
    checkout = launches.checkout(tmp_path)
    env, job = launches.on_cluster(cluster), ""
    try:
        for command in commands(CLUSTER):
            line = command.replace("JOB", job)
            done = cluster.run(["bash", "-c", line], cwd=checkout, env=env, timeout=600)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            if "submit --follow" in command:
                job = done.stdout.strip()
        (run,) = (checkout / "runs").glob(f"mnist-{job}")
        assert json.loads((run / "summary.json").read_text())["status"] == "done"
    finally:
        cluster.clear()
