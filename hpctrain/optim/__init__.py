"""Optimizers for large batches, learning-rate schedules, averages of weights, and weight decay."""

from hpctrain.optim.decay import split
from hpctrain.optim.ema import EMA
from hpctrain.optim.lamb import LAMB
from hpctrain.optim.lars import LARS
from hpctrain.optim.schedules import Schedule, apply, scale

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "Schedule",
    "apply",
    "scale",
    "split",
]
