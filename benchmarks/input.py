"""Images per second that one core prepares, and a loader with two processes.

    python benchmarks/input.py [--rounds 10] [--images 480] [--save FILE]

Photographs of 500 × 375 (examples/photographs.py; about 60 kB each) are in a folder as JPEG. One
thread reads them and makes random crops of 3 × 224 × 224, mirrored at random. Then a DataLoader
with two processes does the same and makes batches.

- torchvision: `ImageFolder`, whose loader is Pillow, and v2 transforms of bytes, as in
  examples/imagenet.py;
- torchvision, to floats: normalized on the host, as in most scripts;
- torchvision, its decoder: `decode_image`, which torchvision 0.29 deprecates, as the loader.

The arms take turns; each is compared with torchvision in the same round.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Results, compare, run
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image
from torchvision.transforms import v2

from hpctrain.tools.bench.measure import take_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import photographs

BASE = "torchvision"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = (v2.RandomResizedCrop(224), v2.RandomHorizontalFlip())
TO_FLOATS = (v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD))


def decode(path: str) -> torch.Tensor:
    """Return the pixels of an image file, by torchvision's decoder."""
    return decode_image(torch.from_numpy(np.fromfile(path, "uint8")), "RGB")


def data_sets(folder: Path) -> dict[str, Dataset[Any]]:
    """Return the data set of each arm."""
    train = folder / "train"
    return {
        BASE: ImageFolder(train, v2.Compose([v2.PILToTensor(), *CROP])),
        f"{BASE}, to floats": ImageFolder(train, v2.Compose([v2.PILToTensor(), *CROP, *TO_FLOATS])),
        f"{BASE}, its decoder": ImageFolder(train, v2.Compose(CROP), loader=decode),
    }


def each(dataset: Any) -> None:
    """Read every sample in this thread."""
    for index in range(len(dataset)):
        dataset[index]


def rate(arm: Callable[[], object], images: int) -> dict[str, float]:
    """Return the images per second of an arm."""
    begin = time.perf_counter()
    arm()
    return {"images_per_s": images / (time.perf_counter() - begin)}


def compared(arms: dict[str, Callable[[], object]], images: int, rounds: int) -> Results:
    """Return images per second, and their ratio to the first arm, after one round to warm up."""
    timers = {name: partial(rate, arm, images) for name, arm in arms.items()}
    return compare(take_turns(timers, rounds, warm_up=1), BASE)


def measure(arguments: argparse.Namespace) -> Results:
    """Return the results of one thread and of loaders."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        photographs.make(folder, train=-(-arguments.images // 12), val=0, classes=12)
        sets = data_sets(folder)
        images = len(sets[BASE])  # type: ignore[arg-type]
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "shuffle": True}
        loaders = {name: DataLoader(one, batch_size=30, **options) for name, one in sets.items()}
        crops = {name: partial(each, one) for name, one in sets.items()}
        batches = {name: partial(list, loader) for name, loader in loaders.items()}
        return {
            "one thread": compared(crops, images, arguments.rounds),
            "loader, two processes": compared(batches, images, arguments.rounds),
        }


OPTIONS = {"--images": {"type": int, "default": 480, "metavar": "N", "help": "default: 480"}}

if __name__ == "__main__":
    packages = ["torch", "torchvision", "pillow"]
    run("Images per second, before they reach a GPU.", 10, packages, measure, OPTIONS)
