"""One battery of checks for every backend: what a session promises, over one rank and more."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, by_world_size, identity, images, session, small_model, train
from torch import nn

import hpctrain
import hpctrain.rundir
from hpctrain.errors import RankMissingError, UsageError

# By default one rank, and as many as make the order of sums matter.
SIZES = pytest.mark.parametrize(
    "sizes", [(1, 3), pytest.param((1, 2, 3, 4), marks=pytest.mark.slow)], ids=str
)


@pytest.mark.parametrize(
    "layout", [(2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in [(1,), (1, 1, 2)])]
)
def test_world_and_backend_agree_on_ranks_and_hosts(run, layout):
    size = sum(layout)
    results = ranks.values(run(size, identity, layout=layout))
    for rank, (world, backend_rank, backend_size) in enumerate(results):
        assert (world.rank, world.world_size) == (rank, size) == (backend_rank, backend_size)
        assert world.num_nodes == len(layout)
        assert world.local_world_size == layout[world.node_rank]
        assert len(world.hosts) == len(layout)
    assert [r[0].node_rank for r in results] == [n for n, t in enumerate(layout) for _ in range(t)]


def sum_values():
    with session(batch_size=2) as opened:
        rank = opened.world.rank
        integer, real, tensor = opened.sum(2**53 + rank, 0.1 * rank, torch.tensor(rank))
        single = opened.sum(rank)
        shared = opened.backend.broadcast_object({"from": rank})
        # A rank that saw no sample has an int where the others have a float.
        mixed = opened.sum(0.5 if rank == 0 else 0)
        texts = opened.backend.all_gather_text("" if rank else "of rank 0")
        return integer, real, tensor, single, shared, mixed, texts


@pytest.mark.parametrize("size", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_are_exact_and_equal_on_all_ranks(run, size):
    results = ranks.values(run(size, sum_values))
    integer = sum(2**53 + rank for rank in range(size))
    ones = sum(range(size))
    for result in results:
        assert result[0] == integer
        assert isinstance(result[0], int)
        assert result[1] == pytest.approx(0.1 * ones, rel=1e-15)
        assert result[2:] == (ones, ones, {"from": 0}, 0.5, ["of rank 0", *[""] * (size - 1)])


def sum_in_the_background():
    with session(batch_size=2) as opened:
        rank = opened.world.rank
        early = opened.backend.sum_async([1.0]) if rank == 0 else None
        waited = opened.sum(rank)
        return waited, list((early or opened.backend.sum_async([1.0])).values())


@pytest.mark.parametrize("run", ["auto"], indirect=True)
def test_sums_in_the_background_are_apart_from_those_that_ranks_wait_for(run):
    """Rank 0 begins a sum in the background before another sum, the other ranks after it."""
    assert ranks.values(run(3, sum_in_the_background)) == [(3, [3.0])] * 3


def train_12_steps():
    with session(
        global_batch=12, batch_size=1, precision="fp64", max_steps=12, log_every=1, run_dir="run"
    ) as opened:
        losses, model = train(opened, 12)
        return losses, opened.batches, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    "sizes", [(1, 2, 3), pytest.param((1, 4, 6), marks=pytest.mark.slow)], ids=str
)
def test_same_losses_and_weights_for_every_world_size(run, tmp_path, monkeypatch, sizes):
    """Equal micro-batches in one process that accumulates and in worlds of several ranks."""
    found = by_world_size(run, sizes, train_12_steps, tmp_path, monkeypatch)
    alone, _, _ = found[1][0]
    assert len(alone) == len(set(alone)) == 12
    for size, results in found.items():
        losses, batches, weights = results[0]
        assert batches.accumulate == 12 // size
        assert losses == pytest.approx(alone, rel=1e-9)
        for _, _, others in results[1:]:
            for name in weights:
                if "running" not in name:
                    assert torch.equal(weights[name], others[name]), f"{name} differs by rank"


def check_attributes():
    with session(batch_size=2) as opened:
        model = small_model()
        model.note = "a note"
        names = list(model.state_dict())
        parameters = [name for name, _ in model.named_parameters()]
        prepared = opened.prepare(model)
        assert prepared.note == "a note"
        assert list(prepared.state_dict()) == names
        assert [name for name, _ in prepared.named_parameters()] == parameters
        prepared.load_state_dict(small_model().state_dict())
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            _ = prepared.nothing_of_this_name
    return True


@HOROVOD_SLOW
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_prepared_model_keeps_names_and_attributes(run, size):
    assert all(ranks.values(run(size, check_attributes)))


def evaluate_uneven_parts():
    with session(batch_size=2) as opened:
        model = small_model()
        if opened.world.rank == 1:
            model[1].running_mean += 5  # statistics of its own, as training leaves them
        model = opened.prepare(model)
        loader = opened.loader(images(101), train=False, batch_size=7)
        model.eval()
        correct = count = loss = 0
        with torch.no_grad():
            for batch, targets in loader:
                out = model(batch)
                correct += (out.argmax(1) == targets).sum()
                loss += nn.functional.cross_entropy(out, targets, reduction="sum").double()
                count += len(targets)
        return opened.sum(correct, count, loss)


@SIZES
def test_evaluation_counts_each_sample_once_for_every_world_size(run, sizes):
    alone = ranks.values(run(1, evaluate_uneven_parts))[0]
    assert alone[1] == 101
    for size in sizes[1:]:
        for result in ranks.values(run(size, evaluate_uneven_parts)):
            assert result[:2] == alone[:2]
            assert result[2] == pytest.approx(alone[2], rel=1e-6)


def train_in_precision(precision, clip):
    with session(
        batch_size=8, max_steps=12, precision=precision, clip_norm=clip, log_every=1, run_dir="run"
    ) as opened:
        losses, model = train(opened, 12)
        dtypes = {p.dtype for p in model.parameters()}
        return losses, dtypes, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("precision", "clip"),
    [
        ("bf16", None),
        ("fp16", 0.5),
        pytest.param("fp64", 0.5, marks=pytest.mark.slow),
        pytest.param("fp32", None, marks=pytest.mark.slow),
    ],
)
def test_every_precision_trains_with_equal_weights_on_all_ranks(run, precision, clip):
    results = ranks.values(run(3, train_in_precision, precision, clip))
    losses = results[0][0]
    assert all(loss == loss for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3])
    expected = torch.float64 if precision == "fp64" else torch.float32
    for _, dtypes, weights in results:
        assert dtypes == {expected}
        assert torch.equal(weights, results[0][2])


def clipped_step_norm(precision):
    with session(batch_size=8, precision=precision, clip_norm=0.01) as opened:
        model = small_model()
        before = [p.detach().clone() for p in model.parameters()]
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        batch, targets = next(iter(opened.loader(images(240))))
        with opened.autocast():
            loss = nn.functional.cross_entropy(model(batch), targets)
        opened.step(loss)
        moved = [(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]
        return torch.cat(moved).norm().item()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_clip_norm_applies_to_unscaled_gradients(run, precision):
    for norm in ranks.values(run(3, clipped_step_norm, precision)):
        assert norm == pytest.approx(0.01, rel=1e-2)


def open_two_sessions():
    first = dict(os.environ)
    with session(batch_size=2) as opened:
        inside = opened.sum(1)
    changed = set(os.environ.items()) ^ set(first.items())
    assert not changed, changed
    assert not torch.distributed.is_initialized()
    with session(batch_size=2) as opened:
        return inside, opened.sum(opened.world.rank)


def test_second_session_in_one_process_works_and_restores_environment(run):
    assert ranks.values(run(3, open_two_sessions)) == [(3, 3)] * 3


def train_with_dropout():
    with session(
        global_batch=24,
        batch_size=2,
        max_steps=6,
        precision="fp64",
        deterministic=True,
        log_every=1,
        run_dir="run",
    ) as opened:
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
        return train(opened, 6, model)[0]


@HOROVOD_SLOW
@SIZES
def test_deterministic_dropout_is_equal_for_every_world_size(run, tmp_path, monkeypatch, sizes):
    found = by_world_size(run, sizes, train_with_dropout, tmp_path, monkeypatch)
    assert len(set(found[1][0])) == 6
    for losses, *_ in found.values():
        assert losses == pytest.approx(found[1][0], rel=1e-9)


def step_two_models():
    with session(batch_size=2) as opened:
        torch.manual_seed(opened.world.rank)
        critic, maker = nn.Linear(4, 1), nn.Linear(4, 4)
        for parameter in (frozen := nn.Linear(2, 2)).parameters():
            parameter.requires_grad = False
        first = torch.optim.SGD(critic.parameters(), 0.1)
        second = torch.optim.SGD(maker.parameters(), 0.1)
        critic, maker, first, second, frozen = opened.prepare(critic, maker, first, second, frozen)
        start = critic.weight.detach().clone()
        opened.step(critic(torch.ones(2, 4)).mean(), first)
        moved = critic.weight.detach().clone()
        opened.step(critic(maker(torch.ones(2, 4))).mean(), second)
        gradients = [p.grad for p in critic.parameters() if p.grad is not None]
        return start, moved, critic.weight.detach().clone(), gradients, frozen.weight


def test_two_models_and_optimizers_step_separately(run):
    results = ranks.values(run(3, step_two_models))
    for start, moved, end, gradients, frozen in results:
        assert not torch.equal(start, moved)
        assert torch.equal(moved, end)
        assert not gradients
        assert torch.equal(start, results[0][0])
        assert torch.equal(frozen, results[0][4])


def pass_loader_arguments():
    with session(batch_size=2) as opened:
        opened.loader(images(20), shuffle=True, num_workers=2)


def test_loader_arguments_that_the_session_sets_are_refused():
    (result,) = ranks.run(1, pass_loader_arguments)
    assert isinstance(result, hpctrain.HpctrainError)
    assert "num_workers, shuffle" in str(result)


# What is torch.distributed's alone.


def count_reductions():
    with hpctrain.Session(global_batch=24, batch_size=2, max_steps=3, run_dir="run") as session:
        model = small_model()
        model, _optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        seen = []
        model.register_comm_hook(seen, _count)
        steps = []
        with session.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(session.loader(images(240))):
                    before = len(seen)
                    loss = nn.functional.cross_entropy(model(batch), targets)
                    stepped = session.step(loss)
                    steps.append((stepped, len(seen) > before))
        return steps


def _count(seen, bucket):
    seen.append(1)
    return (
        torch.distributed.all_reduce(
            bucket.buffer() / torch.distributed.get_world_size(), async_op=True
        )
        .get_future()
        .then(lambda future: future.value()[0])
    )


def test_ddp_all_reduces_only_after_the_last_micro_batch():
    for steps in ranks.values(ranks.run(3, count_reductions)):
        assert (
            steps
            == [(False, False)] * 3 + [(True, True)] + ([(False, False)] * 3 + [(True, True)]) * 2
        )


def open_after_init_process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        hpctrain.Session(batch_size=2)
    finally:
        torch.distributed.destroy_process_group()


def test_existing_process_group_is_refused():
    for result in ranks.run(2, open_after_init_process_group):
        assert isinstance(result, hpctrain.HpctrainError)
        assert result.exit_code == 2
        assert result.code == "HT308"
        assert "init_process_group" in str(result)


def connect_late():
    """Delay rank 0, and return whether it was connected when the session was open."""
    connect = torch.distributed.init_process_group

    def slow(*arguments, **keywords):
        connect(*arguments, **keywords)
        time.sleep(1)
        Path("connected").touch()

    if hpctrain.detect().rank == 0:
        torch.distributed.init_process_group = slow
    with hpctrain.Session(batch_size=2, backend="ddp"):
        return Path("connected").exists()


def test_no_rank_leaves_before_all_are_connected():
    """Otherwise the slow rank would report a lost rank, and not the error of that rank."""
    assert ranks.values(ranks.run(3, connect_late)) == [True] * 3


def fail_to_connect():
    connect = torch.distributed.init_process_group

    def fails(*arguments, **keywords):
        connect(*arguments, **keywords)
        raise RuntimeError("no route to host")

    if hpctrain.detect().rank == 1:
        torch.distributed.init_process_group = fails
    hpctrain.Session(batch_size=2, backend="ddp")


def test_rank_that_does_not_connect_is_named_at_once():
    results = ranks.run(3, fail_to_connect, timeout=60)
    assert [type(result) for result in results] == [RankMissingError] * 3
    assert [result.code for result in results] == ["HT305", "HT306", "HT305"]
    assert "did not connect rank 1 over gloo" in str(results[1])
    for rank in (0, 2):
        assert "rank 1 on node1 took part in the rendezvous, but did not connect" in str(
            results[rank]
        )


def sum_on_one_rank():
    with hpctrain.Session(batch_size=2, backend="ddp", timeout=120) as session:
        return session.backend.name, session.sum(5)


def test_ddp_with_one_rank():
    assert ranks.values(ranks.run(1, sum_on_one_rank)) == [("ddp", 5)]


def prepare_other_weights():
    with session(batch_size=2) as opened:
        torch.manual_seed(opened.world.rank)
        before = small_model()
        own = before[0].weight.tolist()
        return own, opened.prepare(before)[0].weight.tolist()


@HOROVOD_SLOW
def test_all_ranks_begin_with_the_weights_of_rank_0(run):
    results = ranks.values(run(3, prepare_other_weights))
    assert len({str(own) for own, _ in results}) == 3
    assert [prepared for _, prepared in results] == [results[0][0]] * 3


def load(paths, **options):
    """Load weights into two prepared models, and into a part of one; return their states."""
    with session(batch_size=2, **options) as opened:
        path = paths[opened.world.rank]
        model, other = opened.prepare(small_model(), small_model())
        opened.load_weights(model, path)
        opened.load_weights(other, path, skip=["0.*", "1.*"])
        opened.load_weights(other[0], path, prefix="0.")
        opened.load_weights(other[1], path, prefix="1.")
        masters = [[opened.precision.master(p) for p in one.parameters()] for one in (model, other)]
        states = [one.state_dict() for one in (model, other)]
        values = [{name: value.tolist() for name, value in state.items()} for state in states]
        return values, [[master.tolist() for master in some] for some in masters]


@pytest.mark.parametrize("precision", ["fp32", "O2"])
@HOROVOD_SLOW
def test_loaded_weights_are_those_of_the_file_on_all_ranks(run, precision, tmp_path):
    """Only rank 0 reads; in half precision, the master weights are not rounded."""
    torch.manual_seed(5)
    source = small_model()
    source[1].running_mean.uniform_()
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    paths = [tmp_path / "weights.pt", "absent", "absent"]
    own = {name: value.tolist() for name, value in source.state_dict().items()}
    for states, masters in ranks.values(run(3, partial(load, precision=precision), paths)):
        for state, master in zip(states, masters, strict=True):
            assert master == [value.tolist() for value in source.parameters()]
            assert state["1.running_mean"] == own["1.running_mean"]
            assert precision == "O2" or state == own


@HOROVOD_SLOW
def test_file_that_does_not_fit_is_an_error_on_all_ranks(run, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    for path, words in (("other.pt", "but not 0.weight"), ("none.pt", "No such file")):
        results = run(3, load, [tmp_path / path] * 3)
        assert {type(result) for result in results} == {UsageError}, results
        assert all(words in result.found for result in results)
