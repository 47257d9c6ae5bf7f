"""Precisions with weights in fp32 and autocast: bf16, fp16, O1."""

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.precision.base import Precision, PrecisionSettings
from hpctrain.process.logging import logger

__all__ = ["ApexO1", "BFloat16", "Half"]


class Autocast(Precision):
    """Base class of precisions in which torch chooses the type of each operation."""

    reduced = True
    half: ClassVar[torch.dtype]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return torch.autocast."""
        return torch.autocast(self.device.type, self.half)


class BFloat16(Autocast):
    """bf16: without a loss scale, because its exponent has the range of fp32."""

    name = "bf16"
    half = torch.bfloat16

    @classmethod
    def check(cls, device: torch.device, settings: PrecisionSettings) -> None:
        """Warn about older GPUs, on which torch emulates bf16."""
        super().check(device, settings)
        if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            logger.warning(
                "%s does not compute in bf16, and torch emulates it: --precision fp16 is faster",
                torch.cuda.get_device_name(device),
            )


class Half(Autocast):
    """fp16: with a loss scale, because gradients below 6e-8 vanish in it."""

    name = "fp16"
    half = torch.float16
    takes = frozenset({"loss_scale"})
    default_loss_scale = "dynamic"

    def convert(self, model: nn.Module) -> None:
        """Check that the model has no weights in half precision.

        Raises:
            UsageError: weights are in half precision, where small updates would be lost.
        """
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float16:
                raise UsageError(
                    "HT404.half-weights", name=name, model=type(model).__name__, precision=self
                )


class ApexO1(Half):
    """O1 of Apex: the same as fp16."""

    name = "O1"
