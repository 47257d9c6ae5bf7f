"""How are numbers kept? One small interface, and a table of those who have it."""

import torch

from hpctrain.precision.base import Precision, Settings
from hpctrain.precision.full import ApexO0, Float32, Float64, TensorFloat
from hpctrain.precision.half import ApexO2, ApexO3
from hpctrain.precision.mixed import ApexO1, BFloat16, Half
from hpctrain.process.logging import logger

__all__ = ["PRECISIONS", "Precision", "Settings", "open_precision"]

# A new precision is a class and its name here.
_CLASSES = (Float64, Float32, TensorFloat, BFloat16, Half, ApexO0, ApexO1, ApexO2, ApexO3)
PRECISIONS: dict[str, type[Precision]] = {kind.name: kind for kind in _CLASSES}


def open_precision(name: str, device: torch.device, settings: Settings) -> Precision:
    """A precision by name, on a device that has it.

    Args:
        name: a key of the table, or `auto`: bf16 where the device computes in it, fp16 on older
            GPUs, fp32 on CPUs, where half precision is slower.
        device: of this rank.
        settings: that the precision may take.

    Raises:
        UsageError: the device lacks it, or it does not take a setting that was given.
    """
    if name == "auto":
        name, why = _best(device)
        logger.info("precision auto: %s, %s", name, why)
    kind = PRECISIONS[name]
    kind.check(device, settings)
    return kind(device, settings)


def _best(device: torch.device) -> tuple[str, str]:
    """What an expert takes on a device, and why."""
    if device.type == "cpu":
        return Float32.name, "as CPUs are faster in it than in half precision"
    model = torch.cuda.get_device_name(device)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return BFloat16.name, f"which {model} computes in; it needs no loss scale"
    return Half.name, f"as {model} does not compute in bf16"
