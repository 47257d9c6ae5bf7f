"""fp8: bf16, in which the matrix products of linear layers are in 8 bits."""

from typing import ClassVar

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.precision.base import PrecisionSettings, refuse_older_gpus
from hpctrain.precision.mixed import BFloat16
from hpctrain.process.logging import logger

__all__ = ["Float8"]

_MULTIPLE = 16  # of both sizes of a weight, for the matrix products of GPUs


class Float8(BFloat16):
    """fp8: bf16 with torchao's float8 training of linear layers.

    Each product scales its two factors by their largest numbers, tensor by tensor. Weights,
    gradients and optimizer states stay in fp32, and all other operations are those of bf16.
    Source: `torchao.float8`, its default configuration.
    """

    name = "fp8"
    # For tests: the same roundings, by products in fp32.
    _emulated: ClassVar[bool] = False

    @classmethod
    def check(cls, device: torch.device, settings: PrecisionSettings) -> None:
        """Check that the device is a GPU with fp8, and that torchao is installed."""
        super().check(device, settings)
        if not cls._emulated:
            refuse_older_gpus(device, (8, 9), "HT402.no-fp8")
        try:
            import torchao.float8  # noqa: F401
        except ImportError as error:
            raise UsageError("HT418.no-torchao", error=error) from None

    def convert(self, model: nn.Module) -> None:
        """Let the linear layers of a model compute in fp8, in place; their weights stay the same.

        Raises:
            UsageError: the model has no linear layer of suitable sizes.
        """
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        linear = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
        fitting = {
            name
            for name, layer in linear.items()
            if layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0
        }
        if not fitting:
            raise UsageError(
                "HT419.no-suitable-layer", layer_count=len(linear), model=type(model).__name__
            )
        logger.info("fp8: %d of %d linear layers compute in it", len(fitting), len(linear))
        convert_to_float8_training(
            model,
            module_filter_fn=lambda _, name: name in fitting,
            # The gradient of a weight is a product over the rows of a batch, whose number may be
            # no multiple of 16: torchao adds rows of zeros.
            config=Float8LinearConfig(emulate=self._emulated, pad_inner_dim=True),
        )
