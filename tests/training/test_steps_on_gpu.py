"""Steps on a GPU: no sync, and the results of LAMB equal those of the CPU."""

from itertools import pairwise

import on_gpu
import pytest
import ranks
import test_apex_lamb
import torch
from battery import images, session, small_model, train
from torch import nn

from hpctrain.compat.apex.lamb import LAMB

WARM_UP, STEPS, OVERFLOW = 3, 6, 2
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, 0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "LAMB": lambda p: LAMB(p, 1e-3),
    "fused SGD": lambda p: torch.optim.SGD(p, 0.05, 0.9, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
}


def steps(precision, optimizer, options):
    """Return whether each step changed the weights, and how many steps were skipped."""
    with session(batch_size=16, precision=precision, **options) as opened:
        model = small_model()
        model, _ = opened.prepare(model, OPTIMIZERS[optimizer](model.parameters()))
        weights = []

        def step(batch, targets, factor):
            with opened.autocast():
                loss = nn.functional.cross_entropy(model(batch), targets)
            opened.step(loss * factor)
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

        batches = list(opened.loader(images(240)))
        for batch, targets in batches[:WARM_UP]:
            step(batch, targets, 1.0)
        overflows = opened.precision.requires_synced_skip
        with on_gpu.never_waits():
            for number, (batch, targets) in enumerate(batches[WARM_UP : WARM_UP + STEPS]):
                step(batch, targets, 1e6 if overflows and number == OVERFLOW else 1.0)
        moved = [not torch.equal(a, b) for a, b in pairwise(weights[WARM_UP - 1 :])]
        assert all(tensor.isfinite().all() for tensor in weights)
        return moved, int(opened.precision.nonfinite.skipped)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5, "clip_value": 0.1}])
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        *(("bf16", name) for name in OPTIMIZERS),
        *((name, "SGD") for name in ("fp64", "fp32", "tf32", "O3")),
        *((name, "fused SGD") for name in ("fp16", "O2")),
        *((name, "fused AdamW") for name in ("fp16", "O1", "O2")),
    ],
)
def test_training_step_does_not_sync_the_gpu(gpu, precision, optimizer, options):
    ((moved, skipped),) = ranks.values(gpu(1, steps, precision, optimizer, options))
    scaled = precision in ("fp16", "O1", "O2")
    assert moved == [not scaled or number != OVERFLOW for number in range(STEPS)]
    assert skipped == (1 if scaled else 0)


def train_compiled(precision, compile):
    with session(
        batch_size=12, max_steps=8, precision=precision, log_every=1, run_dir=str(compile),
        compile=compile,
    ) as opened:  # fmt: skip
        losses, model = train(opened, 8)
        return losses, list(model.state_dict()), model._compiled_call_impl is not None


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_compiled_model_trains_the_same_on_gpu(gpu, tmp_path, precision, tolerance):
    # Compile in the ranks, and write only to the folder of the test.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ((losses, names, yes),) = ranks.values(gpu(1, train_compiled, precision, True, env=env))
    ((expected, plain, no),) = ranks.values(gpu(1, train_compiled, precision, False))
    assert (yes, no) == (True, False)
    assert names == plain == list(small_model().state_dict())
    assert losses == pytest.approx(expected, rel=tolerance)
    assert len(losses) == 8


def weights_after_steps(settings, device):
    """Return the weights after the steps of the unit tests."""
    weights = [[w.to(device) for w in group] for group in test_apex_lamb.first_weights()]
    gradients = [
        [None if gradient is None else gradient.to(device) for gradient in step]
        for step in test_apex_lamb.gradients_of_steps()
    ]
    with on_gpu.never_waits():
        optimizer = test_apex_lamb.train(lambda g: LAMB(g, **settings), weights, gradients)
    return test_apex_lamb.parameters(optimizer)


@pytest.mark.parametrize("settings", [{}, {"use_nvlamb": True}], ids=str)
def test_lamb_on_gpu_equals_cpu_without_sync(gpu, settings):
    ((found, expected),) = ranks.values(gpu(1, run_on_gpu_and_cpu, weights_after_steps, settings))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def run_on_gpu_and_cpu(function, *arguments):
    """Return the results of a function on the GPU and on the CPU."""
    return [function(*arguments, device) for device in (on_gpu.DEVICE, torch.device("cpu"))]
