"""Precisions and memory formats on a GPU: results, types and accuracy."""

from functools import partial

import pytest
import ranks
import torch
from battery import fit, session, train
from test_precisions import AUTOCAST, check_equal_to_torch, train_by_autocast, train_by_session
from test_training_options import formats
from torch import nn

from hpctrain.data import digits


def products(device):
    """Return a matrix product and a convolution of fixed numbers."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 512, 512, generator=generator).to(device)
    images = torch.randn(8, 64, 32, 32, generator=generator).to(device)
    kernel = torch.randn(64, 64, 3, 3, generator=generator).to(device)
    return left @ right, nn.functional.conv2d(images, kernel)


def tf32_switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def set_tf32_switches(on):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def products_by_precision():
    """Return products by precision: computed in a session, and by torch's switches."""
    before, found, expected = tf32_switches(), {}, {}
    for name in ("fp32", "tf32"):
        with session(batch_size=2, precision=name) as opened:
            found[name] = products(opened.device)
        assert tf32_switches() == before
        set_tf32_switches(name == "tf32")
        expected[name] = products(opened.device)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    return found, expected


def test_tf32_on_gpu_only_when_asked_for(gpu):
    ((found, expected),) = ranks.values(gpu(1, products_by_precision))
    for name, both in found.items():
        assert all(torch.equal(own, other) for own, other in zip(both, expected[name], strict=True))
    left, right = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).double()
    exact = left @ right
    error = {name: ((own[0] - exact).norm() / exact.norm()).item() for name, own in found.items()}
    # Inputs with mantissas of 23 and of 10 bits.
    assert error["fp32"] < 1e-6
    assert 1e-5 < error["tf32"] < 2e-3


def chosen_precision():
    with session(batch_size=2) as opened:
        own = torch.cuda.get_device_capability(opened.device)
        return opened.precision.name, opened.device.type, own


def test_auto_precision_on_gpu_is_bf16(gpu):
    ((name, device, capability),) = ranks.values(gpu(1, chosen_precision))
    assert device == "cuda"
    assert name == ("bf16" if capability >= (8, 0) else "fp16")


def train_digits(name):
    """Train two epochs of the digits; return top-1 of the test set, and the type of the weights."""
    with session(batch_size=16, epochs=2, precision=name, run_dir="run") as opened:
        train_set, test_set = digits()
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * 64, 10),
        )  # fmt: skip
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.02, 0.9))
        fit(opened, model, opened.loader(train_set))
        model.eval()
        right = 0
        with torch.no_grad():
            for batch, targets in opened.loader(test_set, train=False):
                with opened.autocast():
                    right += (model(batch).argmax(1) == targets).sum().item()
        return right / len(test_set), model[0].weight.dtype


@pytest.mark.parametrize(
    "name", ["fp64", "fp32", "tf32", "bf16", "fp16", "O0", "O1", "O2", "O3"]
)  # fmt: skip
def test_every_precision_trains_the_digits_on_gpu(gpu, name):
    ((top1, kind),) = ranks.values(gpu(1, train_digits, name))
    assert top1 > 0.9
    half = {"O2": torch.float16, "O3": torch.float16, "fp64": torch.float64}
    assert kind == half.get(name, torch.float32)


@pytest.mark.parametrize("clip", [None, 0.5])
@AUTOCAST
def test_autocast_on_gpu_equals_the_loop_that_torch_documents(gpu, name, half, clip):
    (results,) = ranks.values(gpu(1, partial(train_by_session, name, clip, deterministic=True)))
    in_fp16 = partial(train_by_autocast, half, clip, deterministic=True, precision="fp16")
    (expected,) = ranks.values(gpu(1, in_fp16))
    check_equal_to_torch(half, results, expected)


@pytest.mark.parametrize(
    ("name", "given", "last"),
    [
        *((name, None, True) for name in ("bf16", "fp16", "O1", "O2", "O3")),
        *((name, None, False) for name in ("fp64", "fp32", "tf32", "O0")),
        ("bf16", False, False),
        ("fp32", True, True),
    ],
)
def test_channels_last_on_gpu_with_half_precision(gpu, name, given, last):
    assert ranks.values(gpu(1, partial(formats, given, precision=name))) == [(last, last)]


def train_in_fp64():
    with session(
        batch_size=12, max_steps=12, precision="fp64", log_every=1, run_dir="run"
    ) as opened:
        return train(opened, 12)[0], opened.device.type


def test_training_on_gpu_equals_cpu(gpu, tmp_path, monkeypatch):
    found = {}
    for device, env in (("cuda", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        (tmp_path / device).mkdir()
        monkeypatch.chdir(tmp_path / device)
        ((found[device], used),) = ranks.values(gpu(1, train_in_fp64, env=env))
        assert used == device
    assert len(found["cpu"]) == 12
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-9)
