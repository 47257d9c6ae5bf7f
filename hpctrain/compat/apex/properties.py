"""Settings of `amp.initialize`, checked against those that are supported.

Source: "opt_levels and Properties" in the documentation of apex.amp.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.errors import UsageError

__all__ = ["Properties", "settle"]

_OWN_TYPE = {"O0": torch.float32, "O1": None, "O2": torch.float16, "O3": torch.float16}


@dataclass(frozen=True, slots=True)
class Properties:
    """Precision settings of a script.

    Attributes:
        level: level from O0 to O3.
        autocast: whether the models' forward passes run under autocast.
        masters: whether there are fp32 master weights for those in half precision.
        keep_batchnorm_fp32: whether batch norm stays in fp32; None for the default of the level.
        loss_scale: a number, or "dynamic".
    """

    level: str
    autocast: bool
    masters: bool
    keep_batchnorm_fp32: bool | None
    loss_scale: float | str


def settle(
    opt_level: str,
    cast_model_type: torch.dtype | bool | None,
    patch_torch_functions: bool | None,
    keep_batchnorm_fp32: bool | str | None,
    master_weights: bool | None,
    loss_scale: float | str | None,
) -> Properties:
    """Return the properties of a level, combined with the other arguments.

    Args: as for `amp.initialize`.

    Raises:
        UsageError: the level is unknown, or does not support one of the other arguments.
    """
    if opt_level not in _OWN_TYPE:
        raise UsageError(
            "HT414",
            f"opt_level={opt_level!r}",
            "O0, O1, O2 or O3, with the letter O",
            'opt_level="O1"',
        )
    own = _OWN_TYPE[opt_level]
    if cast_model_type not in (None, own) and not (
        opt_level == "O1" and cast_model_type in (False, torch.float32)
    ):
        _refuse(opt_level, "cast_model_type", cast_model_type, str(own))
    if patch_torch_functions and opt_level != "O1":
        _refuse(opt_level, "patch_torch_functions", patch_torch_functions, "O1's alone")
    if opt_level == "O1":
        if master_weights is not None:
            _refuse(opt_level, "master_weights", master_weights, "weights that are fp32 themselves")
        if keep_batchnorm_fp32 is not None:
            _refuse(opt_level, "keep_batchnorm_fp32", keep_batchnorm_fp32, "all weights in fp32")
    half = opt_level in ("O2", "O3")
    given = opt_level == "O2" if master_weights is None else bool(master_weights)
    if loss_scale is None:
        loss_scale = "dynamic" if opt_level in ("O1", "O2") else 1.0
    return Properties(
        opt_level,
        opt_level == "O1" and patch_torch_functions is not False,
        half and given,
        _batchnorm(opt_level, keep_batchnorm_fp32),
        _scale(loss_scale),
    )


def _refuse(level: str, name: str, value: Any, expected: str) -> None:
    raise UsageError(
        "HT414", f"{name}={value} with opt_level {level}", expected, f"leave {name} out"
    )


def _batchnorm(level: str, value: bool | str | None) -> bool | None:
    """Return the setting as a bool; scripts pass the texts from their command lines."""
    answers: dict[Any, bool | None] = {"True": True, "False": False, True: True, False: False}
    if value is None:
        # The default of O2 is the same without its masters.
        return {"O2": True, "O3": False}.get(level)
    if value not in answers:
        raise UsageError(
            "HT414",
            f"keep_batchnorm_fp32={value!r}",
            'True, False, "True", "False" or None',
            "keep_batchnorm_fp32=True",
        )
    return answers[value]


def _scale(value: float | str) -> float | str:
    if value == "dynamic":
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise UsageError(
            "HT414",
            f"loss_scale={value!r}",
            'a number above 0, or "dynamic"',
            'loss_scale="dynamic"',
        )
    return number
