"""Order of the samples on the ranks, their transfer to the device, and the digits.

These are the names for scripts, imported at first use. hpctrain itself imports from the modules.
"""

from typing import TYPE_CHECKING

from hpctrain._lazy import lazy

if TYPE_CHECKING:
    from hpctrain.data.datasets import Images, digits
    from hpctrain.data.loader import Loader
    from hpctrain.data.sampler import EvaluationSampler, TrainingSampler
    from hpctrain.data.unreadable import SkipUnreadable

__all__ = [
    "EvaluationSampler",
    "Images",
    "Loader",
    "SkipUnreadable",
    "TrainingSampler",
    "digits",
]

if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = lazy(
        __name__,
        {
            "datasets": ("Images", "digits"),
            "loader": ("Loader",),
            "sampler": ("EvaluationSampler", "TrainingSampler"),
            "unreadable": ("SkipUnreadable",),
        },
    )
