"""Nothing in a step, in a row of metrics or in an evaluation waits for the device.

The device is torch's "meta", whose tensors have shapes and no numbers: what needs one (`item()`,
`tolist()`, an `if`, a boolean index, a copy to the host) cannot work there. So this holds without a
GPU what the tests marked gpu hold with one, for all that does not depend on the kind of device.
"""

import contextlib
from unittest import mock

import pytest
import ranks
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import hpctrain
import hpctrain.process.device
from hpctrain.backends.base import Work
from hpctrain.backends.single import Single
from hpctrain.optim import LARS
from hpctrain.training.evaluation import Classification

META = torch.device("meta")
LOG_EVERY = 2


class Waits(Exception):
    """Something for which the host would wait for a GPU."""


class NoWaits(TorchDispatchMode):
    """Refuses what reads a number of the device, and copies that are waited for."""

    READS = (
        *("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "bincount"),
        *("_unique", "unique", "repeat_interleave"),
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._waits(function.overloadpacket.__name__, args, kwargs):
            raise Waits(f"the host waits for {function}")
        return function(*args, **kwargs)

    def _waits(self, name, args, kwargs):
        devices = [one.device for one in args if isinstance(one, torch.Tensor)]
        if name == "_to_copy":
            target = kwargs.get("device") or devices[0]
            return target != devices[0] and not (target == META and kwargs.get("non_blocking"))
        if name == "copy_":
            return devices[0] != devices[1] and not (devices[0] == META and args[2:])
        if META not in devices:
            return False
        if name in ("index", "index_put", "index_put_"):
            return any(index is not None and index.dtype == torch.bool for index in args[1])
        return name.startswith(self.READS)


WAITS = {
    "item": lambda tensor: tensor.sum().item(),
    "tolist": lambda tensor: tensor.tolist(),
    "if": lambda tensor: bool(tensor.any()),
    "index": lambda tensor: tensor[tensor > 0],
    "write by index": lambda tensor: tensor.__setitem__(tensor > 0, torch.ones(2, device=META)),
    "bincount": lambda tensor: torch.bincount(tensor.long()),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: torch.ones(3).to(tensor.device),
    "copy": lambda tensor: tensor.copy_(torch.ones(3)),
}


def caught():
    """Those of WAITS that are."""
    names = []
    for name, act in WAITS.items():
        with NoWaits():
            try:
                act(torch.ones(3, device=META))
            except Waits:
                names.append(name)
    return names


def test_device_sync_detector_finds_each_wait():
    (names,) = ranks.values(ranks.run(1, caught))
    assert names == list(WAITS)


def evaluation():
    scores = Classification(Single(None, META, None), 10)
    targets = torch.zeros(32, device=META, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        outputs = torch.zeros(32, 10, device=META, dtype=dtype)
        with NoWaits():
            scores.update(outputs, targets)
    return True


def test_evaluation_does_not_sync_the_device():
    assert ranks.values(ranks.run(1, evaluation)) == [True]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, 0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "LARS": lambda p: LARS(p, 0.05),
}
OPTIONS = {
    "as it comes": {},
    "much": {"accumulate": 2, "clip_norm": 0.5, "clip_value": 0.1, "ema": 0.9},
    "a schedule": {"deterministic": True, "lr_schedule": "cosine", "lr_warmup_epochs": 0.5},
}
STEPS = 24


class Done(Exception):
    """The end of the loop, before a checkpoint reads the weights."""


def loop(optimizer, options):
    """For each sum that was read in training, the steps that began it and that read it."""
    read = []
    run = mock.Mock(step=0)

    def init(later, sums, work=None):
        assert sums.device == META
        later.sums, later.begun = sums, run.step

    def values(later):
        if run.step:
            read.append((later.begun, run.step))
        return [0.0] * len(later.sums)

    samples = TensorDataset(torch.zeros(960, 8), torch.zeros(960).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(META)
    with (
        mock.patch.object(hpctrain.process.device, "choose", return_value=META),
        # Which looks for a checkpoint, and asks the ranks whether theirs is another.
        mock.patch("hpctrain.training.run.restore", return_value=None),
        mock.patch.object(Work, "__init__", init),
        mock.patch.object(Work, "values", values),
        mock.patch.object(Work, "ready", lambda later: run.step > later.begun),
        hpctrain.Session(
            batch_size=8, precision="fp32", log_every=LOG_EVERY, run_dir="run", epochs=2,
            **OPTIONS[options],
        ) as session,
    ):  # fmt: skip
        model, _ = session.prepare(model, OPTIMIZERS[optimizer](model.parameters()))
        with contextlib.suppress(Done), session.run() as run:
            for _ in run.epochs():
                batches = run.batches(session.loader(samples))
                while run.step < STEPS:
                    with NoWaits():
                        inputs, targets = next(batches)
                        with session.autocast():
                            loss = nn.functional.cross_entropy(model(inputs), targets)
                        session.step(loss)
                        run.log(loss=loss, number=1.0)
                raise Done
    return read


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", "as it comes"), ("Adam", "much"), ("LARS", "a schedule")],
)
def test_training_loop_does_not_sync_the_device(optimizer, options):
    (read,) = ranks.values(ranks.run(1, loop, optimizer, options))
    # Those of the rows, and those of what the ranks have to know of each other.
    assert len(read) >= 5
    assert all(begun < step for begun, step in read), read
