"""Cost of a sum over the ranks through hpctrain, with two ranks on CPUs, over gloo.

    python benchmarks/allreduce.py [--rounds 100] [--seconds 60] [--save FILE]

`hpctrain bench allreduce` sums tensors of several sizes over each backend. The gradients of a model
with as many tensors as ResNet-50 are summed here: by DDP or Horovod directly, and by hpctrain, in
turns in the same processes. A last part measures Horovod's settings for bit-equal repeats on the
same gradients. It starts the ranks for each block, because Horovod keeps a setting as long as its
process runs.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Results, compare, judge, restart, run, start
from torch import Tensor, nn

import hpctrain
from hpctrain.tools.bench.baseline import share
from hpctrain.tools.bench.measure import take_turns
from hpctrain.tools.bench.turns import in_turns, timed

BACKENDS = {"ddp": "torch", "horovod": "horovod"}  # with the package of each
SIZES = "4B,1MB,25MB"
GRADIENTS, BACKWARD_PASSES, WARM_UP = "161 gradients, 2 MB", 2, 10
BASELINE, HPCTRAIN = "baseline", "hpctrain"
TARGET = "≤ 1.0101"
DEFAULT = "default"
# Name: options of the session, environment variables.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    DEFAULT: ({}, {}),
    "--deterministic": ({"deterministic": True}, {}),
    "--horovod groups=1, no fusion of groups": (
        {"horovod": "groups=1"},
        {"HOROVOD_DISABLE_GROUP_FUSION": "1"},
    ),
}
SETTING_BLOCKS = 30


class ManyTensors(nn.Module):
    """Model of 161 parameters, 53 of them with 9,216 numbers; its backward pass is almost free."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(9216,), (32,), (32,)] * 53 + [(10, 32), (10,)]
        self.tensors = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self) -> Tensor:
        """Return a scalar that depends on each number of each parameter."""
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum()


def by_hand(session: hpctrain.Session) -> Callable[[], Any]:
    """Return a backward pass whose gradients are averaged by DDP or Horovod directly."""
    model = ManyTensors()
    shared, optimizer = share(session.backend, model, torch.optim.SGD(model.parameters(), lr=0.0))
    if session.backend.name == "ddp":
        return lambda: (shared().backward(), model.zero_grad())
    return lambda: (model().backward(), optimizer.synchronize(), model.zero_grad())


def with_hpctrain(session: hpctrain.Session) -> Callable[[], Any]:
    """Return a backward pass whose gradients are averaged by hpctrain's backend."""
    model = session.prepare(ManyTensors())
    return lambda: (model().backward(), session.backend.sync_gradients(), model.zero_grad())


def rank(arguments: argparse.Namespace) -> Any:
    """Run one rank; return the seconds of each arm, or their median with a setting."""
    torch.set_num_threads(1)
    own = SETTINGS[arguments.setting or DEFAULT][0]
    with hpctrain.Session(backend=arguments.backend, batch_size=1, **own) as session:
        makers = {HPCTRAIN: with_hpctrain}
        if not arguments.setting:
            makers = {BASELINE: by_hand, **makers}
        calls = {name: make(session) for name, make in makers.items()}
        arms = {
            name: partial(timed, session.device, call, BACKWARD_PASSES)
            for name, call in calls.items()
        }
        in_turns(session, arms, 0.0, WARM_UP // BACKWARD_PASSES)
        rounds = SETTING_BLOCKS if arguments.setting else arguments.rounds
        times = in_turns(session, arms, 0.0, rounds)
        if not session.is_main:
            return None
        return statistics.median(times[HPCTRAIN]) if arguments.setting else times


def with_setting(name: str) -> float:
    """Start ranks with one of Horovod's settings, and return the median time."""
    options = ("--backend", "horovod", f"--setting={name}")
    return start(__file__, *options, ranks=2, **SETTINGS[name][1])


def sums(backend: str, seconds: float) -> Results:
    """Return the times of single sums by size, as `hpctrain bench` measures them."""
    options = ("--backend", backend, "--sizes", SIZES, "--seconds", str(seconds))
    found = start("-m", "hpctrain", "bench", "allreduce", *options, ranks=2)
    results: Results = found["results"]
    for size, arms in results.items():
        results[size] = {BASELINE: arms["raw call"], HPCTRAIN: arms["hpctrain"]}
        judge(arms["hpctrain"], "ratio", TARGET)
    return results


def in_microseconds(times: dict[str, list[float]]) -> dict[str, list[dict[str, float]]]:
    """Return the figures of arms from their seconds."""
    return {name: [{"us": one * 1e6} for one in own] for name, own in times.items()}


def measure(arguments: argparse.Namespace) -> Results:
    """Return the times of each backend by subject and arm."""
    results: Results = {}
    for backend, package in BACKENDS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{backend}: left out, because it is not installed: hpctrain horovod build\n")
            continue
        results[backend] = sums(backend, arguments.seconds)
        sync = in_microseconds(restart(arguments, ranks=2, backend=backend))
        targets = {HPCTRAIN: {"ratio": TARGET}}
        results[backend][GRADIENTS] = compare(sync, BASELINE, targets=targets)
        if backend == "horovod":
            arms = {name: partial(with_setting, name) for name in SETTINGS}
            times = take_turns(arms, max(arguments.rounds // 10, 2))
            subject = f"{GRADIENTS}, settings"
            results[backend][subject] = compare(in_microseconds(times), DEFAULT)
    return results


OPTIONS: dict[str, dict[str, Any]] = {
    "--seconds": {"type": float, "default": 60.0, "help": "seconds of the single sums (60)"},
    "--backend": {"help": argparse.SUPPRESS},
    "--setting": {"help": argparse.SUPPRESS},
}

if __name__ == "__main__":
    packages = ["hpctrain", "torch", "horovod"]
    run("Sums over the ranks, against direct calls.", 100, packages, measure, OPTIONS, rank)
