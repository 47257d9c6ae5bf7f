"""Settings of `amp.initialize`, checked against those that are supported.

Source: "opt_levels and Properties" in the documentation of apex.amp.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpctrain.errors import UsageError

__all__ = ["ANY", "Properties", "refuse", "settle"]

#: Marks an argument that has no effect here, whatever its value.
ANY = object()

# Scripts pass the texts from their command lines.
_BOOLS = {True: True, False: False, "True": True, "False": False}


@dataclass(frozen=True, slots=True)
class Properties:
    """Precision settings of a script.

    Attributes:
        level: level from O0 to O3.
        autocast: whether the models' forward passes run under autocast.
        masters: whether there are fp32 master weights for those in half precision.
        keep_batchnorm_fp32: whether batch norm stays in fp32; None where all weights are in fp32.
        loss_scale: a number, or "dynamic".
    """

    level: str
    autocast: bool
    masters: bool
    keep_batchnorm_fp32: bool | None
    loss_scale: float | str


_LEVELS = {
    "O0": Properties("O0", False, False, None, 1.0),
    "O1": Properties("O1", True, False, None, "dynamic"),
    "O2": Properties("O2", False, True, True, "dynamic"),
    "O3": Properties("O3", False, False, False, 1.0),
}
_OF_WEIGHTS: dict[str, Any] = {
    "patch_torch_functions": (False,),
    "keep_batchnorm_fp32": _BOOLS,
    "master_weights": (True, False),
}
# Supported values of each argument, by level.
_SUPPORTED: dict[str, dict[str, Any]] = {
    "O0": {**_OF_WEIGHTS, "cast_model_type": (torch.float32,)},
    "O1": {"patch_torch_functions": (True, False), "cast_model_type": (False, torch.float32)},
    "O2": {**_OF_WEIGHTS, "cast_model_type": (torch.float16,)},
    "O3": {**_OF_WEIGHTS, "cast_model_type": (torch.float16,)},
}


def settle(level: str, given: Mapping[str, Any]) -> Properties:
    """Return the properties of a level, with changes from arguments of `amp.initialize`.

    These are `cast_model_type` (the type of the weights), `patch_torch_functions` (False to run O1
    without half precision), `keep_batchnorm_fp32`, `master_weights`, and `loss_scale` (a number,
    also as text, or "dynamic").

    Args:
        level: level from O0 to O3.
        given: arguments by name; None for the default of the level.

    Raises:
        TypeError: an argument is unknown.
        UsageError: the level is unknown, or does not support one of the other arguments.
    """
    if level not in _LEVELS:
        raise UsageError("HT414.opt-level", level=level)
    own, chosen = _LEVELS[level], {name: v for name, v in given.items() if v is not None}
    scale = _scale(chosen.pop("loss_scale", own.loss_scale))
    for name, value in chosen.items():
        if name not in _SUPPORTED["O2"]:
            raise TypeError(f"amp.initialize() got an unexpected keyword argument {name!r}")
        values = _SUPPORTED[level].get(name)
        if values is None:
            raise UsageError("HT414.argument-not-supported", name=name, value=value, level=level)
        if value not in values:
            texts = " or ".join(map(repr, values))
            raise UsageError(
                "HT414.value-not-supported", name=name, value=value, level=level, supported=texts
            )
    keep = _BOOLS.get(chosen.get("keep_batchnorm_fp32"), own.keep_batchnorm_fp32)
    return replace(
        own,
        autocast=own.autocast and chosen.get("patch_torch_functions", True),
        masters=level in ("O2", "O3") and chosen.get("master_weights", own.masters),
        keep_batchnorm_fp32=keep,
        loss_scale=scale,
    )


def _scale(value: float | str) -> float | str:
    if value == "dynamic":
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UsageError("HT414.loss-scale", value=value)
    return number


def refuse(call: str, given: Mapping[str, Any], supported: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments of Apex that torch does not have, and return the others.

    Args:
        call: name of the function or class.
        given: arguments by name.
        supported: the only supported value of each argument, or `ANY`.

    Raises:
        UsageError: an argument has another value.
    """
    for name, only in supported.items():
        if only is not ANY and given.get(name, only) != only:
            values = {"name": name, "value": given[name], "supported": only}
            raise UsageError("HT415.argument-not-supported", call=call, **values)
    return {name: value for name, value in given.items() if name not in supported}
