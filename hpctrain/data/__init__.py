"""Data sets of images, their order on the ranks, and the transfer to the device.

Names of this package are imported at first use, so `hpctrain shards` runs without torch.
"""

from typing import TYPE_CHECKING

from hpctrain._lazy import lazy

if TYPE_CHECKING:
    from hpctrain.data.datasets import Images, load
    from hpctrain.data.epochs import SHARED, begin_epoch, counts_itself, share, steps_of_epoch
    from hpctrain.data.feed import Placement
    from hpctrain.data.images import (
        IGNORED,
        CenterCrop,
        ImageSet,
        Normalize,
        RandomResizedCrop,
        SyntheticImages,
    )
    from hpctrain.data.loader import Loader, check_arguments
    from hpctrain.data.own_loaders import batch_size, check_own, samples, without_bar
    from hpctrain.data.sampler import EvaluationSampler, TrainingSampler
    from hpctrain.data.shards import FolderSource, ShardSource, Source, image_source, same_classes
    from hpctrain.data.shared_loader import SharedLoader, Sharing, weighed
    from hpctrain.data.shared_stream import SharedStream, end_together

__all__ = [
    "IGNORED",
    "SHARED",
    "CenterCrop",
    "EvaluationSampler",
    "FolderSource",
    "ImageSet",
    "Images",
    "Loader",
    "Normalize",
    "Placement",
    "RandomResizedCrop",
    "ShardSource",
    "SharedLoader",
    "SharedStream",
    "Sharing",
    "Source",
    "SyntheticImages",
    "TrainingSampler",
    "batch_size",
    "begin_epoch",
    "check_arguments",
    "check_own",
    "counts_itself",
    "end_together",
    "image_source",
    "load",
    "same_classes",
    "samples",
    "share",
    "steps_of_epoch",
    "weighed",
    "without_bar",
]

__getattr__ = lazy(
    __name__,
    {
        "datasets": ("Images", "load"),
        "epochs": ("SHARED", "begin_epoch", "counts_itself", "share", "steps_of_epoch"),
        "feed": ("Placement",),
        "images": (
            "IGNORED",
            "CenterCrop",
            "ImageSet",
            "Normalize",
            "RandomResizedCrop",
            "SyntheticImages",
        ),
        "loader": ("Loader", "check_arguments"),
        "own_loaders": ("batch_size", "check_own", "samples", "without_bar"),
        "sampler": ("EvaluationSampler", "TrainingSampler"),
        "shards": ("FolderSource", "ShardSource", "Source", "image_source", "same_classes"),
        "shared_loader": ("SharedLoader", "Sharing", "weighed"),
        "shared_stream": ("SharedStream", "end_together"),
    },
)
