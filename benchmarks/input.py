"""Images per second that one core prepares, and a loader with two processes.

    python benchmarks/input.py [--rounds 10] [--images 120] [--save FILE]

Photographs of 500 × 375 (examples/photographs.py; about 60 kB each) are in memory as JPEG. One
thread makes random crops of 3 × 224 × 224: with torchvision's usual pipeline over Pillow, to floats
and to bytes, and with hpctrain. The decoders are also measured alone. Then a DataLoader with two
processes reads the same files: with torchvision's ImageFolder, and with hpctrain from a folder and
from tar files. The arms take turns; each is compared with the first arm of its table in the same
round. The target is 1.5 times the images per second of the pipeline over Pillow to floats.
"""

import argparse
import importlib.util
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import simplejpeg
import torch
import torchvision
from measure import add_save, describe, facts, order, outcome, save, summary, table
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from hpctrain import data
from hpctrain.data import shards
from hpctrain.data.images import decoding

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import photographs

TARGET = 1.5
BASE, BYTES, OURS = "torchvision, to floats", "torchvision, to bytes", "hpctrain"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = (v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip())
TO_FLOATS = (v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD))
Arms = dict[str, Callable[[], object]]


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
    for name, place in (("folder", folder), ("tar files", tar)):
        source = data.image_source(place, "train")
        sets[f"{OURS}, {name}"] = data.ImageSet(source, data.RandomResizedCrop(224))
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "shuffle": True}
    loaders = {
        name: DataLoader(dataset, batch_size=30, **options) for name, dataset in sets.items()
    }
    return {name: lambda loader=loader: drained(loader) for name, loader in loaders.items()}


def drained(batches: Iterable[Any]) -> int:
    """Read all batches and return their number."""
    return sum(1 for _ in batches)


def take_turns(arms: Arms, images: int, rounds: int) -> dict[str, list[float]]:
    """Return each arm's images per second in each round, after one round to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in order(list(arms), number):
            begin = time.perf_counter()
            arms[name]()
            if number:
                rates[name].append(images / (time.perf_counter() - begin))
    return rates


def evaluate(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return images per second, and their ratio to the first arm of the same round."""
    base = next(iter(rates.values()))
    return {
        name: {
            "images_per_s": summary(own),
            "ratio": summary([a / b for a, b in zip(own, base, strict=True)]),
        }
        for name, own in rates.items()
    }


def show(title: str, results: dict[str, Any]) -> str:
    """Return the results as a text table."""
    base = next(iter(results))
    rows = [(title, "images/s", f"× {base}")]
    for name, result in results.items():
        ratio = describe(result["ratio"], ".2f") if name != base else ""
        rows.append((name, describe(result["images_per_s"], ".0f"), ratio))
    return table(rows) + "\n"


def judged(results: dict[str, Any], name: str) -> str:
    """Return the outcome on an arm's ratio, inverted because less is better in `outcome`."""
    ratio = results[name]["ratio"]
    inverse = {"median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}
    return outcome(inverse, 1 / TARGET)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="Images per second, before they reach a GPU.")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--images", type=int, default=120, metavar="N", help="default: 120")
    add_save(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder, tar = Path(place, "folder"), Path(place, "tar")
        photographs.make(folder, train=-(-arguments.images // 12), val=0, classes=12)
        shards.make(folder, tar, ["train"], 2**22)
        source = data.image_source(folder, "train")
        files = [source.read(index) for index in range(len(source))]
        crops, decoders = on_one_core(files)
        results = {
            "crops": evaluate(take_turns(crops, len(files), arguments.rounds)),
            "decoders": evaluate(take_turns(decoders, len(files), arguments.rounds)),
            "loaders": evaluate(
                take_turns(by_loaders(folder, tar), len(files), max(arguments.rounds // 2, 2))
            ),
        }
    size = sum(map(len, files)) / len(files)
    print(f"{len(files)} photographs of {size / 1e3:.0f} kB on average\n")
    print(show("random crops, one thread", results["crops"]))
    print(show("decoding alone, one thread", results["decoders"]))
    print(show("a loader with two processes", results["loaders"]))
    reached = judged(results["crops"], OURS)
    print(f"hpctrain: at least × {TARGET:g} of {BASE}: {reached}")
    packages = ("torch", "torchvision", "pillow", "simplejpeg", "torchcodec")
    target = {"ratio": results["crops"][OURS]["ratio"], "at_least": TARGET, "outcome": reached}
    record = {"bytes": size, "results": results, "targets": {f"{OURS}, crops": target}}
    save(arguments.save, {**facts(packages), **record})


if __name__ == "__main__":
    main()
