"""Data: sets of images, the order in which ranks see them, and the way to the device."""

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
from hpctrain.data.own import begin_own, check_own, fingerprint, refuse_same, samples
from hpctrain.data.sampler import EvaluationSampler, TrainingSampler
from hpctrain.shards import FolderSource, ShardSource, Source, image_source, same_classes

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
