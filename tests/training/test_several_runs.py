"""Several runs of one script, such as the folds of a cross-validation: a directory for each."""

import json
import os
import sys
from pathlib import Path

import launches
import pytest

from hpctrain.jobs import job_facts, job_watching
from hpctrain.rundir import RunDirectory

# It trains three folds, and dies once at the end of a step, given as "fold step".
FOLDS = """
import os, sys, torch, hpctrain

named = sys.argv.pop(1) == "named"
dies = tuple(map(int, os.environ.get("DIES", "").split()))
mark = os.path.abspath("died")
args = hpctrain.options().parse_args()
for fold in range(3):
    with hpctrain.Session(args, epochs=2, deterministic=True, checkpoint_every=1) as session:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = session.prepare(model, optimizer)
        data = torch.randn(12, 4, generator=torch.Generator().manual_seed(fold))
        loader = torch.utils.data.DataLoader(data, 12 // 3)
        steps = 0
        with session.run(name=f"fold-{fold}" if named else None) as run:
            for _ in run.epochs():
                for x in run.batches(loader):
                    session.step((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
                    run.log(fold=fold)
                    steps += 1
                    if (fold, run.step) == dies and not os.path.exists(mark):
                        open(mark, "w").close()
                        os._exit(9)
                    if (fold, run.step) == tuple(map(int, os.environ.get("STOPS", "").split())):
                        open(f"{os.environ['BASE']}/stop", "w").close()
        session.print("RESULT", fold, steps, run.step, model.weight.flatten().tolist())
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the folds in a process of its own."""
    script = tmp_path / "folds.py"
    script.write_text(FOLDS)

    def begin(*words, launcher=(), **more):
        python = [] if launcher else [sys.executable]
        return launches.start([*python, *launcher, str(script), *words], tmp_path, **more)

    return begin


def results(done):
    """Return fold, steps of this start, step of the run and weights of each result."""
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT" in line]
    return [
        (*map(int, numbers.split()), json.loads("[" + weights))
        for numbers, _, weights in (line.partition(" [") for line in lines)
    ]


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_second_run_in_one_directory_is_refused_with_the_name_to_give(start, resume):
    done = start("plain", "--run-dir", "base", *resume)
    assert done.returncode == 2
    assert [fold for fold, *_ in results(done)] == [0]
    assert "base has the run of an earlier session.run() of this script" in done.stderr
    assert 'fix:      session.run(name=f"fold-{k}"), for a run in base/fold-0' in done.stderr


def test_named_runs_have_a_directory_each_and_a_resume_finds_each(start, tmp_path):
    expected = results(start("named", "--run-dir", "whole"))
    assert [(fold, steps, at) for fold, steps, at, _ in expected] == [(n, 6, 6) for n in range(3)]
    assert len({tuple(weights) for *_, weights in expected}) == 3
    died = start("named", "--run-dir", "base", DIES="1 4")
    assert died.returncode == 9
    again = results(start("named", "--run-dir", "base", "--resume"))
    assert [(fold, steps, at) for fold, steps, at, _ in again] == [(0, 0, 6), (1, 3, 6), (2, 6, 6)]
    assert [weights for *_, weights in again] == [weights for *_, weights in expected]
    base = RunDirectory(tmp_path / "base")
    assert [run.path.name for run in base.runs()] == ["fold-0", "fold-1", "fold-2"]
    assert base.current().path.name == "fold-2"
    assert base.furthest() == 18


def test_restart_by_torchrun_continues_the_fold_that_failed(start):
    expected = results(start("named", "--run-dir", "whole"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    done = start(
        "named", "--run-dir", "base", launcher=[*torchrun, "--max-restarts", "1"], DIES="1 4"
    )
    assert done.returncode == 0, done.stderr
    last = results(done)[-3:]
    assert [(fold, steps) for fold, steps, *_ in last] == [(0, 0), (1, 3), (2, 6)]
    assert [weights for *_, weights in last] == [weights for *_, weights in expected]


def test_stop_file_of_the_directory_stops_the_named_run_that_trains(start, tmp_path):
    done = start("named", "--run-dir", "base", STOPS="1 2", BASE="base")
    assert done.returncode == 75, done.stderr
    assert [fold for fold, *_ in results(done)] == [0]
    assert not (tmp_path / "base/stop").exists()
    found = job_facts.progress(tmp_path / "base")
    assert found.status == "stopped"
    assert found.step == RunDirectory(tmp_path / "base/fold-1").steps()[-1]
    again = results(start("named", "--run-dir", "base", "--resume"))
    assert [at for _, _, at, _ in again] == [6, 6, 6]


def test_tools_read_the_runs_of_a_directory(start, tmp_path):
    start("named", "--run-dir", "base")
    assert job_watching.curves(tmp_path / "base")["fold"][1][-1] == 2
    status = launches.start([sys.executable, "-m", "hpctrain", "status", "base"], tmp_path)
    assert "base/fold-2" in status.stdout
    report = launches.start([sys.executable, "-m", "hpctrain", "report", "base"], tmp_path)
    assert report.returncode == 0, report.stderr
    export = [sys.executable, "-m", "hpctrain", "export"]
    several = launches.start([*export, "base", "weights.safetensors"], tmp_path)
    assert several.returncode == 2
    assert "base has several runs: fold-0, fold-1, fold-2" in several.stderr
    one = launches.start([*export, "base/fold-1", "weights.safetensors"], tmp_path)
    assert one.returncode == 0, one.stderr


def test_run_with_a_name_that_an_earlier_version_kept_in_the_directory_itself_resumes(
    start, tmp_path
):
    start("named", "--run-dir", "base", DIES="0 4")
    base = tmp_path / "base"
    os.rename(base / "fold-0", tmp_path / "moved")
    base.rmdir()
    os.rename(tmp_path / "moved", base)
    record = json.loads((base / "run.json").read_text())
    del record["in_folder_of_name"]
    (base / "run.json").write_text(json.dumps(record))
    again = results(start("named", "--run-dir", "base", "--resume"))
    assert [(fold, steps) for fold, steps, *_ in again] == [(0, 3), (1, 6), (2, 6)]
    assert not Path(base, "fold-0").exists()


def test_name_that_is_no_folder_is_refused(start, tmp_path):
    script = tmp_path / "folds.py"
    script.write_text(FOLDS.replace('f"fold-{fold}"', 'f"lr/{fold}"'))
    done = start("named", "--run-dir", "base")
    assert done.returncode == 2
    assert "session.run(name='lr-0')" in done.stderr
