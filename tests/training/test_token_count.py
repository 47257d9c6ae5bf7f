"""Losses averaged over the tokens of a global batch, whose total no rank knows beforehand."""

import math

import pytest
import ranks
import torch
from battery import session
from torch import nn

from hpctrain.errors import UsageError

STEPS, PIECES = 3, 12
LAYOUTS = [
    ("auto", 1, 4),
    ("auto", 2, 2),
    ("auto", 3, 1),
    ("fsdp", 3, 2),
    ("horovod", 3, 2),
]


def pieces():
    """Return the samples of each step, in pieces of 0 to 5 tokens."""
    generator = torch.Generator().manual_seed(2)
    return [
        [
            torch.randn((3 * n + step) % 6, 3, dtype=torch.float64, generator=generator)
            for n in range(PIECES)
        ]
        for step in range(STEPS)
    ]


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_sum(model, tokens):
    return (model(tokens) ** 2).sum() + model(tokens).sum()


def train_plainly(clip):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    norms = []
    for step in pieces():
        optimizer.zero_grad()
        tokens = torch.cat(step)
        (loss_sum(model, tokens) / len(tokens)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), norms


def train(accumulate, how="option", precision="fp64", steps=STEPS, **options):
    """Train on the pieces of this rank, several of which make a micro-batch."""
    clip = {"clip_norm": 0.5} if how == "option" else {}
    with session(
        batch_size=1, accumulate=accumulate, precision=precision, run_dir="run", **clip, **options
    ) as opened:
        model = network().to(torch.float64 if precision == "fp64" else torch.float32)
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
        world, norms, rates = opened.world, [], []
        share = PIECES // (world.world_size * accumulate)
        with opened.run() as run:
            for _ in run.steps(steps):
                # The order of pieces differs from that of ranks: only their sum matters.
                place = len(rates) % accumulate * world.world_size + world.rank
                rates.append(place)
                mine = pieces()[run.step][place * share : (place + 1) * share]
                tokens = torch.cat(mine).to(next(model.parameters()).dtype)
                count = torch.tensor(len(tokens)) if how == "tensor" else len(tokens)
                loss = loss_sum(model, tokens)
                if how == "one pass":
                    opened.backward(loss, count=count)
                else:
                    opened.backward(0.25 * loss, count=count, retain_graph=True)
                    opened.backward(0.75 * loss, count=count)
                if how in ("call", "tensor"):
                    norm = opened.clip_grad_norm_(model.parameters(), 0.5)
                elif how == "torch" and opened.sync_gradients:
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                else:
                    norm = None
                if opened.sync_gradients and norm is not None:
                    norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
        full = [opened.backend.whole(p.detach()).reshape(-1) for p in model.parameters()]
        return torch.cat(full).double().tolist(), norms


@pytest.mark.parametrize(("backend", "size", "accumulate"), LAYOUTS)
@pytest.mark.parametrize("how", ["option", "call"])
def test_step_is_divided_by_the_tokens_of_all_ranks(backend, size, accumulate, how):
    expected, norms = train_plainly(0.5)
    found = ranks.run(size, train, accumulate, how, env={"TEST_BACKEND": backend})
    for weights, seen in ranks.values(found):
        assert weights == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert seen == (pytest.approx(norms, rel=1e-12) if how == "call" else [])


def train_with_sums():
    return train(3, "one pass", horovod="op=sum")


def test_step_over_sums_of_horovod_is_divided_once():
    expected, _ = train_plainly(math.inf)
    for weights, _ in ranks.values(ranks.run(2, train_with_sums, env={"TEST_BACKEND": "horovod"})):
        assert weights == pytest.approx(expected, rel=1e-12, abs=1e-14)


def clips_between(opened, loss, optimizer):
    opened.backward(loss, count=2)
    nn.utils.clip_grad_norm_(opened.models[0].parameters(), 0.5)


def test_clipping_by_torch_between_micro_batches_is_refused():
    with pytest.raises(UsageError, match="clipped before the last micro-batch"):
        train_wrongly(clips_between, accumulate=2)


@pytest.mark.parametrize("how", ["tensor", "torch"])
def test_tensor_counts_and_clipping_by_torch_are_right(how):
    expected, norms = train_plainly(0.5)
    weights, seen = train(3, how)
    assert weights == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert seen == pytest.approx(norms, rel=1e-12)


def train_in_half(counts, precision="O2"):
    """Train on 600 tokens in two micro-batches, whose sum of losses overflows in fp16."""
    with session(
        batch_size=1, accumulate=2, precision=precision, loss_scale=1024, run_dir=str(counts)
    ) as opened:
        model = network().float()
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        generator = torch.Generator().manual_seed(1)
        with opened.run() as run:
            for _ in run.steps(3):
                tokens = torch.randn(300, 3, generator=generator)
                with opened.autocast():
                    loss = loss_sum(model, tokens)
                if counts:
                    opened.backward(loss, count=300)
                else:
                    opened.backward(loss / 300)
                optimizer.step()
                optimizer.zero_grad()
        state = opened.precision.state_dict()
        weights = [p.detach().float().reshape(-1) for p in model.parameters()]
        return torch.cat(weights).tolist(), state["skipped"], state.get("loss_divisor")


@pytest.mark.parametrize("precision", ["fp16", "O2"])
def test_sums_do_not_overflow_under_a_loss_scale(precision):
    weights, skipped, divisor = train_in_half(True, precision)
    expected, *_ = train_in_half(False, precision)
    assert (skipped, divisor) == (0, 512)
    assert weights == pytest.approx(expected, rel=2e-3, abs=1e-4)


def train_without_tokens(by_tensor):
    """Take a step without tokens between two others; weight decay would still move weights."""
    with session(batch_size=1, precision="fp64", run_dir="run") as opened:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, schedule = opened.prepare(model, optimizer, schedule)
        seen, world = [], opened.world
        with opened.run() as run:
            for number in run.steps(3):
                count = 0 if number == 1 else 2 + world.rank
                tokens = torch.ones(count, 3, dtype=torch.float64)
                opened.backward(
                    loss_sum(model, tokens), count=torch.tensor(count) if by_tensor else count
                )
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                seen.append((model[0].weight.sum().item(), schedule.last_epoch))
        return seen, run.step


@pytest.mark.parametrize("by_tensor", [False, True])
def test_step_without_tokens_changes_nothing(by_tensor):
    for seen, steps in ranks.values(ranks.run(3, train_without_tokens, by_tensor)):
        (first, one), (second, two), (third, three) = seen
        assert first == second != third
        assert (one, two, three, steps) == (1, 1, 2, 3)


def train_with_filler(fills):
    """Train a step of three micro-batches; one has weight 0, and other weights do not apply."""
    with session(batch_size=1, accumulate=3, precision="fp64", run_dir=str(fills)) as opened:
        model = network()
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        generator = torch.Generator().manual_seed(1)
        numbers = iter(range(3))
        with opened.run() as run:
            for _ in run.steps(1):
                tokens = torch.randn(4, 3, dtype=torch.float64, generator=generator)
                fill = next(numbers) == 1
                if fills:
                    opened.weight = 0.0 if fill else 1.5
                elif fill:
                    tokens = tokens[:0]
                opened.backward(loss_sum(model, tokens), count=len(tokens))
                optimizer.step()
                optimizer.zero_grad()
        return [p.tolist() for p in model.parameters()]


def test_filler_adds_neither_loss_nor_tokens():
    assert train_with_filler(True) == train_with_filler(False)


def mixed(opened, loss, optimizer):
    opened.backward(loss, count=2, retain_graph=True)
    opened.backward(loss)


def mixed_first_without(opened, loss, optimizer):
    opened.backward(loss, retain_graph=True)
    opened.backward(loss, count=2)


def different(opened, loss, optimizer):
    opened.backward(loss, count=2, retain_graph=True)
    opened.backward(loss, count=3)


def negative(opened, loss, optimizer):
    opened.backward(loss, count=-1)


def words(opened, loss, optimizer):
    opened.backward(loss, count="2")


def by_closure(opened, loss, optimizer):
    def closure():
        opened.backward(loss, count=2)
        return loss

    optimizer.step(closure)


WRONG = [
    (mixed, "with count= for some losses of a step"),
    (mixed_first_without, "with count= for some losses of a step"),
    (different, "the counts 2 and 3 in one micro-batch"),
    (negative, "got count=-1"),
    (words, "got count='2'"),
    (by_closure, "count=…\\) in the closure"),
]


def train_wrongly(body, **options):
    with session(batch_size=1, run_dir="run", **options) as opened:
        model = network().float()
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with opened.run() as run:
            for _ in run.steps(3):
                body(opened, loss_sum(model, torch.ones(2, 3)), optimizer)
                optimizer.step()


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_contradictory_counts_are_refused(body, message):
    with pytest.raises(UsageError, match=message):
        train_wrongly(body)


def test_counts_over_compressed_gradients_are_refused():
    for found in ranks.run(2, train_over_powersgd):
        assert "gradients combined by powersgd" in str(found)


def train_over_powersgd():
    return train_wrongly(
        lambda opened, loss, _: opened.backward(loss, count=2), ddp="compression=powersgd"
    )


def train_and_log(early):
    """Log the mean over the tokens of each micro-batch, of which some have none."""
    with session(
        batch_size=1, accumulate=2, precision="fp64", run_dir="run", log_every=1
    ) as opened:
        model = network()
        model, optimizer = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        counts = iter([[0, 2], [3, 1], [5, 0], [0, 0]])
        with opened.run() as run:
            for _ in run.steps(2):
                count = next(counts)[opened.world.rank]
                tokens = torch.ones(count, 3, dtype=torch.float64)
                value = float("nan") if count == 0 else float(count)
                if early:
                    run.log(size=value)
                opened.backward(loss_sum(model, tokens), count=count)
                if not early:
                    run.log(size=value)
                optimizer.step()
                optimizer.zero_grad()
        return [row["size"] for row in run.directory.rows()]


@pytest.mark.parametrize("early", [False, True])
def test_logged_values_are_means_over_the_tokens_of_a_step(early):
    # Of 2, 3 and 1 tokens, and of 5 tokens.
    rows, _ = ranks.values(ranks.run(2, train_and_log, early))
    assert rows == pytest.approx([(2 * 2 + 3 * 3 + 1) / 6, 5.0])
