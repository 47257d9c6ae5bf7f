"""A model whose loss is only in some micro-batches of a step gets the gradient of plain torch."""

import pytest
import ranks
import torch
from battery import session
from torch import nn

SAMPLES, STEPS, ACCUMULATE, MAX_NORM = 12, 3, 2, 0.5


def setup():
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    steps = [
        torch.randn(SAMPLES, 2, dtype=torch.float64, generator=generator) for _ in range(STEPS)
    ]
    body, extra = nn.Linear(2, 3).double(), nn.Linear(2, 1).double()
    return steps, body, extra, torch.optim.AdamW([*body.parameters(), *extra.parameters()], 0.1)


def losses(body, extra, batch):
    return (body(batch) ** 2).mean(), (extra(batch) - 1).abs().mean()


def in_plain_torch():
    steps, body, extra, optimizer = setup()
    for batch in steps:
        first = losses(body, extra, batch[: SAMPLES // ACCUMULATE])
        second = losses(body, extra, batch[SAMPLES // ACCUMULATE :])
        ((first[0] + second[0] + first[1]) / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in (*body.parameters(), *extra.parameters())])


def step_by_session(opened, loss, optimizer):
    opened.step(loss)


def step_by_optimizer(opened, loss, optimizer):
    opened.backward(loss)
    if opened.sync_gradients:
        opened.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def step_with_torch_clipping(opened, loss, optimizer):
    opened.backward(loss)
    if opened.sync_gradients:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def train(loop):
    clip = MAX_NORM if loop is step_by_session else None
    with session(
        batch_size=1, accumulate=ACCUMULATE, precision="fp64", epochs=1, clip_norm=clip
    ) as opened:
        steps, body, extra, optimizer = setup()
        body, extra, optimizer = opened.prepare(body, extra, optimizer)
        size, rank = opened.world.world_size, opened.world.rank
        parts = [step.chunk(ACCUMULATE)[n] for step in steps for n in range(ACCUMULATE)]
        with opened.run() as run:
            for _ in run.epochs():
                for number, batch in enumerate(run.batches([p.chunk(size)[rank] for p in parts])):
                    loss, more = losses(body, extra, batch)  # the last pass does not use `more`
                    loop(opened, loss if number % ACCUMULATE else loss + more, optimizer)
        full = [opened.backend.whole(p.detach()) for p in (*body.parameters(), *extra.parameters())]
        return torch.cat([p.reshape(-1) for p in full]).tolist()


@pytest.mark.parametrize("loop", [step_by_session, step_by_optimizer, step_with_torch_clipping])
@pytest.mark.parametrize(
    ("backend", "size"), [("auto", 1), ("auto", 3), ("fsdp", 2), ("horovod", 3)]
)
def test_loss_in_one_of_two_micro_batches_trains_its_model_as_in_plain_torch(loop, backend, size):
    for found in ranks.values(ranks.run(size, train, loop, env={"TEST_BACKEND": backend})):
        assert found == pytest.approx(in_plain_torch().tolist(), rel=1e-12)


def step_and_compare():
    with session(batch_size=1, accumulate=ACCUMULATE, precision="fp64", epochs=1) as opened:
        steps, _, extra, _ = setup()
        optimizer = torch.optim.SGD(extra.parameters(), 0.1)
        extra, optimizer = opened.prepare(extra, optimizer)
        batch, found = steps[0].chunk(opened.world.world_size)[opened.world.rank], []
        with opened.run() as run:
            for _ in run.epochs():
                for number in run.batches(range(2 * ACCUMULATE)):
                    last = number % ACCUMULATE
                    loss = extra(batch).mean()
                    own = torch.autograd.grad(loss, extra.weight, retain_graph=True)[0]
                    opened.step(loss)
                    if not last:
                        found.append(torch.equal(extra.weight.grad, own / ACCUMULATE))
                    else:
                        extra(batch)  # a forward pass without a backward pass
        return found


def test_only_the_last_micro_batch_averages_after_a_forward_pass_without_a_backward_pass():
    assert ranks.values(ranks.run(2, step_and_compare)) == [[True, True]] * 2
