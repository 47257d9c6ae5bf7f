"""A run and its directory: files, resume, exit status, and refused directories."""

import json
import os
import random
import shutil
import time
from functools import partial
from pathlib import Path
from unittest import mock

import faults
import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, fit, images, session, small_model
from checkpoints import load_newest
from torch import nn

import hpctrain
from hpctrain.errors import ReplacedError, UsageError
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.exit_status import write_exit_status


def die_at_step(step):
    """Return a function that ends a rank after a step, as kill -9 does."""
    return lambda run: os._exit(9) if run.step - 1 == step else None


def train(die_at=None, seed=0, width=None, name=None, loads=(None, None), **options):
    """Train four epochs of four steps with a schedule; return the weights at the end."""
    with session(
        **{
            "global_batch": 12,
            "epochs": 4,
            "log_every": 2,
            "run_dir": "run",
            "seed": seed,
            **options,
        }
    ) as opened:
        model = small_model() if width is None else nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        model, optimizer = opened.prepare(
            model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        loader = opened.loader(images(50))
        steps, die = [], die_at_step(die_at)
        path, inside = loads
        if inside is False:
            opened.load_weights(model, path)
        with opened.run(state={"schedule": schedule}, name=name) as run:
            if inside:
                opened.load_weights(model, path)
            for epoch in run.epochs():
                for batch, targets in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(batch), targets)
                    opened.step(loss)
                    schedule.step()
                    run.log(loss=loss)
                    steps.append(run.step - 1)
                    die(run)
                run.log(top1=epoch / 10)
        return steps, torch.cat([p.detach().flatten().double() for p in model.parameters()])


def rows():
    return [
        {k: v for k, v in row.items() if k not in ("time", "samples_per_second", "data_wait")}
        for row in RunDirectory("run").rows()
    ]


def test_run_directory_contents():
    ranks.values(ranks.run(3, train))
    run = RunDirectory("run")
    identity = json.loads(run.identity.read_text())
    assert isinstance(identity["name"], str)
    assert set(identity["world"]) == set(hpctrain.World.__dataclass_fields__)
    (start,) = [json.loads(line) for line in run.starts.read_text().splitlines()]
    assert {"command", "options", "versions", "commit", "world"} <= set(start)
    training = [row for row in rows() if "loss" in row]
    assert [row["step"] for row in training] == list(range(2, 17, 2))
    assert all(set(row) == {"step", "epoch", "loss", "lr"} for row in training)
    assert [row["top1"] for row in rows() if "top1" in row] == [0.0, 0.1, 0.2, 0.3]
    assert all((run.logs / f"rank-{rank}.log").is_file() for rank in range(3))
    summary = json.loads(run.summary.read_text())
    assert (summary["status"], summary["step"]) == ("done", 16)
    assert summary["metrics"]["top1"] == 0.3
    assert run.steps() == [8, 12, 16]
    for folder in run.checkpoints.iterdir():
        assert {path.suffix for path in folder.iterdir()} == {".pt", ".bin", ".json"}


def mean_loss(global_batch):
    with session(
        global_batch=global_batch, batch_size=2, max_steps=1, log_every=1, run_dir="run"
    ) as opened:
        model = opened.prepare(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        opened.prepare(torch.optim.SGD(model.parameters(), 0.1))
        losses = []
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(opened.loader(images(50))):
                    loss = nn.functional.cross_entropy(model(batch), targets)
                    losses.append(loss.item())
                    opened.step(loss)
                    run.log(loss=loss, half=0.5)
        return losses


def test_logged_loss_is_the_mean_over_the_global_batch(run):
    seen = [loss for losses in ranks.values(run(3, mean_loss, 12)) for loss in losses]
    assert len(seen) == 6
    (row,) = RunDirectory("run").rows()
    assert row["loss"] == pytest.approx(sum(seen) / 6, rel=1e-12)
    assert row["half"] == 0.5


@pytest.mark.parametrize(
    ("size", "die_at"), [(1, 6), pytest.param(3, 1, marks=pytest.mark.slow), (3, 9)]
)
@HOROVOD_SLOW
def test_killed_run_resumes_at_its_checkpoint(run, size, die_at, tmp_path, monkeypatch):
    (tmp_path / "uninterrupted").mkdir()
    monkeypatch.chdir(tmp_path / "uninterrupted")
    options = {"checkpoint_every": 3, "precision": "fp64"}
    uninterrupted = ranks.values(run(size, partial(train, **options)))
    expected = rows()
    monkeypatch.chdir(tmp_path)
    assert all(
        isinstance(result, BaseException)
        for result in run(size, partial(train, **options, die_at=die_at))
    )
    resumed = ranks.values(run(size, partial(train, **options, resume=True)))
    # The last checkpoint may not have been written completely.
    done = [step for step in (0, 3, 4, 6, 8, 9) if step <= die_at][-2:]
    assert resumed[0][0][0] in done
    assert resumed[0][0] == list(range(resumed[0][0][0], 16))
    assert [{**row, "loss": 0} for row in rows()] == [{**row, "loss": 0} for row in expected]
    for row, wanted in zip(rows(), expected, strict=True):
        assert row.get("loss", 0) == pytest.approx(wanted.get("loss", 0), rel=1e-9)
    # With three ranks or more, torch sums in another order after a restart.
    assert torch.allclose(resumed[0][1], uninterrupted[0][1], rtol=1e-9, atol=0)
    if size == 1:
        assert torch.equal(resumed[0][1], uninterrupted[0][1])
    assert len(RunDirectory("run").starts.read_text().splitlines()) == 2


def draw_random_numbers(path, **options):
    """Return a random number of each step, in epochs of five steps."""
    with session(batch_size=4, run_dir=path, epochs=2, **options) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        drawn = []
        with opened.run() as run:
            for _ in run.epochs():
                for points in run.batches([torch.ones(4, 1)] * 5):
                    drawn.append(torch.rand(1).item())
                    opened.step(model(points).mean())
        return drawn


def test_resume_restores_random_numbers_inside_of_an_epoch(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    uninterrupted = draw_random_numbers("uninterrupted")
    assert (
        draw_random_numbers("cut", max_steps=3) + draw_random_numbers("cut", resume=True)
        == uninterrupted
    )
    assert len(set(uninterrupted)) == 10


def forward_in_order(wide, x):
    """Call the layers in another order than that of their definition."""
    return wide["last"](torch.relu(wide["first"](torch.relu(wide["middle"](x)))))


def train_wide(die_at=None, **options):
    with session(
        global_batch=12, epochs=2, run_dir="run", deterministic=True, precision="fp32", **options
    ) as opened:
        wide = nn.ModuleDict(
            {"first": nn.Linear(99, 77), "last": nn.Linear(77, 10), "middle": nn.Linear(64, 99)}
        )

        class Wide(nn.Module):
            """A model that changes its input, replaces a buffer, and draws random numbers."""

            def __init__(self):
                super().__init__()
                self.layers = wide
                self.register_buffer("mean", torch.zeros(1))

            def forward(self, x):
                x = x.sub_(0.1).flatten(1)
                self.mean = 0.9 * self.mean + x.mean()
                scores = forward_in_order(self.layers, x - self.mean)
                return {"scores": scores * (1 + random.random()), "nothing": None}

        model = Wide()
        model, _optimizer = opened.prepare(model, torch.optim.Adam(model.parameters(), 1e-3))
        loader = opened.loader(images(50))
        fit(opened, lambda batch: model(batch)["scores"], loader, die_at_step(die_at))
        return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("size", "options"),
    [(3, {}), (3, {"batch_size": 2}), pytest.param(4, {}, marks=pytest.mark.slow)],
    ids=["three", "three-accumulated", "four"],
)
@HOROVOD_SLOW
def test_resumed_run_is_bit_equal(run, size, options, tmp_path, monkeypatch):
    options = {**options, "checkpoint_every": 3}
    for folder in ("uninterrupted", "cut"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "uninterrupted")
    uninterrupted = ranks.values(run(size, partial(train_wide, **options)))
    monkeypatch.chdir(tmp_path / "cut")
    run(size, partial(train_wide, **options, die_at=4))
    committed = RunDirectory("run").steps()[-1]
    assert committed in (3, 4)
    resumed = ranks.values(run(size, partial(train_wide, **options, resume=True)))
    assert faults.started_at() == [0, committed]
    assert torch.equal(resumed[0], uninterrupted[0])


def train_with_incomplete_steps(die_at=None, **options):
    """Train with seven batches an epoch, of which two make a step."""
    with session(
        batch_size=4, accumulate=2, epochs=3, run_dir="run", precision="fp64", same_data=True,
        **options,
    ) as opened:  # fmt: skip
        model = opened.prepare(nn.Linear(3, 1))
        opened.prepare(torch.optim.SGD(model.parameters(), 0.1))
        batches = [torch.full((4, 3), float(n)) for n in range(7)]
        with opened.run() as run:
            for _ in run.epochs():
                for batch in run.batches(batches):
                    opened.step((model(batch) ** 2).mean() / 100)
                    die_at_step(die_at)(run)
        return run.step, model.state_dict()["weight"]


@HOROVOD_SLOW
def test_incomplete_accumulation_is_dropped_at_the_end_of_an_epoch(run, tmp_path, monkeypatch):
    (tmp_path / "uninterrupted").mkdir()
    monkeypatch.chdir(tmp_path / "uninterrupted")
    uninterrupted = ranks.values(run(2, train_with_incomplete_steps))
    monkeypatch.chdir(tmp_path)
    run(2, partial(train_with_incomplete_steps, die_at=4, checkpoint_every=1))
    committed = RunDirectory("run").steps()[-1]
    resumed = ranks.values(run(2, partial(train_with_incomplete_steps, resume=True)))
    assert faults.started_at() == [0, committed]
    assert resumed[0][0] == uninterrupted[0][0] == 9
    assert torch.equal(resumed[0][1], uninterrupted[0][1])
    assert (
        "1 micro-batches of an incomplete step are left out"
        in Path("run/logs/rank-0.log").read_text()
    )


def test_checkpoint_of_another_run_is_not_resumed():
    options = {"epochs": None}
    ranks.values(ranks.run(1, partial(train, max_steps=5, name="another", **options)))
    ranks.values(ranks.run(1, partial(train, max_steps=3, **options)))
    shutil.copytree("run/another/checkpoints/step-00000005", "run/checkpoints/step-00000005")
    Path("run/summary.json").unlink()
    options |= {"max_steps": 4, "resume": True}
    assert ranks.values(ranks.run(1, partial(train, **options)))[0][0] == [3]
    assert "step-00000005 belongs to another run" in Path("run/logs/rank-0.log").read_text()


def train_until_replaced():
    """Train until another start takes the directory over after a step."""
    with session(global_batch=12, max_steps=4000, run_dir="run", checkpoint_every=2) as opened:
        model = opened.prepare(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        opened.prepare(torch.optim.SGD(model.parameters(), 0.1))

        def take_over(run):
            if run.step == 3 and opened.is_main:
                lock = Path("run/.lock")
                lock.write_text(json.dumps(json.loads(lock.read_text()) | {"token": "x"}))
                Path("run/summary.json").write_text("of the other start")

        fit(opened, model, opened.loader(images(50)), take_over)


@HOROVOD_SLOW
def test_replaced_start_ends_on_all_ranks_and_writes_nothing(run):
    results = run(3, train_until_replaced)
    assert all(isinstance(result, ReplacedError) for result in results), results
    assert "fenced off" in results[2].found
    assert RunDirectory("run").steps() in ([], [2])
    assert Path("run/summary.json").read_text() == "of the other start"


def raise_error(run):
    raise ArithmeticError("of the script")


def crash_with_workers():
    with session(batch_size=4, epochs=1, run_dir="run", workers=2) as opened:
        model = opened.prepare(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        opened.prepare(torch.optim.SGD(model.parameters(), 0.1))
        loader = opened.loader(images(50), multiprocessing_context="forkserver")
        fit(opened, model, loader, raise_error)


@pytest.mark.slow
def test_failing_rank_does_not_wait_for_loader_workers():
    (result,) = ranks.run(1, crash_with_workers)
    assert isinstance(result, ArithmeticError)


def train_in_micro_batches(die_at=None, **options):
    with hpctrain.Session(
        global_batch=12,
        batch_size=3,
        epochs=2,
        run_dir="run",
        **{"precision": "fp64", "checkpoint_every": 3, "log_every": 1, **options},
    ) as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
        fit(opened, model, opened.loader(images(50)), die_at_step(die_at))
    return [(row["step"], row["loss"]) for row in RunDirectory("run").rows()]


@pytest.mark.parametrize("size", [1, 2])
def test_resume_with_another_world_size_needs_elastic(size, tmp_path, monkeypatch):
    (tmp_path / "uninterrupted").mkdir()
    monkeypatch.chdir(tmp_path / "uninterrupted")
    (expected,) = ranks.values(ranks.run(1, train_in_micro_batches))
    monkeypatch.chdir(tmp_path)
    ranks.run(4, partial(train_in_micro_batches, die_at=5))
    for result in ranks.run(size, partial(train_in_micro_batches, resume=True)):
        assert isinstance(result, UsageError), result
        assert f"has 4 ranks, but this launch has {size}" in result.found
        assert any("--elastic" in fix for fix in result.fixes)
    resumed = ranks.values(ranks.run(size, partial(train_in_micro_batches, elastic=True)))[0]
    assert faults.started_at()[-1] in (3, 4)
    assert [step for step, _ in resumed] == [step for step, _ in expected] == list(range(1, 9))
    assert [loss for _, loss in resumed] == pytest.approx([x for _, x in expected], rel=1e-9)


@pytest.mark.parametrize("size", [1, 2])
def test_first_row_after_a_resume_on_other_ranks_is_the_mean_of_all_its_steps(
    size, tmp_path, monkeypatch
):
    train = partial(train_in_micro_batches, log_every=8)
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    (whole,) = ranks.values(ranks.run(1, train))
    monkeypatch.chdir(tmp_path)
    ranks.run(4, partial(train, die_at=5))
    resumed = ranks.values(ranks.run(size, partial(train, elastic=True)))[0]
    assert faults.started_at()[-1] > 0
    assert [step for step, _ in resumed] == [step for step, _ in whole] == [8]
    assert [loss for _, loss in resumed] == pytest.approx([x for _, x in whole], rel=1e-9)


def test_resume_of_a_finished_run_changes_nothing():
    ended = ranks.values(ranks.run(3, train))
    before = Path("run/metrics.jsonl").read_bytes()
    again = ranks.values(ranks.run(3, partial(train, resume=True)))
    assert [steps for steps, _ in again] == [[]] * 3
    # What the script does behind its loop meets the weights of the end.
    for (_, weights), (_, known) in zip(again, ended, strict=True):
        assert torch.equal(weights, known)
    assert "run is finished" in Path("run/logs/rank-0.log").read_text()
    assert Path("run/metrics.jsonl").read_bytes() == before


def train_and_draw(resume=False):
    """Train; return a random number that the script draws behind its loop."""
    with session(batch_size=4, max_steps=3, resume=resume, run_dir="run") as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(opened.loader(images(240))):
                    opened.step(nn.functional.cross_entropy(model(batch), targets))
                    torch.rand(run.step)
        return torch.rand(1).item()


def test_random_numbers_behind_the_loop_of_a_finished_run_are_those_of_its_end():
    ended = ranks.values(ranks.run(3, train_and_draw))
    assert len(set(ended)) == 3
    assert ranks.values(ranks.run(3, train_and_draw, True)) == ended


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param({"epochs": 2}, {"epochs": 4}, marks=pytest.mark.slow),
        ({"max_steps": 6}, {"epochs": 4}),
        pytest.param({"max_steps": 6}, {}, marks=pytest.mark.slow),
    ],
)
def test_finished_run_resumes_to_a_later_end(first, then, tmp_path, monkeypatch):
    (tmp_path / "uninterrupted").mkdir()
    monkeypatch.chdir(tmp_path / "uninterrupted")
    uninterrupted = ranks.values(ranks.run(3, partial(train, deterministic=True)))
    expected = [row for row in rows() if "loss" in row]
    monkeypatch.chdir(tmp_path)
    ranks.values(ranks.run(3, partial(train, deterministic=True, **first)))
    again = partial(train, deterministic=True, resume=True, **then)
    more = ranks.values(ranks.run(3, again))
    end = first.get("max_steps", 8)
    assert [(steps[0], steps[-1]) for steps, _ in more] == [(end, 15)] * 3
    for (_, weights), (_, known) in zip(more, uninterrupted, strict=True):
        assert torch.equal(weights, known)
    assert [row for row in rows() if "loss" in row] == expected
    for options in (again, partial(train, resume=True, max_steps=7)):
        assert [steps for steps, _ in ranks.values(ranks.run(3, options))] == [[]] * 3


def stop_early(**options):
    """Leave the loop of epochs before its end; return the step."""
    with session(global_batch=12, run_dir="run", **options) as opened:
        model, _ = opened.prepare(model := small_model(), torch.optim.SGD(model.parameters(), 0.05))
        loader, steps_taken = opened.loader(images(50)), 0
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(loader):
                    opened.step(nn.functional.cross_entropy(model(batch), targets))
                    steps_taken += 1
                if steps_taken == 8:
                    break
        return run.step


def test_run_left_early_stays_finished_until_a_later_end():
    assert ranks.values(ranks.run(1, partial(stop_early, epochs=5))) == [8]
    assert ranks.values(ranks.run(1, partial(stop_early, epochs=5, resume=True))) == [8]
    assert ranks.values(ranks.run(1, partial(stop_early, epochs=6, resume=True))) == [16]


def read_the_last_step():
    """Train until the file of the last step has an estimate; return its content."""
    with session(global_batch=12, run_dir="run", epochs=1000) as opened:
        model, _ = opened.prepare(model := small_model(), torch.optim.SGD(model.parameters(), 0.05))
        lines = []
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(opened.loader(images(48))):
                    opened.step(nn.functional.cross_entropy(model(batch), targets))
                    time.sleep(0.01)
                    lines = run.directory.lines(run.directory.last_step) if opened.is_main else []
                    if done := opened.sum(any(line["left"] for line in lines)):
                        break
                if done:
                    break
    return lines


def test_newest_step_is_recorded_with_the_steps_of_the_run_and_the_time_to_its_end():
    (last,), *others = ranks.values(ranks.run(3, read_the_last_step))
    assert others == [[], []]
    assert last["end"] == 4000
    assert 0 < last["step"] < 4000
    assert last["left"] > (4000 - last["step"]) * 0.01


def test_resume_without_a_checkpoint_starts_at_step_0():
    results = ranks.values(ranks.run(2, partial(train, resume=True)))
    assert results[0][0] == list(range(16))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "already has a run"),
        ({"resume": True, "width": 1}, "a run with model"),
        ({"resume": True, "global_batch": 24}, "a global batch of 12"),
    ],
)
def test_run_directory_of_another_run_is_refused(options, words):
    ranks.values(ranks.run(1, partial(train, max_steps=5)))
    Path("run/summary.json").write_text('{"status": "stopped"}')
    before = {
        path: path.read_bytes()
        for path in Path("run").rglob("*")
        if path.is_file() and "logs" not in path.parts
    }
    for result in ranks.run(3, partial(train, **options)):
        assert isinstance(result, hpctrain.HpctrainError)
        assert result.exit_code == 2
        assert words in str(result)
    assert before == {path: path.read_bytes() for path in before}


def test_run_directory_with_other_files_is_refused():
    Path("run").mkdir()
    Path("run/thesis.tex").write_text("years")
    for result in ranks.run(2, train):
        assert isinstance(result, hpctrain.HpctrainError)
        assert "thesis.tex" in str(result)
    assert os.listdir("run") == ["thesis.tex"]


def run_without_end():
    with hpctrain.Session(global_batch=12, run_dir="run") as session, session.run() as run:
        next(run.epochs())


def test_run_without_epochs_or_max_steps_is_refused():
    (result,) = ranks.run(1, run_without_end)
    assert isinstance(result, hpctrain.HpctrainError)
    assert result.fixes == ("--epochs N", "--max-steps N")


def train_with_own_loader():
    with hpctrain.Session(
        batch_size=4, max_steps=7, precision="fp64", log_every=1, run_dir="run"
    ) as session:
        model = session.prepare(nn.Linear(3, 1))
        optimizer = session.prepare(torch.optim.SGD(model.parameters(), 0.1))
        batches = [{"x": torch.ones(4, 3), "names": ["a"]}] * 5
        steps = []
        with session.run() as run:
            for _ in run.epochs():
                for batch in run.batches(batches):
                    assert batch["x"].dtype == torch.float64
                    session.step(model(batch["x"]).mean(), optimizer)
                    steps.append(run.step)
                    if run.step == 4:
                        break
        return steps, run.step


def test_own_iterable_loader_and_break_in_an_epoch():
    assert ranks.values(ranks.run(1, train_with_own_loader)) == [([1, 2, 3, 4, 5, 6, 7], 7)]


def test_default_run_directory_has_job_id_or_date(monkeypatch):
    job = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    named = partial(train, run_dir=None, name="example")
    ranks.values(ranks.run(2, named, env=job))
    ranks.values(ranks.run(2, named))
    ranks.values(ranks.run(2, named, env={"HPCTRAIN_RUN_DIR": "set"}))
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names[1] == "example-70_3" or names[0] == "example-70_3"
    assert sum(name.startswith("example-20") for name in names) == 1
    assert Path("set/example/run.json").is_file()


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"SLURM_JOB_ID": "78"}, {"SLURM_RESTART_COUNT": "1"}),
        ({"HPCTRAIN_RUN_DIR": "run", "HPCTRAIN_START": "5f/0"}, {"HPCTRAIN_START": "5f/1"}),
        ({"HPCTRAIN_RUN_DIR": "run"}, {"TORCHELASTIC_RESTART_COUNT": "1"}),
    ],
    ids=["requeued job", "second attempt", "restart by torchrun"],
)
def test_next_start_by_a_launcher_resumes_without_option(first, again):
    starts = partial(train, run_dir=None, checkpoint_every=2)
    results = ranks.run(2, partial(starts, die_at=7), env=first)
    assert all(isinstance(result, BaseException) for result in results)
    assert ranks.values(ranks.run(2, starts, env={**first, **again}))[0][0][0] in (4, 6)
    if "HPCTRAIN_START" in first:
        later = ranks.run(2, starts, env={**first, "HPCTRAIN_START": "60/0"})
        assert all("--resume" in str(result) for result in later)


def close_with_slow_write():
    """Close a session; return whether the exit status file exists then."""
    with mock.patch(
        "hpctrain.training.session.write_exit_status",
        lambda *exit_status: time.sleep(0.5) or write_exit_status(*exit_status),
    ):
        hpctrain.Session(global_batch=3).close()
    return os.path.exists(os.environ["HPCTRAIN_EXIT_STATUS_FILE"])


def test_exit_status_file_is_written_before_any_rank_leaves(tmp_path):
    env = {"HPCTRAIN_EXIT_STATUS_FILE": str(tmp_path / "exit-status")}
    assert ranks.values(ranks.run(3, close_with_slow_write, env=env)) == [True] * 3


def test_exit_status_file_has_code_and_reason(tmp_path):
    env = {"HPCTRAIN_EXIT_STATUS_FILE": str(tmp_path / "exit-status")}
    ranks.values(ranks.run(3, train, env=env))
    assert json.loads((tmp_path / "exit-status").read_text())["code"] == 0
    (tmp_path / "exit-status").unlink()
    ranks.run(3, train, env=env)
    exit_status = json.loads((tmp_path / "exit-status").read_text())
    assert exit_status["code"] == 2
    assert "already has a run" in exit_status["reason"]


def break_at_step_3():
    with hpctrain.Session(global_batch=12, epochs=3, log_every=1, run_dir="run") as session:
        model = session.prepare(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        optimizer = session.prepare(torch.optim.SGD(model.parameters(), 0.1))
        loader = session.loader(images(50))
        with session.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(batch), targets)
                    session.step(loss, optimizer)
                    run.log(loss=loss)
                    if run.step == 3:
                        break
                break


def test_break_out_of_training_keeps_the_last_step():
    ranks.values(ranks.run(3, break_at_step_3))
    assert [row["step"] for row in rows()] == [1, 2, 3]
    assert RunDirectory("run").steps() == [3]
    assert json.loads(Path("run/summary.json").read_text())["step"] == 3


def call_batches_twice():
    with (
        hpctrain.Session(global_batch=12, epochs=1, run_dir="run") as session,
        session.run() as run,
    ):
        loader = session.loader(images(50))
        for _ in run.epochs():
            for _ in range(2):
                for _ in run.batches(loader):
                    pass


def test_second_batches_in_an_epoch_is_refused():
    (result,) = ranks.run(1, call_batches_twice)
    assert "run.batches() is called for the second time in epoch 1" in str(result)


class UnloadableState:
    def state_dict(self):
        return {"best": Path("not plain")}

    def load_state_dict(self, state):
        raise AssertionError("never loaded")


def save_unloadable_state():
    with (
        hpctrain.Session(global_batch=12, epochs=1, run_dir="run") as session,
        session.run(state={"part": UnloadableState()}) as run,
    ):
        run.save()


def test_unloadable_state_is_refused_at_save():
    (result,) = ranks.run(1, save_unloadable_state)
    assert isinstance(result, hpctrain.HpctrainError)
    assert "'state'" in str(result)
    assert RunDirectory("run").steps() == []


def resume_without_shared_checkpoints():
    if hpctrain.detect().rank == 2:
        from hpctrain import checkpoint

        checkpoint.places = lambda _: {}  # a host without the shared file system
    return train(resume=True)


def test_ranks_that_find_different_checkpoints_are_refused():
    ranks.run(3, partial(train, die_at=7, checkpoint_every=2))
    for result in ranks.run(3, resume_without_shared_checkpoints):
        assert isinstance(result, hpctrain.HpctrainError)
        assert "1 of 3 ranks do not find" in str(result)


def save_a_state_of_rank_0():
    """Save, where rank 0 alone has tensors of two types that share memory."""
    weight = torch.ones(3)
    things = [weight, weight.view(torch.int32)] if hpctrain.detect().rank == 0 else [weight]
    with session(batch_size=4, epochs=1, run_dir="run") as opened:
        model = opened.prepare(nn.Linear(2, 2))
        with opened.run(state={"things": Things(things)}) as run:
            run.save()
        del model


class Things:
    def __init__(self, things):
        self.things = things

    def state_dict(self):
        return {"things": self.things}

    def load_state_dict(self, state):
        self.things = state["things"]


def test_state_that_rank_0_cannot_save_ends_all_ranks():
    for result in ranks.run(3, save_a_state_of_rank_0, timeout=60):
        assert isinstance(result, hpctrain.HpctrainError)
        assert "different types that share memory" in str(result)


def test_checkpoint_keeps_the_versions_of_modules():
    ranks.values(ranks.run(2, train, None))
    _, state = load_newest(RunDirectory("run"))
    assert state["model"][0]._metadata["1"] == {"version": 2}  # of batch norm


def resume_with_a_damage_that_rank_2_reads(damaged):
    if hpctrain.detect().rank == 2:
        from hpctrain import checkpoint
        from hpctrain.errors import CheckpointError

        real = checkpoint.open_checkpoint

        def refuse(folder, step, *arguments, **keywords):
            if step == damaged:
                raise CheckpointError.of_text("HT707", "rank-00002.bin has changed")
            return real(folder, step, *arguments, **keywords)

        checkpoint.open_checkpoint = refuse
    return train(resume=True)


def test_damage_that_one_rank_reads_is_for_all_ranks():
    ranks.run(3, partial(train, die_at=7, checkpoint_every=2))
    *_, before, newest = RunDirectory("run").steps()
    results = ranks.values(ranks.run(3, resume_with_a_damage_that_rank_2_reads, newest))
    assert [steps[0] for steps, _ in results] == [before] * 3
    assert all(torch.equal(weights, results[0][1]) for _, weights in results)


@pytest.mark.parametrize("inside", [False, True], ids=str)
def test_resumed_run_has_the_weights_of_its_checkpoint(tmp_path, inside):
    """Weights may be loaded before the run or inside of it."""
    path = str(tmp_path / "weights.pt")
    torch.manual_seed(7)  # an earlier test in this process may have set the seed of `train`
    torch.save(small_model().state_dict(), path)
    resumes = partial(train, resume=True, loads=(path, inside))
    ((_, uninterrupted),) = ranks.values(ranks.run(1, resumes))
    shutil.rmtree("run")
    ranks.run(1, resumes, 10)
    ((steps, resumed),) = ranks.values(ranks.run(1, resumes))
    assert steps[0] in (4, 8)
    assert torch.equal(resumed, uninterrupted)
    shutil.rmtree("run")
    ((_, without),) = ranks.values(ranks.run(1, train))
    assert not torch.equal(without, uninterrupted)
