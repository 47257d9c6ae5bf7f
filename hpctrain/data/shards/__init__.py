"""Image sets on disk, in folders or tar files: find, read, write. It never imports torch."""

from hpctrain.data.shards.folders import FolderSource
from hpctrain.data.shards.indexing import build_index
from hpctrain.data.shards.layouts import Source, image_source, same_classes
from hpctrain.data.shards.shard_reader import ShardSource
from hpctrain.data.shards.writing import make

__all__ = [
    "FolderSource",
    "ShardSource",
    "Source",
    "build_index",
    "image_source",
    "make",
    "same_classes",
]
