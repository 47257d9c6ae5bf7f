"""`hpctrain shards`: write folders of images to tar files, and the index of tar files."""

import argparse
import re
import sys
import time
from pathlib import Path

from hpctrain.data.shards import build_index, make
from hpctrain.data.shards.index import path_of, shard_paths
from hpctrain.errors import HpctrainError, UsageError

__all__ = ["add"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "A shared file system opens a few large files faster than a million small "
        "ones. The tar files contain KEY.jpg and KEY.cls, as in WebDataset, and the index gives "
        "the position of each image. Training reads either layout, with the same numbers."
    )
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    command = kinds.add_parser(
        "make",
        help="write tar files",
        description="Writes SOURCE/SPLIT/CLASS/*.jpg as TARGET/SPLIT-000000.tar, … with "
        "TARGET/SPLIT.index. TARGET is created only when all files are complete.",
    )
    command.add_argument("source", metavar="SOURCE", type=Path, help="folder of the splits")
    command.add_argument("target", metavar="TARGET", type=Path, help="new folder")
    command.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=_size,
        default="1G",
        help="size of a tar file (default: 1G)",
    )
    command.add_argument(
        "--splits",
        metavar="NAME,…",
        default="train,val",
        help="splits to write (default: train,val)",
    )
    command.set_defaults(command=_make)
    command = kinds.add_parser(
        "index",
        help="write the index of tar files",
        description="Writes PATH/SPLIT.index for each PATH/SPLIT-*.tar that has none.",
    )
    command.add_argument("path", metavar="PATH", type=Path, help="folder of the tar files")
    command.set_defaults(command=_index)


def _size(text: str) -> int:
    """Convert a number with K, M, G or T to bytes."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def _make(arguments: argparse.Namespace) -> int:
    splits = [name for name in arguments.splits.split(",") if name]
    make(arguments.source, arguments.target, splits, arguments.shard_size, _Progress())
    sys.stdout.write(f"{arguments.target}: {', '.join(splits)}\n")
    return 0


def _index(arguments: argparse.Namespace) -> int:
    folder = arguments.path
    try:
        names = sorted(folder.glob("*-*.tar")) if folder.is_dir() else []
        splits = sorted({path.name.rpartition("-")[0] for path in names})
        splits = [split for split in splits if shard_paths(folder, split)]
    except OSError as error:
        raise UsageError(
            "HT825", f"{error.filename}: {error.strerror}", "a folder that can be read"
        ) from None
    if not splits:
        raise UsageError(
            "HT825", f"{folder} has no tar files", f"{folder}/SPLIT-000000.tar, …", "another PATH"
        )
    for split in splits:
        path = path_of(folder, split)
        if path.exists():
            sys.stdout.write(f"{path} exists already\n")
            continue
        try:
            index = build_index(folder, split)
            index.write(path)
        except OSError as error:
            raise HpctrainError(
                "HT825",
                f"{error.filename or path}: {error.strerror}",
                "tar files that can be read, and a folder that can be written",
            ) from None
        sys.stdout.write(
            f"{path}: {len(index):,} images of {len(index.classes):,} classes in "
            f"{len(index.shards):,} tar files\n"
        )
    return 0


class _Progress:
    """Progress line on standard error, written each second on a terminal, else every 30 s."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = 0.0
        self._split = self._line = ""

    def __call__(self, split: str, done: int, samples: int, written: int) -> None:
        """Show how many images and bytes of a split are written."""
        if split != self._split:
            self._split, self._begin, self._next = split, time.monotonic(), 0.0
        now = time.monotonic() - self._begin
        if done < samples and now < self._next:
            return
        self._next = now + (1 if self._terminal else 30)
        line = (
            f"{split}: {done:,} of {samples:,} images, {written / 1e9:.2f} GB, "
            f"{done / max(now, 1e-3):,.0f} images/s"
        )
        begin = "\r" if self._terminal else ""
        end = "" if self._terminal and done < samples else "\n"
        sys.stderr.write(f"{begin}{line.ljust(len(self._line))}{end}")
        sys.stderr.flush()
        self._line = line
