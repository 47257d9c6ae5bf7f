"""Images per second that one core prepares, and a loader with two processes.

    python benchmarks/input.py [--rounds 10] [--images 480] [--save FILE]

Photographs of 500 × 375 (examples/photographs.py; about 60 kB each) are in memory as JPEG. One
thread makes random crops of 3 × 224 × 224: with torchvision's usual pipeline over Pillow, to floats
and to bytes, with hpctrain, and with other libraries, those that are installed. The decoders are
also measured alone. Then a DataLoader with two processes reads the same files: with torchvision's
ImageFolder, and with hpctrain from a folder and from tar files. The arms take turns; each is
compared with the first arm of its table in the same round. The target is 2.5 times the images per
second of the pipeline over Pillow to floats. What two processes can do on this machine at all is
shown by two that make crops of files in memory and send nothing; a loader is to reach 0.95 of it.
"""

import argparse
import importlib.util
import io
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import input_peers
import simplejpeg
import torch
import torchvision
from harness import Results, compare, run
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from hpctrain import data
from hpctrain.data.images import decoding
from hpctrain.data.shards.writing import make
from hpctrain.tools.bench.measure import take_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import photographs

BASE, BYTES, OURS = "torchvision, to floats", "torchvision, to bytes", "hpctrain"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = (v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip())
TO_FLOATS = (v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD))
FOLDER, TAR, ALONE = "hpctrain, folder", "hpctrain, tar files", "two processes, no loader"
Arms = dict[str, Callable[[], object]]
FILES: list[bytes] = []  # of a process without a loader


def on_one_core(files: list[bytes]) -> tuple[Arms, Arms]:
    """Return the arms that make crops of all files, and those that only decode them."""
    floats, pixels = v2.Compose([*CROP, *TO_FLOATS]), v2.Compose([*CROP, v2.PILToTensor()])
    crop, fast, pillow = data.RandomResizedCrop(224), decoding.find("auto"), decoding.Pillow()

    def opened(file: bytes) -> Image.Image:
        return Image.open(io.BytesIO(file)).convert("RGB")

    def each(work: Callable[[bytes], object]) -> Callable[[], object]:
        return lambda: [None for file in files if work(file) is None]

    def tensor(file: bytes) -> torch.Tensor:
        return torch.frombuffer(file, dtype=torch.uint8)

    half = (180, 240)
    crops = {
        BASE: each(lambda file: floats(opened(file))),
        BYTES: each(lambda file: pixels(opened(file))),
        OURS: each(lambda file: crop(file, fast)),
        f"{OURS}, Pillow as decoder": each(lambda file: crop(file, pillow)),
        **input_peers.arms(files),
    }
    decoders = {
        "Pillow": each(pillow.decode),
        "torchvision.io": each(lambda file: torchvision.io.decode_jpeg(tensor(file))),
        "simplejpeg": each(lambda file: simplejpeg.decode_jpeg(file, "RGB")),
        "Pillow, at a half": each(lambda file: pillow.decode(file, half)),
        "simplejpeg, at a half": each(lambda file: fast.decode(file, half)),
    }
    if importlib.util.find_spec("torchcodec") is None:
        print("torchcodec: left out: not installed: pip install 'hpctrain[benchmark]'")
    else:
        from torchcodec.decoders import decode_jpeg

        decoders["torchcodec"] = each(lambda file: decode_jpeg(tensor(file)))
    return crops, decoders


def by_loaders(folder: Path, tar: Path) -> Arms:
    """Return arms that read a whole data set with two processes, which continue to run."""
    baseline = torchvision.datasets.ImageFolder(folder / "train", v2.Compose([*CROP, *TO_FLOATS]))
    sets: dict[str, Any] = {BASE: baseline}
    for name, place in ((FOLDER, folder), (TAR, tar)):
        source = data.image_source(place, "train")
        sets[name] = data.ImageSet(source, data.RandomResizedCrop(224))
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "shuffle": True}
    loaders = {
        name: DataLoader(dataset, batch_size=30, **options) for name, dataset in sets.items()
    }
    return {name: lambda loader=loader: [None for _ in loader] for name, loader in loaders.items()}


def half(first: int) -> None:
    """Make crops of every second file."""
    crop, decoder = data.RandomResizedCrop(224), decoding.find("auto")
    for file in FILES[first::2]:
        crop(file, decoder)


def rate(arm: Callable[[], object], images: int) -> dict[str, float]:
    """Return the images per second of an arm."""
    begin = time.perf_counter()
    arm()
    return {"images_per_s": images / (time.perf_counter() - begin)}


def compared(
    arms: Arms, images: int, rounds: int, targets: dict[str, dict[str, str]] | None = None
) -> Results:
    """Return images per second, and their ratio to the first arm, after one round to warm up."""
    timers = {name: partial(rate, arm, images) for name, arm in arms.items()}
    return compare(take_turns(timers, rounds, warm_up=1), next(iter(arms)), targets=targets)


def measure(arguments: argparse.Namespace) -> Results:
    """Return the results of crops, decoders and loaders."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rounds = arguments.rounds
    with tempfile.TemporaryDirectory() as place:
        folder, tar = Path(place, "folder"), Path(place, "tar")
        photographs.make(folder, train=-(-arguments.images // 12), val=0, classes=12)
        make(folder, tar, ["train"], 2**22)
        source = data.image_source(folder, "train")
        files = [source.read(index) for index in range(len(source))]
        print(f"{len(files)} photographs of {sum(map(len, files)) / len(files) / 1e3:.0f} kB\n")
        crops, decoders = on_one_core(files)
        loaders = by_loaders(folder, tar)
        context = multiprocessing.get_context("fork")
        with context.Pool(2, FILES.extend, (files,)) as pool:
            alone = {ALONE: lambda: pool.map(half, (0, 1))}
            ours = {name: loaders[name] for name in (FOLDER, TAR)}
            reached = {name: {"ratio": "≥ 0.95"} for name in ours}
            return {
                "crops": compared(crops, len(files), rounds, {OURS: {"ratio": "≥ 2.5"}}),
                "decoders": compared(decoders, len(files), rounds),
                "loaders": compared(loaders, len(files), rounds),
                "loaders, of what is possible": compared(alone | ours, len(files), rounds, reached),
            }


OPTIONS = {"--images": {"type": int, "default": 480, "metavar": "N", "help": "default: 480"}}

if __name__ == "__main__":
    packages = ["torch", "torchvision", "pillow", "simplejpeg", "torchcodec"]
    run("Images per second, before they reach a GPU.", 10, packages, measure, OPTIONS)
