"""Numeric precisions: an interface, and the table of its implementations.

Each class is imported at its first use, so that the names of the table need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hpctrain._lazy import lazy
from hpctrain.process.logging import logger

if TYPE_CHECKING:
    import torch

    from hpctrain.precision.base import Precision, PrecisionSettings

__all__ = ["PRECISIONS", "Precision", "PrecisionSettings", "open_precision"]

# The class of each precision by name. A new precision is a class and a line here.
PRECISIONS = {
    "fp64": "hpctrain.precision.full:Float64",
    "fp32": "hpctrain.precision.full:Float32",
    "tf32": "hpctrain.precision.full:TensorFloat",
    "bf16": "hpctrain.precision.mixed:BFloat16",
    "fp16": "hpctrain.precision.mixed:Half",
    "fp8": "hpctrain.precision.float8:Float8",
    "O0": "hpctrain.precision.full:ApexO0",
    "O1": "hpctrain.precision.mixed:ApexO1",
    "O2": "hpctrain.precision.half:ApexO2",
    "O3": "hpctrain.precision.half:ApexO3",
}

if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = lazy(__name__, {"base": ("Precision", "PrecisionSettings")})


def open_precision(name: str, device: "torch.device", settings: "PrecisionSettings") -> "Precision":
    """Return a precision by name, for a device that supports it.

    Args:
        name: a key of the table, or `auto`: bf16 if the device computes in it, fp16 on older GPUs,
            fp32 on CPUs, where half precision is slower, and on a Mac.
        device: device used by this rank.
        settings: settings of the precision.

    Raises:
        UsageError: the device does not support the precision, or the precision does not support a
            given setting.
    """
    if name == "auto":
        name, why = _best(device)
        logger.info("precision auto: %s, %s", name, why)
    module, _, class_name = PRECISIONS[name].partition(":")
    kind: type[Precision] = getattr(import_module(module), class_name)
    kind.check(device, settings)
    return kind(device, settings)


def _best(device: "torch.device") -> tuple[str, str]:
    """Return the best precision on a device, and the reason."""
    if device.type == "cpu":
        return "fp32", "as CPUs are faster in it than in half precision"
    if device.type == "mps":
        return "fp32", "as on the CPUs of a Mac; bf16 and fp16 are there, too"
    import torch

    model = torch.cuda.get_device_name(device)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", f"which {model} computes in; it needs no loss scale"
    return "fp16", f"as {model} does not compute in bf16"
