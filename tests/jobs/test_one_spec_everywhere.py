"""One JobSpec by every way to submit it: the losses equal those of one process."""

import contextlib
import importlib.util
import io
import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import launches
import pytest
import ranks

from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec

# FACTOR is a variable of the job: without it, every loss is wrong.
TRAIN = """
import os
import torch
import hpctrain

args = hpctrain.options().parse_args()
draw = torch.Generator().manual_seed(1)
inputs = torch.randn(96, 5, generator=draw, dtype=torch.float64)
targets = inputs.sum(1, keepdim=True).sin()
with hpctrain.Session(args) as session:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    loader = session.loader(torch.utils.data.TensorDataset(inputs, targets))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
    with session.run() as run:
        for epoch in run.epochs():
            for x, y in run.batches(loader):
                loss = torch.nn.functional.mse_loss(model(x), y) * float(os.environ["FACTOR"])
                session.step(loss)
                run.log(loss=loss)
"""
OPTIONS = (
    *("--precision", "fp64", "--global-batch", "12", "--epochs", "2", "--log-every", "1"),
    *("--workers", "0"),
)
SIZE = 3
SPEC = JobSpec(
    name="same", command=["python", "train.py", *OPTIONS], tasks_per_node=SIZE, cpus_per_task=1,
    time="5m", environment={"FACTOR": "0.75", "OMP_NUM_THREADS": "1"},
)  # fmt: skip
PATH = f"{launches.BIN}:{os.environ['PATH']}"


@pytest.fixture
def one_process(tmp_path):
    """Return the losses of `python train.py` in one process."""
    Path("train.py").write_text(TRAIN)
    run = str(tmp_path / "alone")
    ranks.values(
        ranks.run(
            1, run_script, ["train.py", *OPTIONS, "--run-dir", run], env=dict(SPEC.environment)
        )
    )
    losses = launches.losses(run)
    assert len(losses) == 16
    assert losses[-1] < losses[0]
    return losses


def run_script(argv):
    sys.argv = argv
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(argv[0], run_name="__main__")


def check_run(losses, run, launcher, size=SIZE):
    """Check the losses of a run against one process, its launcher and its world size."""
    world = json.loads(Path(run, "run.json").read_text())["world"]
    assert (world["launcher"], world["world_size"]) == (launcher, size)
    assert launches.losses(run) == pytest.approx(losses, rel=1e-9)


def environ(cluster):
    """Return an environment with this cluster, this Python, and no user settings."""
    return launches.on_cluster(cluster, HOME=os.getcwd())


def submit_by_sbatch(cluster, **more):
    """Submit the rendered script; return its run directory."""
    script = render(replace(SPEC, run_dir="run", **more))
    done = cluster.run(["sbatch", "--parsable"], input=script, env=environ(cluster))
    job, code = cluster.ended(done.stdout.strip())
    assert code == 0, Path(f"same-{job}.log").read_text()
    return "run"


NOTEBOOK = """
import nbclient, nbformat
cell = nbformat.v4.new_code_cell('''
from hpctrain import JobSpec, submit
job = submit("train.py", JobSpec(**{fields}), args={options})
job.result()
''')
notebook = nbformat.v4.new_notebook(cells=[cell])
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
"""


def submit_by_notebook(cluster):
    """Submit from a notebook; return its run directory."""
    fields = {
        name: getattr(SPEC, name)
        for name in ("name", "tasks_per_node", "cpus_per_task", "time", "environment")
    } | {"run_dir": "run"}
    done = cluster.run(
        [launches.PYTHON, "-c", NOTEBOOK.format(fields=fields, options=OPTIONS)],
        env={**environ(cluster), "IPYTHONDIR": os.getcwd()},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return "run"


WAYS = {
    "sbatch": (submit_by_sbatch, {}, "hpctrain"),
    "srun": (submit_by_sbatch, {"launcher": "srun"}, "slurm"),
    "horovod": (
        submit_by_sbatch,
        {"command": [*SPEC.command, "--backend", "horovod"]},
        "hpctrain",
    ),
    "notebook": (submit_by_notebook, {}, "slurm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_job_spec_on_slurm_has_losses_of_one_process(cluster, one_process, way, lacking):
    if way == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    submit, more, launcher = WAYS[way]
    check_run(one_process, submit(cluster, **more), launcher)
