"""Steps, rows of metrics and evaluations do not sync the device.

The device is torch's "meta", whose tensors have shapes and no values: what needs a value (`item()`,
`tolist()`, an `if`, a boolean index, a copy to the host) raises an error. The tests marked gpu
check the same on a GPU; this one needs none, and covers all that is equal for all devices.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import ranks
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import hpctrain
import hpctrain.process.device
from hpctrain.backends.base import Work, vector
from hpctrain.backends.single import Single
from hpctrain.compat.apex.lamb import LAMB
from hpctrain.training.evaluation import Classification
from hpctrain.training.replica_check import ReplicaCheck

META = torch.device("meta")
LOG_EVERY = 2


class DeviceSync(Exception):
    """A call for which the host would wait for a GPU."""


class NoDeviceSync(TorchDispatchMode):
    """Raise an error for calls that read a value of the device, and for blocking copies."""

    READS = (
        *("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "bincount"),
        *("_unique", "unique", "repeat_interleave"),
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._waits(function.overloadpacket.__name__, args, kwargs):
            raise DeviceSync(f"the host waits for {function}")
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


def find_waits():
    """Return the names of WAITS for which the mode raises an error."""
    names = []
    for name, act in WAITS.items():
        with NoDeviceSync():
            try:
                act(torch.ones(3, device=META))
            except DeviceSync:
                names.append(name)
    return names


def test_device_sync_detector_finds_each_wait():
    (names,) = ranks.values(ranks.run(1, find_waits))
    assert names == list(WAITS)


def evaluate():
    scores = Classification(Single(None, META, None), 10)
    targets = torch.zeros(32, device=META, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        outputs = torch.zeros(32, 10, device=META, dtype=dtype)
        with NoDeviceSync():
            scores.update(outputs, targets)
    return True


def test_evaluation_does_not_sync_the_device():
    assert ranks.values(ranks.run(1, evaluate)) == [True]


def take_digest():
    """Return the digest of a model and its optimizer on the device, with counters on the CPU."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2000)).to(META)
    optimizer = torch.optim.Adam(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        zeros = torch.zeros_like(parameter)
        moments = {"exp_avg": zeros, "exp_avg_sq": zeros}
        optimizer.state[parameter] = {"step": torch.tensor(float(number)), **moments}
    context = SimpleNamespace(
        options=SimpleNamespace(check_replicas_every=1),
        backend=SimpleNamespace(world_size=3, sharded=False),
        device=META,
        precision=SimpleNamespace(master=lambda parameter: parameter),
        models=[model],
        optimizers=[optimizer],
    )
    check = ReplicaCheck(context, [0.0] * 10, 0, resumed=False)
    with NoDeviceSync():
        values = vector(list(check.values(1).values()), META)
    return values.device.type, len(values)


def test_digest_of_the_replicas_does_not_sync_the_device():
    assert ranks.values(ranks.run(1, take_digest)) == [("meta", 10)]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, 0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "LAMB": lambda p: LAMB(p, 0.05),
}
OPTIONS = {
    "as it comes": {},
    "much": {"accumulate": 2, "clip_norm": 0.5, "clip_value": 0.1},
    "deterministic": {"deterministic": True},
}
STEPS = 24


class EndOfLoop(Exception):
    """Raised at the end of the loop, before a checkpoint reads the weights."""


def train(optimizer, options):
    """Train; return the steps of beginning and reading of each sum that was read."""
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
        mock.patch("hpctrain.training.known_numbers.check"),  # its device computes nothing
        # This looks for a checkpoint and compares it between ranks.
        mock.patch("hpctrain.training.training_run.restore", return_value=None),
        mock.patch.object(Work, "__init__", init),
        mock.patch.object(Work, "values", values),
        mock.patch.object(Work, "ready", lambda later: run.step > later.begun),
        hpctrain.Session(
            batch_size=8, precision="fp32", log_every=LOG_EVERY, run_dir="run", epochs=2,
            **OPTIONS[options],
        ) as session,
    ):  # fmt: skip
        model, _ = session.prepare(model, OPTIMIZERS[optimizer](model.parameters()))
        with contextlib.suppress(EndOfLoop), session.run() as run:
            for _ in run.epochs():
                batches = run.batches(session.loader(samples))
                while run.step < STEPS:
                    with NoDeviceSync():
                        inputs, targets = next(batches)
                        with session.autocast():
                            loss = nn.functional.cross_entropy(model(inputs), targets)
                        session.step(loss)
                        run.log(loss=loss, number=1.0)
                raise EndOfLoop
    return read


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", "as it comes"), ("Adam", "much"), ("LAMB", "deterministic")],
)
def test_training_loop_does_not_sync_the_device(optimizer, options):
    (read,) = ranks.values(ranks.run(1, train, optimizer, options))
    # Each has rows, and what the ranks decide by.
    assert len(read) >= 3
    assert all(begun < step for begun, step in read), read
