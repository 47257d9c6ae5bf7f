"""Data: sets of images, the order in which ranks see them, and the way to the device."""

from hpctrain.data.datasets import Images, load
from hpctrain.data.loader import Loader, Placement, check_arguments
from hpctrain.data.sampler import EvaluationSampler, TrainingSampler

__all__ = [
    "EvaluationSampler",
    "Images",
    "Loader",
    "Placement",
    "TrainingSampler",
    "check_arguments",
    "load",
]
