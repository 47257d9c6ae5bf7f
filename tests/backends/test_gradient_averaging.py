"""Gradients are averaged however a loss is made of a prepared model; else a step is refused."""

import io
import logging

import pytest
import ranks
import torch
import torch.distributed as dist
from battery import session, small_model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from hpctrain.errors import UsageError

BACKENDS = pytest.mark.parametrize(
    "run", ["auto", pytest.param("horovod", marks=pytest.mark.slow)], indirect=True
)
SIZES = pytest.mark.parametrize(
    "size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
SAMPLES, STEPS = 12, 4


class Coder(nn.Module):
    """An autoencoder whose parts are used as methods, as a VAE's are."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, points):
        return self.decode(self.encode(points))

    def encode(self, points):
        return self.encoder(points).tanh()

    def decode(self, codes):
        return self.decoder(codes)

    def loss(self, points):
        return ((self.decode(self.encode(points)) - points) ** 2).mean()


# Each gives the same loss.
WAYS = {
    "forward": lambda model, raw, points: ((model(points) - points) ** 2).mean(),
    "methods": lambda model, raw, points: (
        (model.decode(model.encode(points)) - points) ** 2
    ).mean(),
    "loss": lambda model, raw, points: model.loss(points),
    "raw": lambda model, raw, points: ((raw(points) - points) ** 2).mean(),
    "both": lambda model, raw, points: (
        0.5 * model.loss(points) + 0.5 * ((model(points) - points) ** 2).mean()
    ),
}


def own_points(opened):
    """Return this rank's points in each micro-batch; all ranks together have the same points."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    world, accumulate = opened.world, opened.batches.accumulate
    pieces = points.chunk(world.world_size * accumulate)
    return [pieces[number * world.world_size + world.rank] for number in range(accumulate)]


def train(way, accumulate=1, deterministic=False, change=lambda step, raw, model, opened: None):
    """Return the weights after a few steps."""
    with session(
        batch_size=1, accumulate=accumulate, precision="fp64", deterministic=deterministic, seed=3
    ) as opened:
        raw = Coder()
        change(-1, raw, raw, opened)
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1, 0.9))
        for step in range(STEPS):
            change(step, raw, model, opened)
            for points in own_points(opened):
                opened.step(WAYS[way](model, raw, points))
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@pytest.fixture(scope="module")
def expected():
    return ranks.values(ranks.run(1, train, "forward"))[0]


@BACKENDS
@SIZES
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_the_loss_averages_gradients(run, size, way, expected):
    for weights in ranks.values(run(size, train, way)):
        assert weights == pytest.approx(expected, rel=1e-12)


@BACKENDS
@pytest.mark.parametrize("way", ["methods", "raw"])
def test_methods_average_gradients_of_accumulated_micro_batches(run, way, expected):
    for weights in ranks.values(run(3, train, way, 2)):
        assert weights == pytest.approx(expected, rel=1e-12)


@BACKENDS
def test_methods_are_deterministic_for_three_ranks(run):
    """The order of the sums is the same in the first step of a process as in all others."""
    for weights in ranks.values(run(3, train_and_resume)):
        assert weights[0] == weights[1]


def train_and_resume():
    """Return the weights of an uninterrupted run, and of one that is resumed after a step."""
    found = []
    for cut in (STEPS, 1):
        state = None
        for steps in (cut, STEPS - cut):
            with session(batch_size=1, deterministic=True, seed=3) as opened:
                raw = Coder()
                model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
                if state is not None:
                    model.load_state_dict(state)
                for _ in range(steps):
                    for points in own_points(opened):
                        opened.step(model.loss(points.float()))
                state = {name: value.clone() for name, value in model.state_dict().items()}
        found.append(torch.cat([value.reshape(-1) for value in state.values()]).tolist())
    return found


def unfreeze_encoder(step, raw, model, opened):
    if step == -1:
        raw.encoder.requires_grad_(False)
    if step == 2:
        model.encoder.requires_grad_(True)


def freeze_encoder(step, raw, model, opened):
    if step == 2:
        model.encoder.requires_grad_(False)


def freeze_and_unfreeze(step, raw, model, opened):
    model.encoder.requires_grad_(step != 1)
    model.decoder.requires_grad_(step != 2)


def unfreeze_all(step, raw, model, opened):
    raw.requires_grad_(step >= 1)


CHANGES = [unfreeze_encoder, freeze_encoder, freeze_and_unfreeze, unfreeze_all]


def train_with_change(change, way, accumulate):
    if change is unfreeze_all:
        # Nothing to go backward to before: the first step is left out.
        return train_from_frozen(way, accumulate)
    return train(way, accumulate, change=change)


def train_from_frozen(way, accumulate):
    with session(batch_size=1, accumulate=accumulate, precision="fp64", seed=3) as opened:
        raw = Coder().requires_grad_(False)
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1, 0.9))
        raw.requires_grad_(True)
        for _ in range(STEPS):
            for points in own_points(opened):
                opened.step(WAYS[way](model, raw, points))
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@BACKENDS
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", ["forward", pytest.param("loss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_parameters_frozen_or_unfrozen_after_prepare(run, change, way, accumulate):
    alone = ranks.values(ranks.run(1, train_with_change, change, way, accumulate))[0]
    for weights in ranks.values(run(3, train_with_change, change, way, accumulate)):
        assert weights == pytest.approx(alone, rel=1e-12)


def test_parameters_frozen_after_prepare_with_one_rank_of_ddp(expected):
    env = {"TEST_BACKEND": "ddp"}
    (alone,) = ranks.values(ranks.run(1, train_with_change, freeze_encoder, "forward", 1))
    (ddp,) = ranks.values(ranks.run(1, train_with_change, freeze_encoder, "forward", 1, env=env))
    assert ddp == pytest.approx(alone, rel=1e-12)
    assert alone != pytest.approx(expected, rel=1e-12)


def messages_of_a_hook():
    """Return how many messages a hook has sent before and after a part of the model is frozen."""
    sent = []

    def hook(state, bucket):
        sent.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(state, bucket)

    with session(batch_size=1, precision="fp64", seed=3) as opened:
        raw = Coder()
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
        model.register_comm_hook(None, hook)
        counts = []
        for step in range(4):
            raw.encoder.requires_grad_(step < 2)
            for points in own_points(opened):
                opened.step(model.loss(points))
            counts.append(len(sent))
            sent.clear()
    return counts


def test_hook_of_the_script_stays_when_a_part_is_frozen():
    for counts in ranks.values(ranks.run(3, messages_of_a_hook)):
        assert min(counts) >= 1


def sums_of_groups():
    """Sum over ranks 0 and 1, and over rank 2, while a model trains with all of them."""
    with session(batch_size=1, precision="fp64", seed=3) as opened:
        raw = Coder()
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
        groups = [dist.new_group(members) for members in ([0, 1], [2])]
        group = groups[opened.world.rank // 2]
        sums = []
        for points in own_points(opened):
            total = torch.tensor(opened.world.rank + 1.0)
            dist.all_reduce(total, group=group)
            sums.append(total.item())
            opened.step(model.loss(points))
        opened.barrier()
        return sums, [p.tolist() for p in raw.parameters()]


def test_script_may_use_groups_of_some_ranks():
    found = ranks.values(ranks.run(3, sums_of_groups))
    assert [set(sums) for sums, _ in found] == [{3.0}, {3.0}, {3.0}]
    assert found[0][1] == found[1][1] == found[2][1]


def train_frozen_after_prepare(way):
    with session(batch_size=1, deterministic=True, precision="fp64", seed=3) as opened:
        raw = Coder()
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1, 0.9))
        raw.encoder.requires_grad_(False)
        for _ in range(STEPS):
            for points in own_points(opened):
                opened.step(WAYS[way](model, raw, points))
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@pytest.mark.parametrize("way", ["forward", "loss"])
def test_parameters_frozen_after_prepare_with_deterministic(way):
    """The first step is rehearsed, without the gradients of frozen parameters."""
    (alone,) = ranks.values(ranks.run(1, train_frozen_after_prepare, way))
    for weights in ranks.values(ranks.run(3, train_frozen_after_prepare, way)):
        assert weights == pytest.approx(alone, rel=1e-12)


def unfreeze_beside_batch_norm():
    with session(batch_size=2, deterministic=True, precision="fp64", seed=3) as opened:
        model = small_model().eval()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(2):
            model[0].requires_grad_(step > 0)
            opened.step(model(torch.randn(2, 1, 8, 8, dtype=torch.float64)).square().mean())
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def test_unfreezing_with_deterministic_leaves_the_statistics_of_batch_norm_alone():
    """In eval mode, the backward pass needs the statistics that the forward pass has read."""
    found = ranks.values(ranks.run(3, unfreeze_beside_batch_norm))
    assert found == [found[0]] * 3


def prepare_again():
    """Replace a head, and the optimizer with it."""
    with session(batch_size=1, precision="fp64", seed=3) as opened:
        raw = Coder()
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1))
        optimizer = torch.optim.SGD(raw.parameters(), 0.2)
        prepared, prepared_optimizer = opened.prepare(model, optimizer)
        for points in own_points(opened):
            opened.step(model.loss(points))
        return prepared is model, prepared_optimizer is optimizer, opened.optimizers == [optimizer]


@BACKENDS
def test_prepare_again_replaces_the_optimizer(run):
    assert ranks.values(run(2, prepare_again)) == [(True, True, True)] * 2


class Skipping(Coder):
    """A model with a layer that only some steps use, and one that only the last rank uses."""

    def __init__(self):
        super().__init__()
        self.sometimes, self.elsewhere = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, points, uses=False, here=False):
        codes = self.encode(points)
        codes = self.sometimes(codes) if uses else codes
        return self.decode(self.elsewhere(codes) if here else codes)


def train_skipping(first, steps=10, **options):
    """Train; from step `first` on, every other step leaves a layer out."""
    with session(batch_size=1, precision="fp64", seed=3, **options) as opened:
        raw = Skipping()
        raw.elsewhere.requires_grad_(first == 0)
        optimizer = torch.optim.SGD(raw.parameters(), 0.1, 0.9, weight_decay=0.1)
        model, _ = opened.prepare(raw, optimizer)
        for step in range(steps):
            (points,) = own_points(opened)
            # The last third of the points, which is on the last rank, uses one more layer.
            size = opened.world.world_size
            place = torch.arange(SAMPLES).chunk(size)[opened.world.rank].tolist()
            uses = step < first or step % 2 > 0
            losses = [
                ((model(point[None], uses, first == 0 and number >= 8) - point) ** 2).mean()
                for point, number in zip(points, place, strict=True)
            ]
            opened.step(torch.stack(losses).mean())
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@pytest.mark.parametrize(("size", "deterministic"), [(2, False), (3, False), (3, True)])
def test_layers_that_steps_or_ranks_leave_out_are_found(size, deterministic):
    (alone,) = ranks.values(ranks.run(1, train_skipping, 0))
    found = ranks.values(ranks.run(size, train_skipping_and_log, deterministic))
    for weights, _ in found:
        assert weights == pytest.approx(alone, rel=1e-9)
    assert "the loss does not use sometimes.weight, sometimes.bias" in found[0][1]


def train_skipping_and_log(deterministic):
    """Return the weights, and what this rank has logged."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("hpctrain").addHandler(handler)
    weights = train_skipping(0, deterministic=deterministic)
    return weights, lines.getvalue()


def skip_later(**options):
    return train_skipping(8, **options)


def skip_later_as_declared():
    return train_skipping(8, ddp={"find_unused_parameters": True})


def test_layer_that_a_later_step_leaves_out_is_named():
    for result in ranks.run(2, skip_later):
        assert isinstance(result, UsageError), result
        assert result.code == "HT310"
        assert "no gradient was computed for sometimes.weight, sometimes.bias" in str(result)
        assert "--ddp find-unused-parameters" in str(result)
    (alone,) = ranks.values(ranks.run(1, skip_later))
    for weights in ranks.values(ranks.run(2, skip_later_as_declared)):
        assert weights == pytest.approx(alone, rel=1e-9)


def train_skipping_at_first_and_late(path, **options):
    """Leave a layer out of the second step, and then not before step 16."""
    with session(batch_size=1, precision="fp64", seed=3, run_dir=path, **options) as opened:
        raw = Skipping()
        raw.elsewhere.requires_grad_(False)
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1, 0.9))
        (points,) = own_points(opened)
        with opened.run() as run:
            for step in run.steps(20):
                opened.step(((model(points, step not in (1, 16), False) - points) ** 2).mean())
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def train_and_resume_skipping():
    whole = train_skipping_at_first_and_late("whole", deterministic=True)
    train_skipping_at_first_and_late("cut", deterministic=True, max_steps=4)
    options = {"deterministic": True, "resume": True, "max_steps": 20}
    return whole, train_skipping_at_first_and_late("cut", **options)


def test_resumed_run_knows_that_steps_leave_layers_out():
    for whole, resumed in ranks.values(ranks.run(3, train_and_resume_skipping)):
        assert whole == resumed


def train_and_unfreeze(path, **options):
    """Unfreeze the encoder in the second of three epochs, of four steps each."""
    with session(batch_size=1, run_dir=path, deterministic=True, seed=3, **options) as opened:
        raw = Coder()
        raw.encoder.requires_grad_(False)
        model, optimizer = opened.prepare(
            raw, torch.optim.SGD(raw.decoder.parameters(), 0.1, momentum=0.9)
        )
        batches = [points.float() for points in own_points(opened)] * 4
        with opened.run() as run:
            for epoch in run.epochs():
                if epoch == 1:
                    model.encoder.requires_grad_(True)
                    if len(optimizer.param_groups) == 1:
                        optimizer.add_param_group(
                            {"params": model.encoder.parameters(), "lr": 0.01}
                        )
                for points in run.batches(batches):
                    opened.step(model.loss(points))
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@BACKENDS
@pytest.mark.parametrize("cut", [6, 9])
def test_resume_after_parameters_were_unfrozen_and_added_to_the_optimizer(run, cut):
    for weights, resumed in ranks.values(run(2, train_and_resume_unfrozen, cut)):
        assert weights == resumed


def train_and_resume_unfrozen(cut):
    options = {"max_steps": 12, "epochs": 3}
    weights = train_and_unfreeze("whole", **options)
    train_and_unfreeze("cut", max_steps=cut, epochs=3)
    return weights, train_and_unfreeze("cut", resume=True, **options)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, points, number):
        return self.experts[number](points)


def train_experts(accumulate, deterministic=False):
    """Train; each micro-batch uses another expert, and one process without them uses both."""
    options = {"accumulate": accumulate, "deterministic": deterministic}
    with session(batch_size=1, precision="fp64", seed=3, **options) as opened:
        raw = Experts()
        model, _ = opened.prepare(raw, torch.optim.SGD(raw.parameters(), 0.1, 0.9))
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            both = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
            both = both.chunk(opened.world.world_size, dim=1)[opened.world.rank]
            if accumulate == 1:
                losses = [model(points, number).pow(2).mean() for number, points in enumerate(both)]
                opened.step(torch.stack(losses).mean())
            else:
                for number, points in enumerate(both):
                    opened.step(model(points, number).pow(2).mean())
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_that_micro_batches_leave_out_are_found(deterministic):
    (alone,) = ranks.values(ranks.run(1, train_experts, 1))
    for weights in ranks.values(ranks.run(3, train_experts, 2, deterministic)):
        assert weights == pytest.approx(alone, rel=1e-12)
