"""Several optimizers while micro-batches accumulate: each gets the gradients of its own losses."""

import pytest
import ranks
import torch
from battery import session
from torch import nn

from hpctrain.errors import UsageError

SAMPLES, STEPS = 12, 3
LAYOUTS = [("auto", 1, 4), ("auto", 2, 2), ("auto", 3, 2), ("fsdp", 2, 3), ("horovod", 2, 2)]


def step_samples():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(SAMPLES, 2, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def models():
    torch.manual_seed(1)
    generator, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    return generator.double(), critic.double()


def momentum(model):
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


class Losses:
    """Losses of both models for a batch; that of the generator reaches the critic as well."""

    def __init__(self, generator, critic, real):
        self.fake = generator(real)
        self.critic = critic(self.fake.detach()).mean() - critic(real).mean()
        self.generator = -critic(self.fake).mean()
        # This one does not need the critic's weights as they were before its step.
        self.apart = (self.fake**2).mean() + sum(p.sum() for p in critic.parameters())


def loop_in_plain_torch(name="generator"):
    """Train over the global batch, with each gradient as the loops below mean it.

    Args:
        name: name of the generator's loss.
    """
    generator, critic = models()
    first, second = momentum(generator), momentum(critic)
    for real in step_samples():
        losses = Losses(generator, critic, real)
        of_critic = torch.autograd.grad(losses.critic, list(critic.parameters()))
        of_generator = torch.autograd.grad(getattr(losses, name), list(generator.parameters()))
        for optimizer, model, gradients in (
            (first, generator, of_generator),
            (second, critic, of_critic),
        ):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    return weights(generator, critic)


def weights(*trained):
    return torch.cat([p.detach().reshape(-1) for m in trained for p in m.parameters()]).tolist()


def cleared_after(opened, losses, first, second):
    opened.backward(losses.generator, retain_graph=True)
    first.step()
    first.zero_grad()
    second.zero_grad()
    opened.backward(losses.critic)
    second.step()
    second.zero_grad()


def cleared_before(opened, losses, first, second):
    first.zero_grad()
    opened.backward(losses.generator, retain_graph=True)
    first.step()
    second.zero_grad()
    opened.backward(losses.critic)
    second.step()


def cleared_to_zeros(opened, losses, first, second):
    for optimizer in (first, second):
        optimizer.zero_grad(set_to_none=False)
    opened.backward(losses.generator, retain_graph=True)
    first.step()
    second.zero_grad(set_to_none=False)
    opened.backward(losses.critic)
    second.step()


def critic_first(opened, losses, first, second):
    opened.backward(losses.critic)
    second.step()
    second.zero_grad()
    opened.backward(losses.apart)
    first.step()
    first.zero_grad()
    second.zero_grad()


def cleared_twice(opened, losses, first, second):
    for optimizer in (first, second):
        optimizer.zero_grad()
    opened.backward(losses.critic, retain_graph=True)
    for optimizer in (first, second):
        optimizer.zero_grad()
    opened.backward(losses.generator)
    first.step()
    second.zero_grad()
    opened.backward(losses.critic)
    second.step()


def only_the_last(opened, losses, first, second):
    """Step in the last micro-batch, without a loss that reaches the other model's parameters."""
    opened.backward(losses.critic)
    for parameter in second.param_groups[0]["params"]:
        parameter.requires_grad_(False)
    opened.backward(-opened.models[1](losses.fake).mean())
    for parameter in second.param_groups[0]["params"]:
        parameter.requires_grad_(True)
    if opened.sync_gradients:
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def train(loop, accumulate, **options):
    options = {"precision": "fp64", "epochs": 1, "run_dir": "run", **options}
    with session(batch_size=1, accumulate=accumulate, **options) as opened:
        generator, critic = models()
        first, second = momentum(generator), momentum(critic)
        generator, critic, first, second = opened.prepare(generator, critic, first, second)
        world = opened.world
        parts = [
            step.chunk(world.world_size * accumulate)[n * world.world_size + world.rank]
            for step in step_samples()
            for n in range(accumulate)
        ]
        with opened.run() as run:
            for _ in run.epochs():
                for real in run.batches(parts):
                    losses = Losses(generator, critic, real)
                    loop(opened, losses, first, second)
        full = [
            opened.backend.whole(p.detach()) for m in (generator, critic) for p in m.parameters()
        ]
        return torch.cat([p.reshape(-1) for p in full]).tolist(), run.step


LOOPS = [
    cleared_after,
    cleared_before,
    cleared_to_zeros,
    critic_first,
    cleared_twice,
    only_the_last,
]
# fsdp has whole weights in a forward pass only, and that loss reads them outside of one.
CASES = [
    (loop, *one) for loop in LOOPS for one in LAYOUTS if (loop, one[0]) != (critic_first, "fsdp")
]


@pytest.mark.parametrize(("loop", "backend", "size", "accumulate"), CASES)
def test_each_optimizer_gets_the_gradients_of_its_own_losses(loop, backend, size, accumulate):
    expected = loop_in_plain_torch("apart" if loop is critic_first else "generator")
    for found, steps in ranks.values(
        ranks.run(size, train, loop, accumulate, env={"TEST_BACKEND": backend})
    ):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)
        assert steps == STEPS


def without_zero_grad(opened, losses, first, second):
    opened.backward(losses.critic)
    second.step()


def twice(opened, losses, first, second):
    for _ in range(2):
        opened.backward(losses.critic, retain_graph=True)
        second.step()
        second.zero_grad()


def every_second(opened, losses, first, second):
    opened.number = getattr(opened, "number", -1) + 1
    opened.backward(losses.critic)
    if opened.number % 2 == 0:
        second.step()
        second.zero_grad()


def only_the_last_with_junk(opened, losses, first, second):
    opened.backward(losses.critic)
    if opened.sync_gradients:
        second.step()
        second.zero_grad()
    opened.backward(-opened.models[1](losses.fake).mean())
    if opened.sync_gradients:
        first.step()
        first.zero_grad()
        second.zero_grad()


def drops_in_the_last(opened, losses, first, second):
    opened.backward(losses.critic)
    if opened.sync_gradients:
        second.zero_grad()
    second.step()
    second.zero_grad()


def clears_the_model(opened, losses, first, second):
    opened.models[1].zero_grad()
    opened.backward(losses.critic)
    second.step()


WRONG = [
    (without_zero_grad, 2, "without zero_grad"),
    (twice, 2, r"step\(\) twice in one batch"),
    (every_second, 4, r"step\(\) in 2 of the 4 micro-batches"),
    (every_second, 3, r"step\(\) in 2 of the 3 micro-batches"),
    (only_the_last_with_junk, 2, r"adds gradients to the parameters of the SGD after its step"),
    (drops_in_the_last, 2, "the first micro-batch of the step had none to drop"),
    (clears_the_model, 2, "changed or cleared between the micro-batches"),
]


@pytest.mark.parametrize(("loop", "accumulate", "message"), WRONG)
def test_loop_that_would_mix_gradients_is_refused(loop, accumulate, message):
    with pytest.raises(UsageError, match=message):
        train(loop, accumulate)


def two_passes(opened, losses, first, second):
    opened.backward(losses.critic)
    opened.backward(losses.generator)
    first.step()
    first.zero_grad()
    second.zero_grad()


def test_second_pass_that_horovod_would_sum_again_is_refused():
    for found in ranks.run(2, train_with_sums, env={"TEST_BACKEND": "horovod"}):
        assert isinstance(found, UsageError)
        assert "two backward passes in one batch, with --horovod op=sum" in str(found)


def train_with_sums():
    return train(two_passes, 1, horovod="op=sum")


def test_loss_after_an_update_in_the_same_batch_is_warned_of_once(capsys):
    def loop(opened, losses, first, second):
        opened.backward(losses.critic)
        second.step()
        second.zero_grad()
        opened.backward(-opened.models[1](losses.fake).mean())
        first.step()
        first.zero_grad()
        second.zero_grad()

    train(loop, 2)
    assert capsys.readouterr().err.count("computes a loss after optimizer.step()") == 1


def test_losses_before_every_update_are_not_warned_of(capsys):
    train(cleared_after, 2)
    train(only_the_last, 2, run_dir="again")
    assert "computes a loss after" not in capsys.readouterr().err


def train_with_overflow(accumulate):
    """Train under a dynamic loss scale; the critic's loss overflows in the second step."""
    with session(
        batch_size=4 // accumulate, accumulate=accumulate, precision="fp16", epochs=1,
        run_dir=str(accumulate), max_nonfinite=9,
    ) as opened:  # fmt: skip
        generator, critic = (model.float() for model in models())
        first, second = momentum(generator), momentum(critic)
        generator, critic, first, second = opened.prepare(generator, critic, first, second)
        parts = [part.float() for step in step_samples() for part in step.chunk(accumulate)]
        with opened.run() as run:
            for _ in run.epochs():
                for real in run.batches(parts):
                    losses = Losses(generator, critic, real)
                    opened.backward(losses.critic * (1e38 if run.step == 1 else 1.0))
                    second.step()
                    second.zero_grad()
                    critic.requires_grad_(False)
                    opened.backward((losses.fake**2).mean())
                    critic.requires_grad_(True)
                    first.step()
                    first.zero_grad()
        return weights(generator, critic), opened.precision.numbers()["loss_scale"]


def test_loss_scale_is_the_same_for_all_micro_batches_of_a_step():
    found, scale = train_with_overflow(2)
    expected, same = train_with_overflow(1)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert scale == same == 2**15
