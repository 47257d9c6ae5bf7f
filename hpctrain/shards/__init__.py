"""Sets of images on disk, in folders or in tar files: found, read, written. Never imports torch."""

from hpctrain.shards.finding import Source, image_source, same_classes
from hpctrain.shards.folders import FolderSource
from hpctrain.shards.indexing import build_index
from hpctrain.shards.reading import ShardSource
from hpctrain.shards.writing import make

__all__ = [
    "FolderSource",
    "ShardSource",
    "Source",
    "build_index",
    "image_source",
    "make",
    "same_classes",
]
