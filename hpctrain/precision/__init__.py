"""Numeric precisions: an interface, and the table of its implementations."""

import torch

from hpctrain.precision.base import Precision, PrecisionSettings
from hpctrain.precision.full import ApexO0, Float32, Float64, TensorFloat
from hpctrain.precision.half import ApexO2, ApexO3
from hpctrain.precision.mixed import ApexO1, BFloat16, Half
from hpctrain.process.logging import logger

__all__ = ["PRECISIONS", "Precision", "PrecisionSettings", "open_precision"]

# A new precision is a class and its name here.
_CLASSES = (Float64, Float32, TensorFloat, BFloat16, Half, ApexO0, ApexO1, ApexO2, ApexO3)
PRECISIONS: dict[str, type[Precision]] = {kind.name: kind for kind in _CLASSES}


def open_precision(name: str, device: torch.device, settings: PrecisionSettings) -> Precision:
    """Return a precision by name, for a device that supports it.

    Args:
        name: a key of the table, or `auto`: bf16 if the device computes in it, fp16 on older GPUs,
            fp32 on CPUs, where half precision is slower.
        device: device used by this rank.
        settings: settings of the precision.

    Raises:
        UsageError: the device does not support the precision, or the precision does not support a
            given setting.
    """
    if name == "auto":
        name, why = _best(device)
        logger.info("precision auto: %s, %s", name, why)
    kind = PRECISIONS[name]
    kind.check(device, settings)
    return kind(device, settings)


def _best(device: torch.device) -> tuple[str, str]:
    """Return the best precision on a device, and the reason."""
    if device.type == "cpu":
        return Float32.name, "as CPUs are faster in it than in half precision"
    model = torch.cuda.get_device_name(device)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return BFloat16.name, f"which {model} computes in; it needs no loss scale"
    return Half.name, f"as {model} does not compute in bf16"
