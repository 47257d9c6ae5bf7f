"""Data sets of images, their order on the ranks, and the transfer to the device.

These are the names for scripts, imported at first use, so `hpctrain shards` runs without torch.
hpctrain itself imports from the modules.
"""

from typing import TYPE_CHECKING

from hpctrain._lazy import lazy

if TYPE_CHECKING:
    from hpctrain.data.datasets import Images, load
    from hpctrain.data.images.imageset import IGNORED, ImageSet
    from hpctrain.data.images.synthetic import SyntheticImages
    from hpctrain.data.images.transforms import CenterCrop, Normalize, RandomResizedCrop
    from hpctrain.data.loader import Loader
    from hpctrain.data.sampler import EvaluationSampler, TrainingSampler
    from hpctrain.data.shards.layouts import image_source, same_classes

__all__ = [
    "IGNORED",
    "CenterCrop",
    "EvaluationSampler",
    "ImageSet",
    "Images",
    "Loader",
    "Normalize",
    "RandomResizedCrop",
    "SyntheticImages",
    "TrainingSampler",
    "image_source",
    "load",
    "same_classes",
]

if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = lazy(
        __name__,
        {
            "datasets": ("Images", "load"),
            "images.imageset": ("IGNORED", "ImageSet"),
            "images.synthetic": ("SyntheticImages",),
            "images.transforms": ("CenterCrop", "Normalize", "RandomResizedCrop"),
            "loader": ("Loader",),
            "sampler": ("EvaluationSampler", "TrainingSampler"),
            "shards.layouts": ("image_source", "same_classes"),
        },
    )
