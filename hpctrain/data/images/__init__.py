"""Images on disk: decoding, cropping, and normalization on the device."""

from hpctrain.data.images.cropping import CenterCrop, RandomResizedCrop
from hpctrain.data.images.imageset import IGNORED, ImageSet
from hpctrain.data.images.normalizing import Normalize
from hpctrain.data.images.synthetic import SyntheticImages

__all__ = [
    "IGNORED",
    "CenterCrop",
    "ImageSet",
    "Normalize",
    "RandomResizedCrop",
    "SyntheticImages",
]
