"""The commands and the batch scripts of the guides that need Slurm, on a real one."""

import importlib.util
import json
import re

import guides
import launches
import pages
import pytest
from processes import until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ON_SLURM = guides.runnable(slurm=True)
# What fits on four hosts of eight cores without a GPU, for what the pages ask for.
SIZES = (
    (r"(gpus.per.node ?[= ] ?)[14]", r"\g<1>0"),
    (r"((ntasks|tasks|cpus).per.(node|task) ?[= ] ?)[48]", r"\g<1>1"),
    (r"(nodes[= ])[58]", r"\g<1>4"),
    (r"-n ?8", "-n 2"),
    (r"-N ?4", "-N 2"),
    (r"2%2", "0"),  # one task of an array
    (r"\b20h|20:00:00", "30:00"),
)


def sized(text):
    for pattern, size in SIZES:
        text = re.sub(pattern, size, text)
    return text


def scripts():
    """Yield the batch scripts of the pages, and the lines that are said to stand in one."""
    for page in guides.GUIDES:
        found = [block.text for block in pages.blocks(page, "bash") if pages.is_script(block)]
        found += [
            f"#!/bin/bash\n#SBATCH --nodes=2 --no-kill\n{command}\n"
            for command in ON_SLURM.get(page, ())
            if command.startswith("exec ")
        ]
        for number, text in enumerate(found):
            yield pytest.param(text, id=f"{page}-{number}")


@pytest.fixture
def checkout(cluster, tmp_path):
    """Return a folder with what the pages speak of, for this Slurm; cancel its jobs at the end."""
    guides.prepare(tmp_path)
    for name in ("train.sh", "job.toml"):
        (tmp_path / name).write_text(sized((tmp_path / name).read_text()))
    yield tmp_path
    cluster.clear()


@pytest.fixture
def parts(request, lacking):
    text = str(request.node.callspec.params.values())
    if "horovod" in text and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("script", list(scripts()))
def test_batch_scripts_of_the_guides_train(script, cluster, checkout):
    (checkout / "script.sh").write_text(sized(script))
    job, code = cluster.batch(
        ["--job-name=train", "--output=out", "script.sh"],
        seconds=600,
        cwd=checkout,
        env=launches.on_cluster(cluster),
    )
    assert code == 0, (checkout / "out").read_text()
    (run,) = (checkout / "runs").iterdir()
    assert job in run.name
    assert json.loads((run / "summary.json").read_text())["status"] == "done"


def train_for_long(cluster, checkout, env):
    """Submit a job, and return its number when its run is there."""
    command = ["sbatch", "--parsable", "train.sh", "--epochs", "1000000"]
    job = cluster.run(command, cwd=checkout, env=env).stdout.strip()
    until((checkout / "runs" / f"train-{job}" / "run.json").exists)
    return job


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("page", ON_SLURM)
def test_commands_of_a_guide_work_on_slurm(page, cluster, checkout):
    env, job = launches.on_cluster(cluster), ""
    for command in ON_SLURM[page]:
        if command.startswith("exec "):
            continue
        if command.startswith("hpctrain cancel"):
            job = train_for_long(cluster, checkout, env)
        if "4711" in command and not job:
            job, _ = cluster.batch(["train.sh"], seconds=600, cwd=checkout, env=env)
        line = sized(guides.small(command)).replace("4711", job)
        # Other tests run the scripts of sbatch/. The hosts have eight cores.
        line = re.sub(r"^sbatch (.*sbatch/)", r"sbatch --test-only --cpus-per-task=2 \1", line)
        done = cluster.run(["bash", "-c", line], cwd=checkout, env=env, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        if submitted := re.match(r"(?:Submitted batch job )?(\d+)$", done.stdout):
            job = submitted[1]
