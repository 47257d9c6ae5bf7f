"""Every precision: numbers, overflow, resume, and refused settings."""

import copy
import json
from functools import partial

import faults
import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, fit, images, session, small_model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hpctrain
from hpctrain import precision
from hpctrain.checkpoint import open_checkpoint
from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory

STEPS, OVERFLOW = 8, 3  # the gradients of step 3 are beyond the range of half precision
CPU = torch.device("cpu")


def losses_of(model, batch, targets, step):
    loss = nn.functional.cross_entropy(model(batch), targets)
    return loss * 1e6 if step == OVERFLOW else loss


def train_by_session(name, clip=None, **options):
    """Train in a session; return losses, weights, masters, and the last row of metrics."""
    with session(
        batch_size=4, max_steps=STEPS, precision=name, clip_norm=clip, log_every=1, run_dir=name,
        **options,
    ) as opened:  # fmt: skip
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        model, optimizer = opened.prepare(model, optimizer)
        losses = []
        with opened.run() as run:
            for _ in run.epochs():
                for step, (batch, targets) in enumerate(run.batches(opened.loader(images(240)))):
                    with opened.autocast():
                        loss = losses_of(model, batch, targets, step)
                    opened.step(loss)
                    run.log(loss=loss)
                    losses.append(loss.item())
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        masters = [master.clone() for master in opened.precision.masters()]
        *_, row = RunDirectory(name).rows()
        return losses, weights, masters, row


def train_by_autocast(half, clip, **options):
    """Train by torch's documented loop: autocast, GradScaler for fp16, channels last on a GPU."""
    with session(batch_size=4, **options) as opened:
        device = opened.device
        layout = torch.contiguous_format if device == CPU else torch.channels_last
        batches = list(opened.loader(images(240)))[:STEPS]
        torch.manual_seed(0)
        model = small_model().to(device, memory_format=layout)
        scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        losses = []
        for step, (batch, targets) in enumerate(batches):
            optimizer.zero_grad()
            with torch.autocast(device.type, half):
                loss = losses_of(model, batch, targets, step)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses, {n: p.detach() for n, p in model.named_parameters()}, scaler.get_scale()


AUTOCAST = pytest.mark.parametrize(
    ("name", "half"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("O1", torch.float16)]
)


def check_equal_to_torch(half, results, expected_results):
    """Check that the results of `train_by_session` and `train_by_autocast` are bit-equal."""
    (losses, weights, _, row), (expected, by_name, scale) = results, expected_results
    assert losses == expected
    assert all(torch.equal(weights[name], tensor) for name, tensor in by_name.items())
    if half == torch.float16:
        assert (row["skipped"], row["loss_scale"]) == (1, scale) == (1, 2.0**15)


@pytest.mark.parametrize("clip", [None, 0.5])
@AUTOCAST
def test_autocast_equals_the_loop_that_torch_documents(name, half, clip):
    (results,) = ranks.values(ranks.run(1, train_by_session, name, clip))
    (expected,) = ranks.values(ranks.run(1, train_by_autocast, half, clip))
    check_equal_to_torch(half, results, expected)


def train_masters_baseline(clip):
    """Train as in arXiv 1710.03740: half weights, fp32 masters, a scaled loss."""
    with session(batch_size=4) as opened:
        batches = list(opened.loader(images(240)))[:STEPS]
    torch.manual_seed(0)
    model, scale = small_model(), 2.0**16
    originals = {n: p.detach().clone() for n, p in model.named_parameters()}
    for module in (model[0], model[4]):
        module.half()
    copies = dict(model.named_parameters())
    masters = {n: nn.Parameter(original) for n, original in originals.items()}
    optimizer = torch.optim.SGD(masters.values(), 0.05, 0.9)
    losses = []
    for step, (batch, targets) in enumerate(batches):
        loss = losses_of(lambda x: model(x.half()).float(), batch, targets, step)
        (loss * scale).backward()
        for name, master in masters.items():
            master.grad = copies[name].grad.float() / scale
            copies[name].grad = None
        losses.append(loss.item())
        if not all(master.grad.isfinite().all() for master in masters.values()):
            scale /= 2
            continue
        if clip:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                copies[name].copy_(master)
    return losses, {n: p.detach() for n, p in copies.items()}, masters


@pytest.mark.parametrize("clip", [None, 0.5])
def test_o2_steps_fp32_masters_and_keeps_batch_norm_in_fp32(clip):
    losses, weights, masters, row = ranks.values(ranks.run(1, train_by_session, "O2", clip))[0]
    expected, by_name, expected_masters = ranks.values(ranks.run(1, train_masters_baseline, clip))[
        0
    ]
    assert losses == expected
    assert {n: p.dtype for n, p in weights.items()} == {n: p.dtype for n, p in by_name.items()}
    assert {p.dtype for n, p in weights.items() if n.startswith("1.")} == {torch.float32}
    assert {p.dtype for n, p in weights.items() if n[0] in "04"} == {torch.float16}
    assert all(torch.equal(weights[name], tensor) for name, tensor in by_name.items())
    halves = [
        expected_masters[name] for name, weight in weights.items() if weight.dtype == torch.float16
    ]
    assert all(torch.equal(a, b) for a, b in zip(masters, halves, strict=True))
    assert (row["skipped"], row["loss_scale"]) == (1, 2.0**15)


def average_by_session(name):
    """Train with an average; return it, that of the fp32 weights, and a resumed run's."""
    found = []
    for limit in (5, STEPS):
        with session(
            batch_size=4, max_steps=limit, precision=name, run_dir=name, resume=limit > 5
        ) as opened:
            model = small_model()
            update = get_ema_multi_avg_fn(0.999)
            average = AveragedModel(model, multi_avg_fn=update, use_buffers=True)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
            model, average, optimizer = opened.prepare(
                model, average.requires_grad_(False), optimizer
            )
            weight = optimizer.param_groups[0]["params"][0]
            with opened.run() as run:
                for _ in run.epochs():
                    for step, (batch, targets) in enumerate(
                        run.batches(opened.loader(images(240)))
                    ):
                        with opened.autocast():
                            loss = losses_of(model, batch, targets, step + 100)
                        opened.step(loss)
                        average.update_parameters(model)
                        known = weight.detach().float().clone()
                        found.append(found[-1].lerp(known, 0.001) if found else known)
            output = average(images(4)[0][0][None])
            assert (output.dtype, average.module[1].running_mean.dtype) == (torch.float32,) * 2
    return average.module[0].weight.detach(), found[-1], found[0]


@pytest.mark.parametrize("name", ["O2", "O3", "bf16"])
def test_average_of_weights_is_in_fp32_and_follows_the_masters(name):
    average, expected, first = ranks.values(ranks.run(1, average_by_session, name))[0]
    assert average.dtype == torch.float32
    moved = (average - first).abs().max()
    # In half precision, an average would not have moved at all.
    assert 0 < moved < 0.01
    assert (average - expected).abs().max() < 1e-3 * moved


def keep_average_of_prepared_model(name):
    with session(batch_size=4, max_steps=1, precision=name, run_dir="run") as opened:
        average = AveragedModel(opened.prepare(small_model()))
        with opened.run(state={"average": average}):
            pass


def test_average_of_a_model_in_half_precision_is_refused():
    with pytest.raises(UsageError, match="with an average of weights in half precision"):
        ranks.values(ranks.run(1, keep_average_of_prepared_model, "O2"))
    ranks.values(ranks.run(1, keep_average_of_prepared_model, "bf16"))


def prepared_types(name, options):
    with session(batch_size=2, precision=name, **options) as opened:
        model = opened.prepare(small_model())
        output = model(torch.ones(2, 1, 8, 8))
        scale = opened.precision.numbers().get("loss_scale", 1.0)
        return {str(t.dtype)[6:] for t in model[1].state_dict().values()}, output.dtype, scale


@pytest.mark.parametrize(
    ("name", "options", "batch_norm", "scale"),
    [
        ("O0", {}, "float32", 1.0),
        ("O0", {"loss_scale": 128}, "float32", 128.0),
        ("O1", {"loss_scale": 512.0}, "float32", 512.0),
        ("O2", {}, "float32", 65536.0),
        ("O2", {"keep_batchnorm_fp32": False, "loss_scale": 64}, "float16", 64.0),
        ("O3", {}, "float16", 1.0),
        ("O3", {"keep_batchnorm_fp32": True, "loss_scale": "dynamic"}, "float32", 65536.0),
        ("fp16", {"loss_scale": 8.0}, "float32", 8.0),
    ],
)
def test_apex_defaults_of_batch_norm_and_loss_scale(name, options, batch_norm, scale):
    ((types, output, found),) = ranks.values(ranks.run(1, prepared_types, name, options))
    assert types == {batch_norm, "int64"}
    assert output == (torch.bfloat16 if name == "bf16" else torch.float32)
    assert found == scale


@pytest.mark.parametrize("scale", [64.0, "dynamic"])
def test_o3_unscales_gradients_in_half_precision(scale):
    ((losses, weights, masters, row),) = ranks.values(
        ranks.run(1, partial(train_by_session, "O3", loss_scale=scale))
    )
    ((expected, *_),) = ranks.values(ranks.run(1, train_by_session, "fp16"))
    assert not masters
    assert {p.dtype for p in weights.values()} == {torch.float16}
    assert all(p.isfinite().all() for p in weights.values())
    assert losses == pytest.approx(expected, rel=0.05)
    assert row["skipped"] == 1
    assert row["loss_scale"] == (64.0 if scale == 64.0 else 2.0**15)


def overflow_on_rank_1(name):
    """Train with one overflow, on rank 1 only."""
    with session(
        batch_size=4,
        max_steps=5,
        precision=name,
        log_every=1,
        run_dir="run",
        timeout=120,
        loss_scale=1024.0,
    ) as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05, 0.9))
        seen = []

        def overflow(run, loss):
            seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            return loss * 1e9 if run.step == 2 and opened.world.rank == 1 else loss

        fit(opened, model, opened.loader(images(240)), taken=overflow)
        return seen, int(opened.precision.nonfinite.skipped)


@pytest.mark.parametrize("name", ["fp16", "O2"])
def test_overflow_on_one_rank_is_skipped_by_all(run, name):
    results = ranks.values(run(3, overflow_on_rank_1, name))
    assert [row["skipped"] for row in RunDirectory("run").rows()] == [0, 0, 1, 1, 1]
    for seen, skipped in results:
        assert skipped == 1
        assert torch.equal(seen[2], seen[3])
        assert not torch.equal(seen[3], seen[4])
        assert all(torch.equal(a, b) for a, b in zip(seen, results[0][0], strict=True))


def train_until_nonfinite(name, resume):
    with session(
        batch_size=4, max_steps=400, precision=name, log_every=1, run_dir="run", checkpoint_every=2,
        max_nonfinite=5, resume=resume, timeout=120,
    ) as opened:  # fmt: skip
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05, 0.9))
        loader = opened.loader(images(240))
        fit(
            opened,
            model,
            loader,
            taken=lambda run, loss: loss * torch.inf if run.step >= 3 else loss,
        )


@pytest.mark.parametrize("name", ["fp32", "fp16"])
@HOROVOD_SLOW
def test_nonfinite_run_ends_with_its_last_good_checkpoint(run, name):
    """fp32 weights become nonfinite, which the next checkpoint detects; fp16 skips the steps."""
    results = run(3, train_until_nonfinite, name, False)
    assert {type(result) for result in results} == {hpctrain.errors.NonFiniteError}
    assert [result.reported_by_rank_0 for result in results] == [False, True, True]
    assert results[0].fixes[0].startswith("--resume")
    assert "continues from" in results[0].fixes[0]
    message = "are no longer finite at step 4" if name == "fp32" else "steps in a row overflowed"
    assert message in results[0].found
    directory = RunDirectory("run")
    for step in directory.steps():
        (model,) = open_checkpoint(directory.checkpoint(step), step).read()["model"]
        assert all(tensor.isfinite().all() for tensor in model.values())
    assert directory.steps()[0] <= 2 or name == "fp16"
    assert json.loads(directory.summary.read_text())["status"] == "failed"


def test_nan_losses_end_a_run_before_its_checkpoint():
    (result,) = ranks.run(1, train_with_nan_losses)
    assert isinstance(result, hpctrain.errors.NonFiniteError)
    assert "--max-nonfinite" in result.expected


def train_with_nan_losses():
    with session(
        batch_size=4, max_steps=4000, log_every=1, run_dir="run", max_nonfinite=7
    ) as opened:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        fit(opened, lambda batch: model(batch) * float("nan"), opened.loader(images(24000)))


class Interrupted(Exception):
    pass


def train_until(name, end, resume):
    """Train six steps, of which the first overflows, with a checkpoint each; stop at `end`."""
    with session(
        batch_size=4, max_steps=6, precision=name, run_dir="run", resume=resume,
        deterministic=True, loss_scale="dynamic", checkpoint_every=1,
    ) as opened:  # fmt: skip
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05, 0.9))

        def overflow_or_stop(run, loss):
            if run.step == end:
                raise Interrupted
            return loss * 1e6 if run.step == 0 else loss

        fit(opened, model, opened.loader(images(240)), taken=overflow_or_stop)
        weights = {n: t.clone() for n, t in model.state_dict().items()}
        return weights, opened.precision.numbers(), list(opened.precision.masters())


@pytest.mark.parametrize("name", ["fp16", "O2", pytest.param("O3", marks=pytest.mark.slow)])
@HOROVOD_SLOW
def test_resume_restores_loss_scale_and_masters(run, name, tmp_path, monkeypatch):
    """Use two ranks, whose sums have only one order."""
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    for folder in (uninterrupted, resumed):
        folder.mkdir()
    monkeypatch.chdir(uninterrupted)
    expected = ranks.values(run(2, train_until, name, None, False))
    monkeypatch.chdir(resumed)
    assert {type(result) for result in run(2, train_until, name, 4, False)} == {Interrupted}
    found = ranks.values(run(2, train_until, name, None, True))
    assert faults.started_at() == [0, 4]
    # Of rank 0: a checkpoint has no batch norm statistics of other ranks.
    weights, numbers, masters = expected[0]
    assert numbers == found[0][1]
    assert numbers["skipped"] >= 1
    assert all(torch.equal(weights[n], found[0][0][n]) for n in weights)
    assert all(torch.equal(a, b) for a, b in zip(masters, found[0][2], strict=True))


def masters_after_prepare_and_load():
    with session(batch_size=2, precision="O2") as opened:
        torch.manual_seed(opened.world.rank)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = opened.prepare(model, optimizer)
        first = next(iter(opened.precision.masters())).clone()
        # A later load also sets the masters.
        model.load_state_dict({n: torch.ones_like(t) for n, t in model.state_dict().items()})
        return first, [float(m.sum() / m.numel()) for m in opened.precision.masters()]


@HOROVOD_SLOW
def test_o2_masters_start_from_rank_0_and_follow_load_state_dict(run):
    results = ranks.values(run(3, masters_after_prepare_and_load))
    assert all(torch.equal(first, results[0][0]) for first, _ in results)
    assert {value for _, means in results for value in means} == {1.0}


def open_and_prepare(options, half=False):
    with session(batch_size=2, **options) as opened:
        model = small_model()
        opened.prepare(model.half() if half else model)


@pytest.mark.parametrize("name", ["fp16", "O1"])
def test_half_model_under_autocast_is_refused(name):
    (error,) = ranks.run(1, open_and_prepare, {"precision": name}, True)
    assert isinstance(error, hpctrain.errors.UsageError)
    assert "0.weight of the Sequential is in half precision" in error.found
    assert error.code == "HT404"
    assert error.fixes[0] == f"remove model.half() and keep --precision {name}"
    assert "--precision O2" in error.fixes[1]


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        ({"loss_scale": 8.0}, "--loss-scale with --precision fp32", "HT401"),
        (
            {"precision": "bf16", "loss_scale": "dynamic"},
            "--loss-scale with --precision bf16",
            "HT401",
        ),
        ({"precision": "O1", "keep_batchnorm_fp32": True}, "--keep-batchnorm-fp32 with", "HT401"),
        ({"precision": "tf32"}, "--precision tf32 on a CPU", "HT402"),
        ({"precision": "fp16", "loss_scale": -1.0}, "--loss-scale -1.0", "HT501"),
        ({"precision": "fp16", "loss_scale": "static"}, "--loss-scale 'static'", "HT501"),
    ],
)
def test_unsupported_precision_settings_are_refused(options, message, code):
    (error,) = ranks.run(1, open_and_prepare, options)
    assert isinstance(error, hpctrain.errors.UsageError)
    assert message in error.found
    assert error.code == code
    assert error.exit_code == 2


class FakeGpu:
    """A fake GPU: its properties as torch.cuda returns them."""

    def __init__(self, monkeypatch, name, bf16, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bf16)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("name", "bf16", "capability", "chosen"),
    [("H200", True, (9, 0), "bf16"), ("V100", False, (7, 0), "fp16")],
)
def test_auto_precision_follows_the_gpu(monkeypatch, caplog, name, bf16, capability, chosen):
    FakeGpu(monkeypatch, name, bf16, capability)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    caplog.set_level("INFO", logger="hpctrain")
    precision.logger.addHandler(caplog.handler)
    try:
        opened = precision.open_precision(
            "auto", torch.device("cuda", 0), precision.PrecisionSettings()
        )
    finally:
        precision.logger.removeHandler(caplog.handler)
    assert opened.name == chosen
    assert f"precision auto: {chosen}" in caplog.text
    assert name in caplog.text


def test_auto_precision_is_fp32_on_cpu(monkeypatch):
    assert precision.open_precision("auto", CPU, precision.PrecisionSettings()).name == "fp32"
    FakeGpu(monkeypatch, "V100", False, (7, 0))
    with pytest.raises(hpctrain.errors.UsageError, match="--precision tf32 on V100") as refused:
        precision.open_precision("tf32", torch.device("cuda", 0), precision.PrecisionSettings())
    assert refused.value.code == "HT402"


@pytest.mark.parametrize(("name", "allowed"), [("fp32", False), ("O0", False), ("bf16", None)])
def test_tf32_is_off_in_fp32_and_restored(name, allowed):
    ((before, inside, after),) = ranks.values(ranks.run(1, tf32_switches, name))
    assert before == after
    assert inside == (before if allowed is None else (allowed, allowed))


def tf32_switches(name):
    def read():
        return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32

    before = read()
    with session(batch_size=2, precision=name):
        inside = read()
    return before, inside, read()


def load_and_compare_masters():
    """Load into a submodule, another model and a copy, and add a group later; compare masters."""
    with session(batch_size=2, precision="O2", loss_scale=1.0) as opened:
        model, other = small_model(), small_model()
        optimizer = torch.optim.SGD(model[0].parameters(), 1e-6)
        model, other, optimizer = opened.prepare(model, other, optimizer)
        conv, linear = model.get_submodule("0"), model.get_submodule("4")
        exact = opened.precision.master(linear.weight).detach().clone()
        other.load_state_dict(model.state_dict())
        copy.deepcopy(linear).load_state_dict(linear.state_dict())
        unchanged = torch.equal(opened.precision.master(linear.weight), exact)
        conv.load_state_dict({n: torch.full_like(t, 5.0) for n, t in conv.state_dict().items()})
        loaded = set(opened.precision.master(conv.weight).flatten().tolist())
        optimizer.add_param_group({"params": linear.parameters(), "lr": 0.5})
        before = linear.weight.detach().clone()
        opened.step(linear(torch.ones(2, 144, dtype=torch.float16)).float().sum())
        master = opened.precision.master(linear.weight).detach()
        return (
            unchanged,
            loaded,
            not torch.equal(linear.weight, before),
            torch.equal(linear.weight, master.half()),
            {p.dtype for group in optimizer.param_groups for p in group["params"]},
        )


def test_o2_masters_follow_load_state_dict_of_a_submodule():
    (result,) = ranks.values(ranks.run(1, load_and_compare_masters))
    assert result == (True, {5.0}, True, True, {torch.float32})


def train_with_nan_on_rank_1():
    with session(
        batch_size=4, max_steps=4000, log_every=1, run_dir="run", max_nonfinite=5, timeout=120
    ) as opened:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))

        def check_loss(run, loss):
            # A nonfinite loss that does not reach the weights.
            opened.precision.nonfinite.check_loss(
                loss * torch.inf if opened.world.rank == 1 else loss
            )
            return loss

        fit(opened, model, opened.loader(images(2400)), taken=check_loss)


@HOROVOD_SLOW
def test_nan_losses_on_one_rank_end_all_at_one_step(run):
    results = run(3, train_with_nan_on_rank_1)
    assert any(isinstance(result, hpctrain.errors.NonFiniteError) for result in results), results
    for result in results:  # over Horovod, other ranks may raise the error of the first rank
        assert "5 steps in a row" in str(result)
        assert "on 1 of 3 ranks" in str(result)


def end_with_nan():
    with session(batch_size=4, epochs=1, log_every=1, run_dir="run") as opened:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, _targets in run.batches(opened.loader(images(240))):
                    loss = model(batch).mean() * (float("nan") if run.step == 1 else 1.0)
                    opened.step(loss)
                    run.log(loss=loss)
                    if run.step == 2:
                        break
                break


def test_failed_last_checkpoint_is_in_the_summary():
    (error,) = ranks.run(1, end_with_nan)
    assert isinstance(error, hpctrain.errors.NonFiniteError)
    assert json.loads(RunDirectory("run").summary.read_text())["status"] == "failed"
    assert [row["step"] for row in RunDirectory("run").rows()] == [1, 2]


def train_twice(name):
    """Train twice with dropout in one start; return whether the weights are equal, and a sum."""
    found = []
    for number in range(2):
        with session(
            batch_size=4, max_steps=6, precision=name, deterministic=True, run_dir=f"run-{number}"
        ) as opened:
            model = nn.Sequential(*small_model()[:4], nn.Dropout(0.3), nn.Linear(4 * 36, 10))
            model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05, 0.9))
            fit(opened, model, opened.loader(images(240)))
            found.append(torch.cat([p.detach().flatten().float() for p in model.parameters()]))
    return torch.equal(*found), float(found[0].sum())


@pytest.mark.parametrize("name", ["bf16", "O2"])
@HOROVOD_SLOW
def test_deterministic_half_precision_repeats_bit_for_bit(run, name):
    results = ranks.values(run(3, train_twice, name))
    assert {equal for equal, _ in results} == {True}
    assert len({total for _, total in results}) == 1


def test_fixed_loss_scale_is_not_resumed():
    def open_fp16(scale):
        fp16 = precision.open_precision("fp16", CPU, precision.PrecisionSettings(loss_scale=scale))
        fp16.scaler.scale(torch.ones(()))  # this makes the scale a tensor
        return fp16

    before, after, dynamic = open_fp16(128.0), open_fp16(1024.0), open_fp16("dynamic")
    after.load_state_dict(before.state_dict())
    assert after.scaler.scale(torch.ones(())).item() == 1024.0
    dynamic.load_state_dict(before.state_dict())
    assert dynamic.scaler.scale(torch.ones(())).item() == 128.0


def set_tf32_and_open():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with session(batch_size=2, precision="fp32"):
        pass


def test_script_that_sets_tf32_is_refused():
    (error,) = ranks.run(1, set_tf32_and_open)
    assert isinstance(error, hpctrain.errors.UsageError), error
    assert "fp32_precision" in error.found
    assert error.code == "HT403"
    assert "--precision tf32" in error.fixes[0]
