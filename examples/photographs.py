"""A small data set of real photographs in ImageNet's layout, for use without ImageNet.

    apt-get install mate-backgrounds
    python examples/photographs.py FOLDER [--classes 10] [--train 100] [--val 20]

Writes FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg: cuts of 500 × 375 pixels, about 60 kB
each. Those of a class come from one photograph, so a model can learn them.
"""

import argparse
import itertools
import os
import random
import sys
from pathlib import Path

try:
    from PIL import Image
except ImportError:
    Image = None

__all__ = ["make"]

PHOTOGRAPHS = Path("/usr/share/backgrounds/mate/nature")
SIZE = 500, 375
QUALITY = 97
# Photographs with exchanged colours are further classes.
COLOURS = list(itertools.permutations(range(3)))


def make(folder, train, val, classes, size=SIZE):
    """Cut photographs; the same arguments always give the same cuts.

    Args:
        folder: folder to write to; created if it is missing.
        train, val: number of cuts per class.
        classes: number of classes, at most 72.
        size: width and height of a cut in pixels.

    Raises:
        FileNotFoundError: there are no photographs, or too few for the classes.
    """
    photographs = sorted(PHOTOGRAPHS.glob("*.jpg"))
    if classes > len(photographs) * len(COLOURS):
        raise FileNotFoundError(
            f"{len(photographs)} photographs in {PHOTOGRAPHS}: apt-get install mate-backgrounds"
        )
    for number in range(classes):
        colours, place = divmod(number, len(photographs))
        with Image.open(photographs[place]) as file:
            bands = file.convert("RGB").split()
        photograph = Image.merge("RGB", [bands[band] for band in COLOURS[colours]])
        chance = random.Random(number)
        for split, count in (("train", train), ("val", val)):
            target = Path(folder, split, f"photo{number:03d}")
            target.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                _cut(photograph, size, chance).save(
                    target / f"{index:06d}.jpg", quality=QUALITY, subsampling="4:2:0"
                )


def _cut(photograph, size, chance):
    """Return a random part of a photograph, scaled to the size of a cut."""
    most = min(photograph.width / size[0], photograph.height / size[1])
    scale = chance.uniform(most / 2, most)
    width, height = int(size[0] * scale), int(size[1] * scale)
    left = chance.randint(0, photograph.width - width)
    top = chance.randint(0, photograph.height - height)
    part = (left, top, left + width, top + height)
    return photograph.resize(size, Image.Resampling.LANCZOS, part)


def main():
    parser = argparse.ArgumentParser(description="Cut photographs into a small data set.")
    parser.add_argument("folder", help="folder for train/ and val/")
    parser.add_argument("--classes", type=int, default=10, metavar="N", help="classes (10)")
    parser.add_argument("--train", type=int, default=100, metavar="N", help="cuts per class (100)")
    parser.add_argument("--val", type=int, default=20, metavar="N", help="cuts per class (20)")
    arguments = parser.parse_args()
    if Image is None:
        sys.exit(f"Pillow is not installed: {sys.executable} -m pip install pillow")
    try:
        make(os.fspath(arguments.folder), arguments.train, arguments.val, arguments.classes)
    except FileNotFoundError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
