"""`hpctrain shards`: write folders of images to tar files, and the index of tar files."""

import argparse
import sys
import time
from pathlib import Path

from hpctrain.cli.argument_types import typed
from hpctrain.data.shards.index import build_index, path_of, shard_paths
from hpctrain.data.shards.writing import make
from hpctrain.errors import UsageError
from hpctrain.tools.bench.measure import size

__all__ = ["add"]


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
        type=typed("size such as 500M or 1G", size),
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


def _make(arguments: argparse.Namespace) -> int:
    splits = [name for name in arguments.splits.split(",") if name]
    make(arguments.source, arguments.target, splits, arguments.shard_size, _Progress())
    sys.stdout.write(f"{arguments.target}: {', '.join(splits)}\n")
    return 0


def _index(arguments: argparse.Namespace) -> int:
    try:
        return _write_indices(arguments.path)
    except OSError as error:
        raise UsageError(
            "HT825",
            f"{error.filename or arguments.path}: {error.strerror}",
            "tar files that can be read, in a folder that can be written",
        ) from None


def _write_indices(folder: Path) -> int:
    names = {path.name.rpartition("-")[0] for path in folder.glob("*-*.tar")}
    splits = [split for split in sorted(names) if shard_paths(folder, split)]
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
            error.filename = error.filename or path
            raise
        sys.stdout.write(
            f"{path}: {len(index):,} images of {len(index.classes):,} classes in "
            f"{len(index.shards):,} tar files\n"
        )
    return 0


class _Progress:
    """Line on standard error every 10 s, and at the end of each split."""

    _next = 0.0

    def __call__(self, split: str, done: int, samples: int, written: int) -> None:
        """Show how many images and bytes of a split are written."""
        now = time.monotonic()
        if done == samples or now >= self._next:
            self._next = now + 10
            size = f"{written / 1e9:.2f} GB"
            sys.stderr.write(f"{split}: {done:,} of {samples:,} images, {size}\n")
