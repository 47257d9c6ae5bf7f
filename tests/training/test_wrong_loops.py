"""Mistakes in a training loop are refused at the first step."""

import pytest
import torch
from battery import images, session, small_model
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

import hpctrain
from hpctrain.errors import UsageError

LOSS = nn.functional.cross_entropy


def loop(body, **options):
    options = {"global_batch": 12, "max_steps": 4, "run_dir": "run", **options}
    with session(**options) as opened:
        model = small_model()
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(opened.loader(images(96))):
                    body(opened, run, model, optimizer, LOSS(model(batch), targets))


def call_backward(opened, run, model, optimizer, loss):
    (2 * loss).backward(retain_graph=True)
    opened.step(loss)


def call_backward_of_a_part(opened, run, model, optimizer, loss):
    """Give a gradient to the convolution only, which is not the last parameter."""
    (model[0].weight ** 2).sum().backward()
    opened.step(loss)


def call_zero_grad(opened, run, model, optimizer, loss):
    optimizer.zero_grad()
    opened.step(loss)


def clear_the_model(opened, run, model, optimizer, loss):
    model.zero_grad()
    opened.step(loss)


def zero_in_place(opened, run, model, optimizer, loss):
    optimizer.zero_grad(set_to_none=False)
    opened.step(loss)


def clip_norm(opened, run, model, optimizer, loss):
    opened.step(loss)
    clip_grad_norm_(model.parameters(), 1.0)


def clip_value(opened, run, model, optimizer, loss):
    opened.step(loss)
    clip_grad_value_(model.parameters(), 1.0)


def step_with_losses_of_samples(opened, run, model, optimizer, loss):
    opened.step(loss.repeat(3))


def step_with_detached_loss(opened, run, model, optimizer, loss):
    opened.step(loss.detach())


def step_with_a_number(opened, run, model, optimizer, loss):
    opened.step(loss.item())


def log_a_list(opened, run, model, optimizer, loss):
    opened.step(loss)
    run.log(losses=[1.0, 2.0])


def log_a_tensor(opened, run, model, optimizer, loss):
    opened.step(loss)
    run.log(losses=torch.ones(3))


def sum_a_list(opened, run, model, optimizer, loss):
    opened.sum([1, 2])


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (call_backward, {}, "has a gradient before session.step()"),
        (call_backward_of_a_part, {}, "0.weight has a gradient before session.step()"),
        (clear_the_model, {"batch_size": 4}, "cleared between the micro-batches"),
        (clip_norm, {}, "Session(clip_norm=X)"),
        (clip_value, {}, "Session(clip_value=X)"),
        (step_with_losses_of_samples, {}, "a loss of shape (3,)"),
        (step_with_detached_loss, {}, "a loss without a gradient"),
        (step_with_a_number, {}, "session.backward() got a float"),
        (log_a_list, {}, "losses is a list"),
        (log_a_tensor, {}, "losses is a tensor of shape (3,)"),
        (sum_a_list, {}, "session.sum() got a list"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistake_in_a_loop_is_refused_at_the_first_step(body, options, message):
    with pytest.raises(UsageError) as caught:
        loop(body, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("body", [call_zero_grad, zero_in_place])
def test_zero_grad_at_the_begin_of_a_step_changes_nothing(body):
    loop(body)


@pytest.mark.parametrize("body", [call_zero_grad, zero_in_place])
def test_zero_grad_between_micro_batches_keeps_their_sum(body):
    loop(body, batch_size=4)


def test_clipping_works_again_after_the_run():
    loop(lambda opened, run, model, optimizer, loss: opened.step(loss))
    assert float(clip_grad_norm_(small_model().parameters(), 1.0)) == 0


def test_step_outside_of_the_batches_of_a_run_is_refused():
    with pytest.raises(UsageError, match=r"outside of run.batches\(\)"):
        step_without_run_batches()


def step_without_run_batches():
    with session(batch_size=4, run_dir="run") as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        with opened.run() as run:
            for _ in run.epochs(1):
                for batch, targets in DataLoader(images(96), 4):
                    opened.step(LOSS(model(batch), targets))


def test_option_that_exists_already_is_refused_with_a_fix(capsys):
    parser = hpctrain.options()
    with pytest.raises(SystemExit) as caught:
        parser.add_argument("--epochs", type=int, default=14)
    assert caught.value.code == 2
    assert "parser.set_defaults(epochs=…)" in capsys.readouterr().err
