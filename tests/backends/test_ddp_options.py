"""The options of the ddp backend: what they change, and what is refused before it goes wrong."""

import pytest
import ranks
import torch
from torch import nn

import hpctrain


def wide_model():
    """Return a model with 2 MiB of gradients, which torch sends in two buckets."""
    return nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64), nn.Linear(64, 3))


def train_variants(variants):
    """Return, for each set of options, the change of the weights and the settings of DDP."""
    found = []
    for options in variants:
        with hpctrain.Session(batch_size=2, backend="ddp", timeout=120, **options) as session:
            model = wide_model()
            model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1, 0.9))
            start, kind = weights(model), next(model.parameters()).dtype
            generator = torch.Generator().manual_seed(session.world.rank)
            for _ in range(6 * session.batches.accumulate):
                x = torch.randn(2, 64, generator=generator, dtype=kind).to(session.device)
                session.step(model(x).square().mean())
            settings = model.gradient_as_bucket_view, model.static_graph, model.bucket_bytes_cap
            found.append((weights(model) - start, settings))
    return found


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_on_all_ranks(*variants, run=ranks.run):
    results = ranks.values(run(3, train_variants, variants))
    for found in results:
        for (change, _), (expected, _) in zip(found, results[0], strict=True):
            assert torch.equal(change, expected)
    return results[0]


def test_gradient_as_bucket_view_is_bit_equal_to_copies():
    found = train_on_all_ranks(
        {"accumulate": 2}, {"accumulate": 2, "ddp": "gradient-as-bucket-view=no"}
    )
    (views, settings), (copies, other_settings) = found
    assert (settings[0], other_settings[0]) == (True, False)
    assert torch.equal(views, copies)


def check_order_of_sums(run):
    """Check that buckets and a static graph change no more of the weights than rounding does."""
    found = train_on_all_ranks(
        {"precision": "fp64"},
        {"precision": "fp64", "ddp": {"bucket_mb": 0.1}},
        {"precision": "fp64", "ddp": "static-graph"},
        run=run,
    )
    mib = 2**20
    assert [settings[1:] for _, settings in found] == [
        (False, 25 * mib),
        (False, int(0.1 * mib)),
        (True, 25 * mib),
    ]
    plain = found[0][0]
    for moved, _ in found[1:]:
        assert (moved - plain).norm() < 1e-10 * plain.norm()


def test_bucket_size_and_static_graph_change_only_the_order_of_sums():
    check_order_of_sums(ranks.run)


# The distance from plain gradients. PowerSGD sends two of the six directions of six samples.
COARSE = {"fp16": 2**-10, "bf16": 2**-7, "powersgd": 0.5}


def check_compression(run):
    """Check each compression: equal weights on all ranks, in each repetition, near plain ones."""
    more = {"powersgd": {"powersgd_start": 3, "powersgd_rank": 2}}
    variants = [{"ddp": {"compression": name, **more.get(name, {})}} for name in COARSE]
    (plain, _), *found = train_on_all_ranks({}, *variants, *variants, run=run)
    for number, limit in enumerate(COARSE.values()):
        (first, _), (again, _) = found[number], found[number + len(COARSE)]
        assert torch.equal(first, again)
        assert 0 < (first - plain).norm() < limit * plain.norm()


def test_ddp_compression_is_equal_on_all_ranks_and_repeatable():
    check_compression(ranks.run)


REFUSED = [
    ({"ddp": "powersgd-rank=4"}, ["--ddp powersgd-rank=4", "compression=powersgd", "HT311"]),
    (
        {"ddp": "compression=fp16,powersgd-start=5"},
        ["--ddp powersgd-start=5 with compression=fp16"],
    ),
    ({"ddp": "compression=powersgd,powersgd-start=1"}, ["compression=powersgd,powersgd-start=2"]),
    (
        {"ddp": "compression=powersgd", "precision": "fp16"},
        ["overflow", "--precision bf16", "HT313"],
    ),
    ({"ddp": "compression=powersgd,bucket-mb=1"}, ["remove bucket-mb from --ddp"]),
    (
        {"ddp": "static-graph", "accumulate": 2},
        ["fix:      remove static-graph from --ddp", "or:       --accumulate 1"],
    ),
]


def refusals():
    found = []
    for options, _ in REFUSED:
        with pytest.raises(hpctrain.errors.UsageError) as refused:
            hpctrain.Session(batch_size=2, backend="ddp", timeout=120, **options)
        found.append(str(refused.value))
    return found


def test_ddp_options_refused_before_the_ranks_connect():
    (found,) = ranks.values(ranks.run(1, refusals))
    for message, (_, words) in zip(found, REFUSED, strict=True):
        for word in words:
            assert word in message


def test_bf16_compression_refused_by_torch_without_nccl(monkeypatch):
    from hpctrain.backends import BackendSettings
    from hpctrain.backends.ddp import ddp_options

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    own = {"compression": "bf16", "static_graph": False, "powersgd_rank": 1, "powersgd_start": 1000}
    with pytest.raises(hpctrain.errors.UsageError, match="--ddp compression=fp16") as refused:
        ddp_options.refuse_options(BackendSettings(1.0, 1.0, own=own), "gloo")
    assert refused.value.code == "HT316"


def sparse_model():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))


def half_model():
    return nn.Linear(2, 2).bfloat16()


def mixed_model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


def prepare_cases(cases):
    found = []
    for options, model in cases:
        with hpctrain.Session(batch_size=2, backend="ddp", timeout=120, **options) as session:
            try:
                session.prepare(model())
            except hpctrain.errors.UsageError as error:
                found.append(str(error))
    return found


def test_ddp_compression_refused_for_unsupported_gradients():
    cases = [
        ({"ddp": "compression=fp16"}, sparse_model, ["0 has sparse gradients", "sparse=False"]),
        ({"ddp": "compression=powersgd"}, sparse_model, ["0 has sparse gradients"]),
        ({"ddp": "compression=fp16", "precision": "fp64"}, wide_model, ["in float64"]),
        ({"ddp": "compression=fp16"}, half_model, ["in bfloat16"]),
        ({"ddp": "compression=powersgd"}, mixed_model, ["float32 and float64", "one message"]),
    ]
    results = ranks.values(ranks.run(3, prepare_cases, [case[:2] for case in cases]))
    for found in results:
        assert len(found) == len(cases)
        for message, (*_, words) in zip(found, cases, strict=True):
            for word in [*words, "remove compression from --ddp", "HT312"]:
                assert word in message
