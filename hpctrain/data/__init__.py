"""Data sets of images, their order on the ranks, and the transfer to the device.

Names of this package are imported at first use, so `hpctrain shards` runs without torch.
"""

from typing import TYPE_CHECKING

from hpctrain._lazy import lazy

if TYPE_CHECKING:
    from hpctrain.data.datasets import Images, load
    from hpctrain.data.epochs import begin_epoch, steps_of_epoch
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
    from hpctrain.data.own_loaders import begin_own, check_own, fingerprint, refuse_same, samples
    from hpctrain.data.sampler import EvaluationSampler, TrainingSampler
    from hpctrain.data.shards import FolderSource, ShardSource, Source, image_source, same_classes

__all__ = [
    "IGNORED",
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
    "Source",
    "SyntheticImages",
    "TrainingSampler",
    "begin_epoch",
    "begin_own",
    "check_arguments",
    "check_own",
    "fingerprint",
    "image_source",
    "load",
    "refuse_same",
    "same_classes",
    "samples",
    "steps_of_epoch",
]

__getattr__ = lazy(
    __name__,
    {
        "datasets": ("Images", "load"),
        "epochs": ("begin_epoch", "steps_of_epoch"),
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
        "own_loaders": ("begin_own", "check_own", "fingerprint", "refuse_same", "samples"),
        "sampler": ("EvaluationSampler", "TrainingSampler"),
        "shards": ("FolderSource", "ShardSource", "Source", "image_source", "same_classes"),
    },
)
