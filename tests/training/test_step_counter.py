"""The step counter: steps of optimizers, and rows of metrics at the right steps."""

import json
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from battery import images, session, small_model
from torch import nn

from hpctrain.rundir import RunDirectory

LOSS = nn.functional.cross_entropy


def train(body, count=96, **options):
    """Train with a body of the loop; return its results, rank 0's rows, checkpoints and step."""
    options = {"global_batch": 12, "max_steps": 8, "run_dir": "run", "seed": 2, **options}
    with session(**options) as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        loader = opened.loader(images(count))
        seen = []
        with opened.run() as run:
            for _ in run.epochs():
                for number, (batch, targets) in enumerate(run.batches(loader)):
                    loss = partial(loss_of, model, batch, targets)
                    seen.append(body(opened, run, number, loss))
        directory = run.directory
        return seen, directory.rows(), directory.steps(), run.step


def loss_of(model, batch, targets):
    return LOSS(model(batch), targets)


def step_and_skip(opened, run, number, loss):
    if number % 3 == 1:
        return None
    opened.step(loss())
    return run.step


@pytest.mark.parametrize("size", [1, 3])
def test_skipped_batch_is_not_a_step(size):
    for seen, _, _, step in ranks.values(ranks.run(size, train, step_and_skip, 300)):
        taken = [one for one in seen if one is not None]
        assert taken == list(range(1, 9))
        assert len(seen) == 12
        assert step == 8


def test_skipped_micro_batch_does_not_shift_the_next_step():
    options = {"global_batch": 12, "batch_size": 4, "max_steps": 4, "checkpoint_every": 1}
    seen, _, checkpoints, step = train(step_and_skip, 200, **options, keep_checkpoints=9)
    # Three micro-batches that are not skipped make a step.
    assert [one for one in seen if one is not None] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert (step, checkpoints[-4:]) == (4, [1, 2, 3, 4])


def train_and_resume(body, at, **options):
    """Return the results of an uninterrupted run, and of one resumed at a checkpoint."""
    uninterrupted = train(body, run_dir="uninterrupted", **options)
    train(body, run_dir="cut", **{**options, "max_steps": at})
    rest = train(body, run_dir="cut", resume=True, **options)
    return uninterrupted, rest


def rows(found):
    """Return rows without the values that depend on time."""
    times = {"time", "samples_per_second", "data_wait"}
    return [{k: v for k, v in row.items() if k not in times} for row in found]


def skip_once_and_log(opened, run, number, loss):
    if run.step == 3 and not Path(f"{run.directory.path}.skipped").exists():
        Path(f"{run.directory.path}.skipped").touch()
        return
    value = loss()
    opened.step(value)
    run.log(loss=value)
    return


def test_resumed_run_continues_after_skipped_batches():
    uninterrupted, rest = train_and_resume(
        skip_once_and_log, 5, log_every=1, checkpoint_every=1, deterministic=True, max_steps=7
    )
    assert rows(rest[1]) == rows(uninterrupted[1])


def step_manually(opened, run, number, loss):
    """Call backward and step without the session; two micro-batches make a step."""
    (0.5 * loss()).backward()
    if number % 2:
        opened.optimizers[0].step()
        opened.optimizers[0].zero_grad()
    return run.step


def test_manual_optimizer_steps_are_counted():
    seen, _, _, step = train(step_manually, 300)
    assert seen == [n // 2 for n in range(1, 17)]
    assert step == 8


def log_metrics(opened, run, number, loss):
    value = loss()
    opened.step(value)
    run.log(loss=run.step)
    if run.step in (3, 4, 6):
        run.log(eval_loss=10 * run.step, top1=0.5)
    return value.item()


@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_means_and_occasional_metrics_have_their_own_row(size):
    _, found, _, _ = ranks.values(ranks.run(size, train, log_metrics))[0]
    # With --log-every 10, the end of the run ends the row.
    assert rows(found) == [
        {"step": 3, "epoch": 0, "eval_loss": 30.0, "top1": 0.5},
        {"step": 4, "epoch": 0, "eval_loss": 40.0, "top1": 0.5},
        {"step": 6, "epoch": 0, "eval_loss": 60.0, "top1": 0.5},
        {"step": 8, "epoch": 0, "loss": 4.5},
    ]


def log_rows_of_4(opened, run, number, loss):
    opened.step(loss())
    run.log(loss=run.step)
    if run.step % 4 == 1:
        run.log(first=run.step)


def test_names_logged_only_at_the_first_step_of_a_row():
    _, found, _, _ = train(log_rows_of_4, log_every=4)
    assert [(row["step"], row.get("loss"), row.get("first")) for row in found] == [
        (1, None, 1.0),
        (4, 2.5, None),
        (5, None, 5.0),
        (8, 6.5, None),
    ]


@pytest.mark.parametrize("size", [1, 3])
def test_resumed_run_has_the_rows_of_an_uninterrupted_one(size):
    found = ranks.values(ranks.run(size, rows_with_and_without_resume))
    uninterrupted, rest = found[0]
    assert rows(rest) == rows(uninterrupted)


def rows_with_and_without_resume():
    uninterrupted, rest = train_and_resume(
        log_loss, 5, log_every=4, deterministic=True, checkpoint_every=5
    )
    return uninterrupted[1], rest[1]


def log_loss(opened, run, number, loss):
    value = loss()
    opened.step(value)
    run.log(loss=value)


def save_at_step_5(opened, run, number, loss):
    opened.step(loss())
    if run.step == 5:
        run.log(top1=0.75)
        run.save()
    return


@pytest.mark.parametrize("size", [1, 3])
def test_save_inside_of_an_epoch(size):
    ranks.values(ranks.run(size, train, save_at_step_5))
    directory = RunDirectory("run")
    assert directory.steps() == [5, 8]
    manifest = json.loads((directory.checkpoint(5) / "manifest.json").read_text())
    assert manifest["metrics"] == {"top1": 0.75}


def test_run_saved_inside_of_an_epoch_resumes_at_the_next_batch():
    def body(opened, run, number, loss):
        value = loss()
        opened.step(value)
        run.log(loss=value)
        if run.step == 5:
            run.save()
        return value.item()

    uninterrupted = train(body, run_dir="uninterrupted", deterministic=True, log_every=1)
    train(body, run_dir="cut", deterministic=True, log_every=1, max_steps=5)
    rest = train(body, run_dir="cut", deterministic=True, log_every=1, resume=True)
    assert rest[0] == uninterrupted[0][5:]
    assert rows(rest[1]) == rows(uninterrupted[1])


def test_steps_of_an_optimizer_that_is_not_prepared_are_counted():
    with session(batch_size=1, accumulate=2, run_dir="run") as opened, opened.run() as run:
        assert [run.step for _ in run.steps(3)] == [0, 0, 1, 1, 2, 2]
        assert run.step == 3


def train_after_an_error(fails):
    """Train in a run; before it, another one of the session may fail in a micro-batch."""
    with session(batch_size=2, accumulate=2, max_steps=2, precision="fp64", seed=3) as opened:
        model = nn.Linear(3, 1)
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
        batches = torch.randn(
            4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )

        def loop(name):
            with opened.run(name=name) as run:
                for step in run.steps(2):
                    if name == "first":
                        opened.backward(10.0 * model(batches[step]).square().mean())
                        raise ZeroDivisionError
                    opened.backward(model(batches[step]).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            return run.step

        if fails:
            with pytest.raises(ZeroDivisionError):
                loop("first")
        return loop("second"), model.weight.tolist()


def test_run_after_one_that_failed_in_a_micro_batch_begins_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train_after_an_error(True) == train_after_an_error(False)
