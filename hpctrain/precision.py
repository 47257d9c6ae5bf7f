"""How are numbers kept? Small hooks over a base that does nothing."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["PRECISIONS", "Precision"]


class Precision:
    """fp32: numbers as torch keeps them. The others change one hook or two.

    Args:
        device: of this rank.

    Attributes:
        dtype: of the weights and of the batches' floating-point tensors; None leaves both.
        loss_scaled: whether a step is left out after an overflow, which all ranks have to do alike.
    """

    dtype: torch.dtype | None = None
    loss_scaled: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._as_it_is = nullcontext()

    def convert(self, model: nn.Module) -> None:
        """Change the weights of a model, in place."""
        if self.dtype is not None:
            model.to(dtype=self.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        return self._as_it_is

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients to their true size, before they are clipped."""

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step."""
        optimizer.step()

    def update(self) -> None:
        """After the step of the last optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state."""


class Double(Precision):
    """fp64: to prove that two runs are the same but for the order of their sums."""

    dtype = torch.float64


class BFloat16(Precision):
    """bf16: autocast, no loss scale, as its exponent is that of fp32."""

    def autocast(self) -> AbstractContextManager[Any]:
        """torch.autocast to bfloat16."""
        return torch.autocast(self.device.type, torch.bfloat16)


class Half(Precision):
    """fp16: autocast, and a loss scale that follows the overflows.

    Source: torch.amp's documentation, "Gradient Scaling".
    """

    loss_scaled = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.scaler = torch.amp.GradScaler(device.type)

    def autocast(self) -> AbstractContextManager[Any]:
        """torch.autocast to float16."""
        return torch.autocast(self.device.type, torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Scaled, so that small gradients do not vanish."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide by the scale."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """A step, unless a gradient overflowed. Gradients are averaged before: all ranks agree."""
        self.scaler.step(optimizer)

    def update(self) -> None:
        """Let the scale follow."""
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counter."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the scale."""
        self.scaler.load_state_dict(state)


# A new precision is a class and a line here.
PRECISIONS: dict[str, type[Precision]] = {
    "fp64": Double,
    "fp32": Precision,
    "bf16": BFloat16,
    "fp16": Half,
}
