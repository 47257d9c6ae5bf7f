"""Training speed of ResNet-50 in every precision: hpctrain against the baseline.

    python benchmarks/precision.py [--rounds 30] [--steps 20] [--only NAME …] [--save FILE]

The batches have ImageNet's shape and are on the GPU, so that only the step is measured. Each
precision has its own session, in which two models take turns, a block of steps each. One uses
`session.autocast()` and `session.step()`. The other is the baseline: it uses torch.autocast,
GradScaler and the memory format of the session. Each block is compared with the other block of its
round. The target is 0.99 of the images per second of the baseline. torch has no loop for O2, which
is compared with autocast in fp16 and has no target. Without a GPU, a run with a small `--model`
only checks that the program works.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchvision
from measure import add_save, describe, facts, order, outcome, save, summary, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain

CLASSES, BATCHES = 1000, 4
TARGET = 0.99
BASELINE, HPCTRAIN = "baseline", "hpctrain"
# Precision, whether the model is compiled, dtype of the baseline's autocast, and whether the target
# applies.
Case = tuple[str, bool, torch.dtype | None, bool]
CASES: dict[str, Case] = {
    "fp32": ("fp32", False, None, True),
    "tf32": ("tf32", False, None, True),
    "bf16": ("bf16", False, torch.bfloat16, True),
    "fp16": ("fp16", False, torch.float16, True),
    "O1": ("O1", False, torch.float16, True),
    "O2": ("O2", False, torch.float16, False),
    "bf16, compiled": ("bf16", True, torch.bfloat16, True),
}
Batches = Sequence[tuple[Tensor, Tensor]]
Step = Callable[[], Any]


def parts(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model and its optimizer, with the same weights each time."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=CLASSES)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def baseline(session: hpctrain.Session, case: Case, name: str, batches: Batches) -> Step:
    """Return the baseline: a step that uses torch directly, with the settings of the session."""
    _, compile_it, half, _ = case
    device = session.device.type
    model, optimizer = parts(name)
    model.to(session.device)
    if session.placement.channels_last:
        model.to(memory_format=torch.channels_last)
    if compile_it:
        model.compile()
    scaler = torch.amp.GradScaler(device, enabled=half == torch.float16)
    turns = itertools.cycle(batches)

    def step() -> None:
        images, targets = next(turns)
        with torch.autocast(device, half, enabled=half is not None):
            loss = cross_entropy(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def with_hpctrain(session: hpctrain.Session, name: str, batches: Batches) -> Step:
    """Return the training step of the examples."""
    model, _ = session.prepare(*parts(name))
    turns = itertools.cycle(batches)

    def step() -> None:
        images, targets = next(turns)
        with session.autocast():
            loss = cross_entropy(model(images), targets)
        session.step(loss)

    return step


def block(step: Step, steps: int, device: torch.device) -> float:
    """Return the seconds per step over a block, which ends when the device has finished."""
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - start) / steps


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(case: Case, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return images per second of both arms in one precision, and their ratio per round."""
    precision, compile_it, _, has_target = case
    size, count = arguments.size, arguments.batch_size
    with hpctrain.Session(
        precision=precision, compile=compile_it, batch_size=count, run_dir=folder
    ) as session:
        batches = [
            session.placement((torch.randn(count, 3, size, size), torch.randint(CLASSES, (count,))))
            for _ in range(BATCHES)
        ]
        arms = {
            BASELINE: baseline(session, case, arguments.model, batches),
            HPCTRAIN: with_hpctrain(session, arguments.model, batches),
        }
        for step in arms.values():
            block(step, max(arguments.steps, BATCHES), session.device)  # warms up
        speeds: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(arguments.rounds):
            for arm in order(list(arms), number):
                seconds = block(arms[arm], arguments.steps, session.device)
                speeds[arm].append(count / seconds)
    pairs = zip(speeds[HPCTRAIN], speeds[BASELINE], strict=True)
    ratio = summary([own / other for own, other in pairs])
    result = {**{arm: summary(speed) for arm, speed in speeds.items()}, "ratio": ratio}
    if has_target and session.device.type == "cuda":
        result["target"] = {"at_least": TARGET, "outcome": reached(ratio)}
    return result


def reached(ratio: dict[str, float]) -> str:
    """Return the outcome whether a ratio is at least the target."""
    mirrored = {"median": -ratio["median"], "low": -ratio["high"], "high": -ratio["low"]}
    return outcome(mirrored, -TARGET)


def show(model: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a text table."""
    rows = [(f"{model}, images/s", BASELINE, HPCTRAIN, "× baseline", f"at least {TARGET}")]
    for name, result in results.items():
        speeds = (describe(result[BASELINE]), describe(result[HPCTRAIN]))
        reached_target = result["target"]["outcome"] if "target" in result else ""
        rows.append((name, *speeds, describe(result["ratio"], ".3f"), reached_target))
    return table(rows)


def parse(has_gpu: bool) -> argparse.Namespace:
    """Parse the command line; without a GPU, `--save` is an error."""
    parser = argparse.ArgumentParser(description="ResNet-50 by precision, against the baseline.")
    parser.add_argument("--model", default="resnet50", help="torchvision model (resnet50)")
    parser.add_argument("--size", type=int, default=224, metavar="PIXELS", help="image size (224)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default: 30")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps per block (20)")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="default: all")
    add_save(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    if arguments.save and not has_gpu:
        parser.error("--save: torch finds no GPU, and figures of a CPU are no results here")
    return arguments


def main() -> None:
    """Measure every precision, print, save."""
    has_gpu = torch.cuda.is_available()
    arguments = parse(has_gpu)
    record = facts(["hpctrain", "torch", "torchvision"])
    if has_gpu:
        record["gpu"] = torch.cuda.get_device_name()
        record["versions"] |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    # Both arms use the fastest convolutions, as is usual with images of one size.
    torch.backends.cudnn.benchmark = True
    results = {}
    for name, case in CASES.items():
        if arguments.only and name not in arguments.only:
            continue
        if name == "tf32" and not has_gpu:
            print("tf32: left out, as only GPUs have it")
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(case, arguments, folder)
    print(show(arguments.model, results))
    print("Medians over blocks, with their 95 % intervals; ratios block by block.")
    names = ("model", "size", "batch_size", "rounds", "steps")
    settings = {name: getattr(arguments, name) for name in names}
    save(arguments.save, {"benchmark": "precision", **record, **settings, "results": results})


if __name__ == "__main__":
    main()
