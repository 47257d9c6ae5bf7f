"""fp8 by torchao: what is refused, and training with its roundings emulated, as no CPU has fp8."""

import importlib.util
import sys
from functools import partial

import launches
import pytest
import ranks
import torch
from battery import session
from checkpoints import load_newest
from torch import nn

from hpctrain import precision
from hpctrain.errors import UsageError
from hpctrain.precision.float8 import Float8
from hpctrain.rundir import RunDirectory

CPU, SETTINGS = torch.device("cpu"), precision.PrecisionSettings()


@pytest.fixture(autouse=True)
def torchao(lacking):
    if importlib.util.find_spec("torchao") is None:
        lacking("torchao", "no module named torchao")


class Perceptron(nn.Module):
    """Three linear layers, of which the last one does not fit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.layers(x))


def samples():
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(96, 32, generator=generator)
    return torch.utils.data.TensorDataset(values, values[:, :10].argmax(1))


def train(name, run_dir, resume=False, emulated=True, **options):
    """Train, with fp8 emulated; return the class of a layer and the type of its weights."""
    Float8._emulated = emulated  # of this forked rank
    with session(
        precision=name, run_dir=run_dir, resume=resume, global_batch=12, batch_size=4,
        seed=3, log_every=1, **options,
    ) as opened:  # fmt: skip
        model = Perceptron()
        model, _ = opened.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
        with opened.run() as run:
            for _ in run.epochs():
                for inputs, targets in run.batches(opened.loader(samples())):
                    with opened.autocast():
                        loss = nn.functional.cross_entropy(model(inputs), targets)
                    opened.step(loss)
                    run.log(loss=loss)
        layer = next(one for one in model.modules() if isinstance(one, nn.Linear))
        return type(layer).__name__, layer.weight.dtype


def losses(run_dir):
    return [row["loss"] for row in RunDirectory(run_dir).rows() if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["auto", "fsdp"], indirect=True, ids=["ddp", "fsdp"])
def test_fp8_trains_like_bf16(run, tmp_path, monkeypatch):
    """Train with bf16 and fp8: the losses are close, and the weights stay in fp32."""
    monkeypatch.chdir(tmp_path)
    for name in ("bf16", "fp8"):
        found = ranks.values(run(3, partial(train, name, name, epochs=2)))
    assert {kind.removeprefix("FSDP") for kind, _ in found} == {"Float8Linear"}
    assert {dtype for _, dtype in found} == {torch.float32}
    expected, losses_in_fp8 = losses("bf16"), losses("fp8")
    assert losses_in_fp8 == pytest.approx(expected, rel=0.1)
    assert losses_in_fp8 != expected
    assert losses_in_fp8[-1] < 0.8 * losses_in_fp8[0]
    weights = [load_newest(RunDirectory(name))[1]["model"][0] for name in ("bf16", "fp8")]
    assert list(weights[0]) == list(weights[1]) != []


def test_run_in_fp8_goes_on_in_bf16(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks.values(ranks.run(1, partial(train, "fp8", "run", epochs=1)))
    ranks.values(ranks.run(1, partial(train, "bf16", "run", resume=True, epochs=2)))
    both = losses("run")
    assert len(both) == 16
    assert both[-1] < both[0]


def test_fp8_on_a_gpu_trains_like_its_emulation(gpu, lacking, tmp_path, monkeypatch):
    if torch.cuda.get_device_capability() < (8, 9):
        lacking("fp8", f"{torch.cuda.get_device_name()} computes in none")
    monkeypatch.chdir(tmp_path)
    for emulated in (False, True):
        name = f"emulated-{emulated}"
        ranks.values(gpu(1, partial(train, "fp8", name, emulated=emulated, epochs=2)))
    assert losses("emulated-False") == pytest.approx(losses("emulated-True"), rel=0.02)


@pytest.mark.parametrize(
    ("capability", "device", "words"),
    [
        (None, CPU, "--precision fp8 on a CPU"),
        ((8, 0), torch.device("cuda", 0), "--precision fp8 on A100"),
    ],
)
def test_fp8_is_refused_where_the_device_has_none(monkeypatch, capability, device, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    with pytest.raises(UsageError, match=words) as refused:
        precision.open_precision("fp8", device, SETTINGS)
    assert refused.value.code == "HT402"


def test_fp8_needs_torchao(monkeypatch):
    monkeypatch.setattr(Float8, "_emulated", True)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match="torchao cannot be imported") as refused:
        precision.open_precision("fp8", CPU, SETTINGS)
    assert refused.value.code == "HT418"


def test_model_without_suitable_layers_is_refused(monkeypatch):
    monkeypatch.setattr(Float8, "_emulated", True)
    model = nn.Sequential(nn.Linear(32, 10), nn.Conv2d(16, 16, 3))
    with pytest.raises(UsageError, match="none of the 1 linear layers") as refused:
        precision.open_precision("fp8", CPU, SETTINGS).convert(model)
    assert refused.value.code == "HT419"
    assert type(model[0]) is nn.Linear


def test_projections_of_the_language_model_example_compute_in_fp8(monkeypatch):
    monkeypatch.setattr(Float8, "_emulated", True)
    model = launches.example("language_model").GPT(characters=30, context=16)
    precision.open_precision("fp8", CPU, SETTINGS).convert(model)
    converted = {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if type(layer).__name__ == "Float8Linear"
    }
    assert {"query", "key", "value", "out", "0", "2"} == converted
