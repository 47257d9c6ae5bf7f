"""Horovod leaves parameters alone that no rank used in a step, as one process does."""

from itertools import cycle

import pytest
import ranks
import torch
from torch import nn

import hpctrain

pytestmark = pytest.mark.usefixtures("horovod")

SAMPLES, STEPS = 12, 10
LONGEST = 100.0  # seconds; ranks that disagree would wait for each other


def session(backend="horovod", horovod=None, **options):
    settings = {"horovod": horovod} if horovod and backend == "horovod" else {}
    return hpctrain.Session(
        backend=backend, batch_size=1, precision="fp64", seed=3, timeout=30, **settings, **options
    )


def flat_weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


class Experts(nn.Module):
    """Layers of which each sample uses one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, samples, chosen):
        used = [self.experts[number](x) for x, number in zip(samples, chosen, strict=True)]
        return torch.stack(used).square().mean()


def expert(step, sample):
    """Return the expert of a sample."""
    if sample == SAMPLES - 1 and step < STEPS - 3:
        return 2  # only on the last rank, in its last micro-batch, and late on no rank
    if sample == 0 and step < 3:
        return 3  # only on the first rank; frozen later
    return 1 if step == 0 else 0  # expert 1 in the first step only


def train_experts(backend, options, accumulate=1, **more):
    """Train for STEPS steps, in which all ranks and micro-batches together have SAMPLES samples."""
    with session(backend, options, accumulate=accumulate, **more) as opened:
        rank, size = opened.world.rank, opened.world.world_size
        torch.manual_seed(5)
        raw = Experts()
        optimizer = torch.optim.AdamW(raw.parameters(), 0.1, weight_decay=0.1)
        model, _ = opened.prepare(raw, optimizer)
        parts = torch.arange(SAMPLES).chunk(size * accumulate)
        own = cycle(parts[rank * accumulate : (rank + 1) * accumulate])
        with opened.run() as run:
            for step in run.steps(STEPS):
                raw.experts[3].requires_grad_(step < 3)
                part = next(own)
                generator = torch.Generator().manual_seed(step)
                samples = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)
                loss = model(samples[part], [expert(step, number) for number in part.tolist()])
                opened.step(loss / size if options.get("op") == "sum" else loss)
        return flat_weights(model)


def train_many(cases):
    return [train_experts("horovod", options, *more) for options, *more in cases]


@pytest.fixture(scope="module")
def alone():
    (weights,) = ranks.values(ranks.run(1, train_experts, "single", {}))
    return weights


CASES = [
    ({}, 1),
    ({}, 2),
    ({"op": "sum"}, 2),
    ({"groups": 1}, 1),
    ({"groups": 3}, 2),
    ({"gradient_predivide_factor": 4.0}, 1),
]


@pytest.mark.parametrize(
    "size", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_horovod_leaves_parameters_alone_that_no_rank_used(size, alone):
    for found in ranks.values(ranks.run(size, train_many, CASES, timeout=LONGEST)):
        for case, weights in zip(CASES, found, strict=True):
            assert weights == pytest.approx(alone, rel=1e-12, abs=1e-12), case


def train_deterministic_and_in_half_precision():
    return (
        train_experts("horovod", {}, deterministic=True),
        train_experts("horovod", {"groups": 2}, deterministic=True),
        train_experts("horovod", {"compression": "fp16"}),
    )


@pytest.mark.slow
def test_horovod_deterministic_or_compressed_leaves_unused_parameters_alone(alone):
    results = ranks.run(3, train_deterministic_and_in_half_precision, timeout=LONGEST)
    for *exact, compressed in ranks.values(results):
        assert exact == [pytest.approx(alone, rel=1e-12, abs=1e-12)] * 2
        assert compressed == pytest.approx(alone, rel=0.05, abs=0.01)


def train_and_resume(cut):
    options = {"deterministic": True, "run_dir": "cut"}
    train_experts("horovod", {}, max_steps=cut, **options)
    return train_experts("horovod", {}, max_steps=STEPS, resume=True, **options)


@pytest.mark.parametrize("cut", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_horovod_leaves_unused_parameters_alone_after_a_resume(cut, alone):
    for weights in ranks.values(ranks.run(2, train_and_resume, cut, timeout=LONGEST)):
        assert weights == pytest.approx(alone, rel=1e-12, abs=1e-12)


def gradients_after_a_pass():
    """Return each gradient of experts of which rank 0 uses 0 and 1, rank 1 uses 1 and 2."""
    with session() as opened:
        raw = Experts()
        model, optimizer = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
        rank = opened.world.rank
        opened.backward(model(torch.ones(2, 3, dtype=torch.float64), [rank, rank + 1]))
        own = [one.weight.grad for one in raw.experts]
        optimizer.step()
        return [None if gradient is None else gradient.tolist() for gradient in own]


def test_horovod_gradient_of_a_parameter_that_no_rank_used_is_none():
    first, second = ranks.values(ranks.run(2, gradients_after_a_pass))
    assert first == second
    assert [gradient is None for gradient in first] == [False, False, False, True]


# Several models and several backward passes.


def train_two_models(backend):
    """Train two models; of two ranks, each reaches one of them."""
    with session(backend, {"op": "sum"}) as opened:
        rank, size = opened.world.rank, opened.world.world_size
        torch.manual_seed(5)
        first, second = nn.Linear(3, 3), Experts()
        own = [torch.optim.AdamW(model.parameters(), 0.1) for model in (first, second)]
        first, second, *optimizers = opened.prepare(first, second, *own)
        for step in range(4):
            inputs = torch.full((2, 3), step + 1.0, dtype=torch.float64)
            losses = [first(inputs).square().mean(), second(inputs, [0, 1])]
            opened.backward(sum(losses) if size == 1 else losses[rank])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [flat_weights(first), flat_weights(second)]


def test_horovod_loss_that_reaches_a_model_on_one_rank_only():
    (alone,) = ranks.values(ranks.run(1, train_two_models, "single"))
    for found in ranks.values(ranks.run(2, train_two_models, "horovod", timeout=LONGEST)):
        for weights, expected in zip(found, alone, strict=True):
            assert weights == pytest.approx(expected, rel=1e-12)


# Sparse gradients.


def train_sparse(backend, **options):
    """Train embeddings; the second is used on the last rank only, the third in the first step."""
    with session(backend, options) as opened:
        rank, size = opened.world.rank, opened.world.world_size
        torch.manual_seed(5)
        raw = nn.ModuleList(nn.Embedding(4, 2, sparse=True) for _ in range(3))
        raw, _ = opened.prepare(raw, torch.optim.SparseAdam(list(raw.parameters()), 0.1))
        for step in range(3):
            # Of three samples, as for three ranks; SparseAdam needs the mean of all.
            losses = [raw[0](torch.tensor([number])).square().sum() for number in range(3)]
            losses[2] = losses[2] + raw[1](torch.tensor([1, 3])).square().sum()
            if step == 0:
                losses[1] = losses[1] + raw[2](torch.tensor([2])).square().sum()
            own = losses if size == 1 else [losses[rank]]
            opened.step(torch.stack(own).mean())
        return flat_weights(raw)


def train_sparse_and_as_dense():
    return train_sparse("horovod"), train_sparse("horovod", sparse_as_dense=True)


def test_horovod_sparse_gradients_that_some_ranks_or_steps_lack():
    (alone,) = ranks.values(ranks.run(1, train_sparse, "single"))
    for found in ranks.values(ranks.run(3, train_sparse_and_as_dense, timeout=LONGEST)):
        assert list(found) == [pytest.approx(alone, rel=1e-12)] * 2
