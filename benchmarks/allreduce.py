"""Cost of a sum over the ranks through hpctrain, with two ranks on CPUs, over gloo.

    python benchmarks/allreduce.py [--rounds 100] [--save FILE]

Each backend sums tensors of several sizes, and the gradients of a model with as many tensors as
ResNet-50. The baseline calls torch or Horovod directly; the other arm calls hpctrain. The two arms
take turns in the same processes, a block of calls each, and are compared round by round. A second
part measures Horovod's settings for bit-equal repeats on the same gradients. It starts the ranks
for each block, because Horovod keeps a setting as long as its process runs.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import add_save, describe, facts, order, outcome, save, summary, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain

BACKENDS = ("ddp", "horovod")
# Name: count of float32 numbers, calls per block.
SIZES = {"1 number": (1, 20), "1 MB": (250_000, 4), "25 MB": (6_250_000, 1)}
GRADIENTS, BACKWARD_PASSES = "161 gradients, 2 MB", 2
BASELINE, HPCTRAIN = "baseline", "hpctrain"
TARGET_RATIO = 1.02
DEFAULT = "default"
# Name: options of the session, environment variables.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    DEFAULT: ({}, {}),
    "--deterministic": ({"deterministic": True}, {}),
    "--horovod-groups 1, no fusion of groups": (
        {"horovod_groups": 1},
        {"HOROVOD_DISABLE_GROUP_FUSION": "1"},
    ),
}
SETTING_BLOCKS = 30
Times = dict[str, dict[str, list[float]]]


class ManyTensors(nn.Module):
    """Model of 161 parameters, 53 of them with 9,216 numbers; its backward pass is almost free."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(9216,), (32,), (32,)] * 53 + [(10, 32), (10,)]
        self.tensors = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self) -> Tensor:
        """Return a scalar that depends on each number of each parameter."""
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum()


def sum_baseline(session: hpctrain.Session) -> Callable[[Tensor], Any]:
    """Return the baseline: a direct call of torch or Horovod."""
    if session.backend.name == "ddp":
        return dist.all_reduce
    import horovod.torch as hvd

    return lambda tensor: hvd.allreduce_(tensor, name=BASELINE, op=hvd.Sum)


def gradients_baseline() -> Callable[[], Any]:
    """Return a backward pass whose gradients are averaged by DDP or Horovod directly."""
    model = ManyTensors()
    if dist.is_initialized():
        shared = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        return lambda: (shared().backward(), model.zero_grad())
    import horovod.torch as hvd

    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    return lambda: (model().backward(), optimizer.synchronize(), model.zero_grad())


def gradients_with_hpctrain(session: hpctrain.Session) -> Callable[[], Any]:
    """Return a backward pass whose gradients are averaged by hpctrain's backend."""
    model = session.prepare(ManyTensors())
    return lambda: (model().backward(), session.backend.sync_gradients(), model.zero_grad())


def block(session: hpctrain.Session, call: Callable[[], Any], calls: int) -> float:
    """Return the microseconds per call, over a block that all ranks begin together."""
    session.backend.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def take_turns(session: hpctrain.Session, rounds: int) -> Times:
    """Return the times by subject and arm, one per round."""
    subjects: dict[str, tuple[dict[str, Callable[[], Any]], int]] = {}
    baseline = sum_baseline(session)
    for name, (numbers, calls) in SIZES.items():
        tensor = torch.zeros(numbers)
        arms = {
            BASELINE: lambda tensor=tensor: baseline(tensor),
            HPCTRAIN: lambda tensor=tensor: session.backend.sum(tensor),
        }
        subjects[name] = arms, calls
    arms = {BASELINE: gradients_baseline(), HPCTRAIN: gradients_with_hpctrain(session)}
    subjects[GRADIENTS] = arms, BACKWARD_PASSES
    times: Times = {}
    for name, (arms, calls) in subjects.items():
        for call in arms.values():
            block(session, call, 10)  # to warm up
        times[name] = {arm: [] for arm in arms}
        for number in range(rounds):
            for arm in order(list(arms), number):
                times[name][arm].append(block(session, arms[arm], calls))
    return times


def with_setting(name: str) -> float:
    """Return the median time with one setting, measured in a new session."""
    with hpctrain.Session(backend="horovod", batch_size=1, **SETTINGS[name][0]) as session:
        call = gradients_with_hpctrain(session)
        block(session, call, 10)  # to warm up
        return statistics.median(block(session, call, 1) for _ in range(SETTING_BLOCKS))


def settings_in_turns(rounds: int) -> dict[str, list[float]]:
    """Return the times by setting, one per round."""
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for number in range(rounds):
        for name in order(list(SETTINGS), number):
            times[name].append(start(f"--setting={name}", **SETTINGS[name][1]))
    return times


def rank_main(arguments: argparse.Namespace) -> None:
    """Run one rank; rank 0 writes the times."""
    torch.set_num_threads(1)
    result: Times | float
    if arguments.setting:
        result = with_setting(arguments.setting)
    else:
        with hpctrain.Session(backend=arguments.backend, batch_size=1) as session:
            result = take_turns(session, arguments.rounds)
    if hpctrain.detect().rank == 0:
        Path(arguments.rank_of).write_text(json.dumps(result))


def start(*options: str, **variables: str) -> Any:
    """Start two ranks with more options and variables, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [
            *(sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", "2", __file__),
            *("--rank-of", str(result), *options),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\nthe ranks ended with exit code {done.returncode}")
        return json.loads(result.read_text())


def compare(times: dict[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """Return for each arm its time, and its ratio to the base of the same round."""
    results = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times[base], strict=True)]
        results[name] = {"us": summary(own), "ratio": summary(ratios)}
        if name == HPCTRAIN:
            ratio = results[name]["ratio"]
            results[name] |= {"target": TARGET_RATIO, "outcome": outcome(ratio, TARGET_RATIO)}
    return results


def show(title: str, results: dict[str, dict[str, Any]]) -> str:
    """Return one comparison as a text table."""
    rows = [(title, "µs", "×", "target", "")]
    for name, result in results.items():
        target = f"≤ {result['target']:g}" if "target" in result else ""
        ratio = describe(result["ratio"], ".3f") if name not in (BASELINE, DEFAULT) else ""
        rows.append((name, describe(result["us"]), ratio, target, result.get("outcome", "")))
    return table(rows) + "\n"


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="Sums over the ranks, against direct calls.")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="default: 100")
    add_save(parser)
    parser.add_argument("--rank-of", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments)
        return
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    record = facts(["hpctrain", "torch", "horovod"])
    results: dict[str, Any] = {}
    for backend in BACKENDS:
        if importlib.util.find_spec({"ddp": "torch"}.get(backend, backend)) is None:
            print(f"{backend}: left out, because it is not installed: hpctrain horovod build\n")
            continue
        times = start("--backend", backend, "--rounds", str(arguments.rounds))
        subjects = {name: compare(own, BASELINE) for name, own in times.items()}
        if backend == "horovod":
            settings = settings_in_turns(max(arguments.rounds // 10, 2))
            subjects[f"{GRADIENTS}, settings"] = compare(settings, DEFAULT)
        for name, result in subjects.items():
            print(show(f"{backend}, {name}", result), flush=True)
        results[backend] = subjects
    print("Medians over rounds, with their 95 % intervals; ratios round by round.")
    record |= {"benchmark": "allreduce", "rounds": arguments.rounds, "results": results}
    save(arguments.save, record)


if __name__ == "__main__":
    main()
