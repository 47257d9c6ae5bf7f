"""Images per second when training ResNet-50: hpctrain, the baseline, and others' loops.

    python benchmarks/imagenet.py [--data PATH] [--rounds 20] [--steps 20] [--save FILE]

All arms run in one process on one GPU. They take turns, a block of steps each:

- baseline: channels last, bf16 autocast, a fused optimizer, nothing read from the
  device;
- hpctrain: `session.autocast()` and `session.step()`, as in examples/imagenet.py;
- both of them with torch.compile;
- like torchvision's script, like timm's script: the step of references/classification/train.py
  (torchvision 0.29) and of timm's train.py (1.0) with `--amp` and otherwise their defaults, written
  again here: no channels last, an optimizer that is not fused, and fp16 with a GradScaler; the step
  of torchvision also reads the loss and two accuracies from the device.

The batches of these arms are on the GPU. `--data FOLDER`, a folder of real images, adds two arms
with equally many workers: bytes from the workers as in examples/imagenet.py, and floats from the
workers for the baseline. The target is 0.99 of the baseline. Without a GPU, a run
only checks that the program works.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from harness import Results, compare, run
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import hpctrain
from hpctrain.tools.bench.measure import take_turns
from hpctrain.tools.bench.step import Batches, Step, by_hand, with_session
from hpctrain.tools.bench.turns import timed

CLASSES = 1000
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BASELINE, OURS = "baseline", "hpctrain"


def parts(
    device: torch.device, name: str, fused: bool = True
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a new model and its optimizer, with the same weights each time."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=CLASSES).to(device)
    own = {"fused": fused and device.type == "cuda"}
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **own)


def fast(device: torch.device, name: str, batches: Batches, compiled: bool = False) -> Step:
    """Return the baseline's step: channels last, bf16, a fused optimizer."""
    model, optimizer = parts(device, name)
    model.to(memory_format=torch.channels_last)
    if compiled:
        model.compile()
    turns = ((i.contiguous(memory_format=torch.channels_last), t) for i, t in batches)
    return by_hand(device, model, optimizer, turns, torch.bfloat16)


def like_timm(
    device: torch.device,
    name: str,
    batches: Batches,
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Step:
    """Return the step of timm's script, by default in fp16 with a GradScaler."""
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    turns = ((images.contiguous(), targets) for images, targets in batches)
    return by_hand(device, *parts(device, name, fused=False), turns, half, criterion)


def like_torchvision(device: torch.device, name: str, batches: Batches) -> Step:
    """Return the step of torchvision's script, which reads the loss and two accuracies."""
    last: list[Tensor] = []

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        last[:] = outputs.detach(), targets
        return cross_entropy(outputs, targets)

    step = like_timm(device, name, batches, criterion)

    def step_and_read() -> Tensor:
        loss = step()
        outputs, targets = last
        hits = outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]
        for value in (loss, hits[:, 0].float().mean(), hits.any(1).float().mean()):
            value.item()
        return loss

    return step_and_read


def with_hpctrain(session: hpctrain.Session, batches: Batches, name: str) -> Step:
    """Return the training step of examples/imagenet.py."""
    return with_session(session, *parts(session.device, name), batches)


def resident(session: hpctrain.Session, count: int, size: int) -> Batches:
    """Return batches that are already on the device."""
    batches = [
        session.placement((torch.randn(count, 3, size, size), torch.randint(CLASSES, (count,))))
        for _ in range(4)
    ]
    return itertools.cycle(batches)


def forever(loader: Any) -> Batches:
    """Yield batches epoch after epoch, without end."""
    while True:
        yield from loader


def files_hpctrain(session: hpctrain.Session, path: str, size: int) -> Batches:
    """Return batches from files, loaded as in examples/imagenet.py."""
    crop = v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
    train_set = torchvision.datasets.ImageFolder(os.path.join(path, "train"), crop)

    def normalize(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images = v2.functional.to_dtype(batch[0], torch.float32, scale=True)
        return v2.functional.normalize(images, list(MEAN), list(STD)), batch[1]

    return forever(session.loader(train_set, on_device=normalize))


def files_torchvision(session: hpctrain.Session, path: str, size: int, count: int) -> Batches:
    """Return batches from files, made by torchvision's usual transforms."""
    steps = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    folder = torchvision.datasets.ImageFolder(os.path.join(path, "train"), v2.Compose(steps))
    loader = torch.utils.data.DataLoader(
        folder, count, shuffle=True, num_workers=session.workers, drop_last=True,
        pin_memory=session.device.type == "cuda", persistent_workers=session.workers > 0,
    )  # fmt: skip
    device = session.device
    return ((i.to(device, non_blocking=True), t.to(device)) for i, t in forever(loader))


def groups(
    session: hpctrain.Session, compiling: hpctrain.Session | None, arguments: argparse.Namespace
) -> dict[str, dict[str, Step]]:
    """Return the arms by group; the first arm of each group is its base.

    Args:
        session: open session.
        compiling: another one, with --compile; None without a GPU.
        arguments: parsed command line.
    """
    name, path, size = arguments.model, arguments.data, arguments.size
    device, batches = session.device, resident(session, arguments.batch_size, size)
    steps = {
        "in memory": {
            BASELINE: fast(device, name, batches),
            OURS: with_hpctrain(session, batches, name),
            "like torchvision's script": like_torchvision(device, name, batches),
            "like timm's script": like_timm(device, name, batches),
        }
    }
    if compiling:
        steps["compiled"] = {
            BASELINE: fast(device, name, batches, compiled=True),
            OURS: with_hpctrain(compiling, batches, name),
        }
    if path:
        theirs = files_torchvision(session, path, size, arguments.batch_size)
        steps["from files"] = {
            "torchvision's way": fast(device, name, theirs),
            OURS: with_hpctrain(session, files_hpctrain(session, path, size), name),
        }
    return steps


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's images per second, and their ratio to the base of its group."""
    has_gpu = torch.cuda.is_available()
    torch.backends.cudnn.benchmark = True
    options = {"precision": "bf16", "batch_size": arguments.batch_size, "workers": "auto"}
    with tempfile.TemporaryDirectory() as folder:
        session = hpctrain.Session(**options, run_dir=folder)
        compiling = hpctrain.Session(**options, run_dir=folder, compile=True) if has_gpu else None
        with session:
            steps = groups(session, compiling, arguments)

            def rate(step: Step) -> dict[str, float]:
                seconds = timed(session.device, step, arguments.steps)
                return {"images_per_s": arguments.batch_size / seconds}

            arms = {
                f"{group}, {name}": partial(rate, step)
                for group, own in steps.items()
                for name, step in own.items()
            }
            rates = take_turns(arms, arguments.rounds, warm_up=1)
            if compiling:
                compiling.close()
    targets = {OURS: {"ratio": "≥ 0.99"}}
    results = {}
    for group, own in steps.items():
        of_group = {name: rates[f"{group}, {name}"] for name in own}
        judged = targets if has_gpu and BASELINE in own else {}
        results[group] = compare(of_group, next(iter(own)), targets=judged)
    return results


OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"default": "resnet50", "help": "torchvision model (resnet50)"},
    "--data": {"metavar": "PATH", "help": "folder of train/CLASS/*.jpg"},
    "--size": {"type": int, "default": 224, "metavar": "PIXELS", "help": "image size (224)"},
    "--batch-size": {"type": int, "default": 256, "metavar": "N", "help": "default: 256"},
    "--steps": {"type": int, "default": 20, "metavar": "N", "help": "steps per block (20)"},
}

if __name__ == "__main__":
    packages = ["hpctrain", "torch", "torchvision"]
    title = "ResNet-50's training, against other loops."
    run(title, 20, packages, measure, OPTIONS, of_gpu=True)
