"""Precisions with one type for weights, gradients and arithmetic: fp64, fp32, tf32, O0."""

from contextlib import ExitStack
from typing import Any

import torch

from hpctrain.errors import UsageError
from hpctrain.precision.base import Precision, PrecisionSettings, refuse_older_gpus

__all__ = ["ApexO0", "Float32", "Float64", "TensorFloat"]


class Float64(Precision):
    """fp64: to show that two runs differ only in the order of their sums."""

    name = "fp64"
    dtype = torch.float64


class Float32(Precision):
    """fp32 without TF32: by default torch's convolutions on GPUs round inputs to 10 bits."""

    name = "fp32"
    _short_inputs = False

    def switch(self, undo: ExitStack) -> None:
        """Switch TF32 off, or on."""
        owners: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
        for owner in owners:
            # torch has two sets of switches. This one is in all versions of torch. If the other
            # set was used as well, torch raises an error here.
            try:
                undo.callback(setattr, owner, "allow_tf32", owner.allow_tf32)
            except RuntimeError:
                raise UsageError("HT403.fp32-precision-set") from None
            owner.allow_tf32 = self._short_inputs


class TensorFloat(Float32):
    """tf32: fp32 with the inputs of convolutions and matrix products rounded to 10 bits.

    Source: "TensorFloat-32 (TF32) on Ampere (and later) devices" in torch's CUDA semantics.
    """

    name = "tf32"
    _short_inputs = True

    @classmethod
    def check(cls, device: torch.device, settings: PrecisionSettings) -> None:
        """Check that the device is a GPU with TF32."""
        super().check(device, settings)
        refuse_older_gpus(device, (8, 0), "HT402.no-tf32")


class ApexO0(Float32):
    """O0 of Apex: fp32, with a loss scale if one is given."""

    name = "O0"
    takes = frozenset({"loss_scale"})
