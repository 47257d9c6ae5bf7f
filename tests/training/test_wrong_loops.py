"""Leftovers of a loop by hand, and values that are none, are refused at the first step."""

import pytest
import torch
from battery import images, session, small_model
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

import hpctrain
from hpctrain.errors import UsageError

LOSS = nn.functional.cross_entropy


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    """torch's compiler, which the first step of a process imports, sets a variable."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))


def loop(body, **options):
    options = {"global_batch": 12, "max_steps": 4, "run_dir": "run", **options}
    with session(**options) as opened:
        model = small_model()
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(opened.loader(images(96))):
                    body(opened, run, model, optimizer, LOSS(model(batch), targets))


def backward(opened, run, model, optimizer, loss):
    (2 * loss).backward(retain_graph=True)
    opened.step(loss)


def backward_of_a_part(opened, run, model, optimizer, loss):
    """The convolution alone has a gradient, and it is not the last parameter."""
    (model[0].weight ** 2).sum().backward()
    opened.step(loss)


def zero_grad(opened, run, model, optimizer, loss):
    optimizer.zero_grad()
    opened.step(loss)


def zeroed_in_place(opened, run, model, optimizer, loss):
    optimizer.zero_grad(set_to_none=False)
    opened.step(loss)


def clips_norm(opened, run, model, optimizer, loss):
    opened.step(loss)
    clip_grad_norm_(model.parameters(), 1.0)


def clips_value(opened, run, model, optimizer, loss):
    opened.step(loss)
    clip_grad_value_(model.parameters(), 1.0)


def of_each_sample(opened, run, model, optimizer, loss):
    opened.step(loss.repeat(3))


def detached(opened, run, model, optimizer, loss):
    opened.step(loss.detach())


def number(opened, run, model, optimizer, loss):
    opened.step(loss.item())


def logs_a_list(opened, run, model, optimizer, loss):
    opened.step(loss)
    run.log(losses=[1.0, 2.0])


def logs_a_tensor(opened, run, model, optimizer, loss):
    opened.step(loss)
    run.log(losses=torch.ones(3))


def sums_a_list(opened, run, model, optimizer, loss):
    opened.sum([1, 2])


@pytest.mark.parametrize(
    ("body", "options", "said"),
    [
        (backward, {}, "has a gradient before session.step()"),
        (backward_of_a_part, {}, "0.weight has a gradient before session.step()"),
        (zero_grad, {"batch_size": 4}, "cleared between the micro-batches"),
        (zeroed_in_place, {"batch_size": 4}, "cleared between the micro-batches"),
        (clips_norm, {}, "--clip-norm"),
        (clips_value, {}, "--clip-value"),
        (of_each_sample, {}, "a loss of shape (3,)"),
        (detached, {}, "a loss without a gradient"),
        (number, {}, "session.step() with a float"),
        (logs_a_list, {}, "losses is a list"),
        (logs_a_tensor, {}, "losses is a Tensor of shape (3,)"),
        (sums_a_list, {}, "session.sum() of a list"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistake_in_a_loop_is_refused_at_the_first_step(body, options, said):
    with pytest.raises(UsageError) as caught:
        loop(body, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("body", [zero_grad, zeroed_in_place])
def test_zero_grad_where_a_step_begins_changes_nothing(body):
    loop(body)


def test_clipping_works_again_after_the_run():
    loop(lambda opened, run, model, optimizer, loss: opened.step(loss))
    assert float(clip_grad_norm_(small_model().parameters(), 1.0)) == 0


def test_step_outside_of_the_batches_of_a_run_is_refused():
    with pytest.raises(UsageError, match=r"outside of run.batches\(\)"):
        without_run_batches()


def without_run_batches():
    with session(batch_size=4, run_dir="run") as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        with opened.run() as run:
            for _ in run.epochs(1):
                for batch, targets in DataLoader(images(96), 4):
                    opened.step(LOSS(model(batch), targets))


@pytest.mark.parametrize("value", [0.0, {"best": 1}, None])
def test_state_without_state_dict_is_refused_when_the_run_is_made(value):
    with session(batch_size=4) as opened, pytest.raises(UsageError, match="best"):
        opened.run(state={"best": value})


def test_option_that_is_there_already_is_refused_with_what_to_type(capsys):
    parser = hpctrain.options()
    with pytest.raises(SystemExit) as left:
        parser.add_argument("--epochs", type=int, default=14)
    assert left.value.code == 2
    assert "parser.set_defaults(epochs=…)" in capsys.readouterr().err
