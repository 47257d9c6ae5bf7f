"""Images per second when training ResNet-50: hpctrain, the baseline, and others' loops.

    python benchmarks/imagenet.py [--data PATH] [--rounds 20] [--steps 20] [--save FILE]

All arms run in one process on one GPU. They take turns, a block of steps each:

- baseline: channels last, bf16 autocast, a fused optimizer, nothing read from the
  device;
- baseline, compiled, and hpctrain, compiled: the same with torch.compile;
- hpctrain: `session.autocast()` and `session.step()`, as in examples/imagenet.py;
- like torchvision's script, like timm's script: the step of references/classification/train.py
  (torchvision 0.29) and of timm's train.py (1.0) with `--amp` and otherwise their defaults, written
  again here: no channels last, an optimizer that is not fused, and fp16 with a GradScaler; the step
  of torchvision also reads the loss and two accuracies from the device.

The batches of these arms are on the GPU. `--data FOLDER`, a folder of real images, adds two arms
with equally many workers: hpctrain's whole input from files, and torchvision's usual input (Pillow,
floats from the workers) for the baseline. The targets: 0.99 of the baseline, and faster than the
steps of torchvision and timm. Without a GPU, a run only checks that the program works.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from measure import add_save, describe, facts, order, save, summary, table
from precision import TARGET, block, reached
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import hpctrain
from hpctrain import data

CLASSES = 1000
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BASE = {"hpctrain": "baseline", "hpctrain, compiled": "baseline, compiled"}
BASE |= {"like torchvision's script": "hpctrain", "like timm's script": "hpctrain"}
BASE |= {"files, hpctrain": "hpctrain", "files, torchvision's way": "baseline"}
Batches = Iterator[tuple[Tensor, Tensor]]
Step = Callable[[], Any]


def baseline(
    device: torch.device,
    batches: Batches,
    name: str,
    half: torch.dtype = torch.bfloat16,
    channels_last: bool = True,
    fused: bool = True,
    compiled: bool = False,
    read: Callable[[Tensor, Tensor, Tensor], Any] = lambda loss, outputs, targets: None,
) -> Step:
    """Return a training step without hpctrain."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=CLASSES).to(device)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    if compiled:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused or None)
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)

    def step() -> None:
        images, targets = next(batches)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, half):
            outputs = model(images)
            loss = cross_entropy(outputs, targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        read(loss, outputs, targets)

    return step


def with_hpctrain(session: hpctrain.Session, batches: Batches, name: str) -> Step:
    """Return the training step of examples/imagenet.py."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=CLASSES)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, fused=session.device.type == "cuda"
    )
    model, optimizer = session.prepare(model, optimizer)

    def step() -> None:
        images, targets = next(batches)
        with session.autocast():
            loss = cross_entropy(model(images), targets)
        session.step(loss, optimizer)

    return step


def accuracies(loss: Tensor, outputs: Tensor, targets: Tensor) -> tuple[float, ...]:
    """Read loss, top-1 and top-5 from the device, as torchvision's script does at each step."""
    hits = outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]
    return loss.item(), hits[:, 0].float().mean().item(), hits.any(1).float().mean().item()


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
    crop = data.RandomResizedCrop(size)
    train_set = data.ImageSet(data.image_source(path, "train"), crop)
    return forever(session.loader(train_set, on_device=data.Normalize(MEAN, STD)))


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


def arms(opened: dict[bool, hpctrain.Session], arguments: argparse.Namespace) -> dict[str, Step]:
    """Return the arms by name.

    Args:
        opened: session by whether it compiles; the one that compiles exists only on GPUs.
        arguments: parsed command line.
    """
    session, name = opened[False], arguments.model
    fused = session.device.type == "cuda"
    device, batches = session.device, resident(session, arguments.batch_size, arguments.size)
    old = {"half": torch.float16 if fused else torch.bfloat16, "channels_last": False}
    old["fused"] = False
    steps = {
        "baseline": baseline(device, batches, name, fused=fused),
        "hpctrain": with_hpctrain(session, batches, name),
        "like torchvision's script": baseline(device, batches, name, **old, read=accuracies),
        "like timm's script": baseline(device, batches, name, **old),
    }
    if True in opened:
        steps["baseline, compiled"] = baseline(device, batches, name, compiled=True)
        steps["hpctrain, compiled"] = with_hpctrain(opened[True], batches, name)
    if arguments.data:
        path, size = arguments.data, arguments.size
        own = files_hpctrain(session, path, size)
        steps["files, hpctrain"] = with_hpctrain(session, own, name)
        others = files_torchvision(session, path, size, arguments.batch_size)
        steps["files, torchvision's way"] = baseline(device, others, name, fused=fused)
    return steps


def measure(steps: dict[str, Step], arguments: argparse.Namespace, device: torch.device) -> Any:
    """Return each arm's images per second, and their ratio to the arm of `BASE` per round."""
    speeds: dict[str, list[float]] = {arm: [] for arm in steps}
    for step in steps.values():
        block(step, arguments.steps, device)  # warms up
    for number in range(arguments.rounds):
        for arm in order(list(steps), number):
            seconds = block(steps[arm], arguments.steps, device)
            speeds[arm].append(arguments.batch_size / seconds)
    results = {}
    for arm, values in speeds.items():
        results[arm] = {"images_per_second": summary(values)}
        if base := BASE.get(arm):
            pairs = zip(values, speeds[base], strict=True)
            results[arm] |= {"base": base, "ratio": summary([a / b for a, b in pairs])}
    return results


def show(model: str, results: dict[str, Any]) -> str:
    """Return the results as a text table."""
    rows = [(model, "images/s", "×", "of", f"at least {TARGET}")]
    for arm, result in results.items():
        speed, base = describe(result["images_per_second"]), result.get("base", "")
        ratio = describe(result["ratio"], ".3f") if base else ""
        has_target = base.startswith("baseline") and arm.startswith("hpctrain")
        rows.append((arm, speed, ratio, base, reached(result["ratio"]) if has_target else ""))
    return table(rows)


def main() -> None:
    """Measure, print, save."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="ResNet-50's training, against other loops.")
    parser.add_argument("--model", default="resnet50", help="torchvision model (resnet50)")
    parser.add_argument("--data", metavar="PATH", help="folder of train/CLASS/*.jpg")
    parser.add_argument("--size", type=int, default=224, metavar="PIXELS", help="image size (224)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps per block (20)")
    add_save(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    if arguments.save and not has_gpu:
        parser.error("--save: torch finds no GPU, and figures of a CPU are no results here")
    record = facts(["hpctrain", "torch", "torchvision"])
    if has_gpu:
        record["gpu"] = torch.cuda.get_device_name()
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory() as folder:
        options = {"precision": "bf16", "batch_size": arguments.batch_size, "workers": "auto"}
        with hpctrain.Session(**options, run_dir=folder) as session:
            opened = {False: session}
            if has_gpu:
                opened[True] = hpctrain.Session(**options, run_dir=folder, compile=True)
            results = measure(arms(opened, arguments), arguments, session.device)
            for other in list(opened.values())[1:]:
                other.close()
    print(show(arguments.model, results))
    print("Medians over blocks, with their 95 % intervals; ratios block by block.")
    names = ("model", "data", "size", "batch_size", "rounds", "steps")
    settings = {name: getattr(arguments, name) for name in names}
    save(arguments.save, {"benchmark": "imagenet", **record, **settings, "results": results})


if __name__ == "__main__":
    main()
