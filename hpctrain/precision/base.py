"""Interface of a precision, with its part of a step."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.errors import UsageError
from hpctrain.precision.scaler import LossScaler
from hpctrain.process.device import sums_on_host

__all__ = ["NonFinite", "Precision", "PrecisionSettings", "refuse_older_gpus"]


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """Settings of a precision.

    Attributes:
        loss_scale: a number, "dynamic", or None for the precision's default.
        keep_batchnorm_fp32: whether batch norm stays in fp32 if weights are in half precision;
            None for the precision's default.
        world_size: number of ranks that share a step.
    """

    loss_scale: float | str | None = None
    keep_batchnorm_fp32: bool | None = None
    world_size: int = 1


class Precision:
    """Base class of precisions, with torch's own types; subclasses override some methods.

    A step calls the methods in this order: `backward` for each micro-batch; then, for each
    optimizer, `unscale` if gradients are clipped, and `step`; then `update` and `clear`.

    Args:
        device: device used by this rank.
        settings: settings that `check` has accepted.

    Attributes:
        name: name in `--precision`.
        dtype: type of the weights and of the batches' floating-point tensors; None keeps both.
        reduced: whether convolutions and matrix products are in half precision.
        takes: names of the supported settings.
        scaler: scaler of the loss; None without a loss scale.
        nonfinite: counter of the steps without finite numbers.
        loss_divisor: with a loss scale, power of two that divides sums of losses before their
            backward pass; None until the ranks have agreed on one.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    reduced: ClassVar[bool] = False
    takes: ClassVar[frozenset[str]] = frozenset()
    default_loss_scale: ClassVar[float | str | None] = None

    def __init__(self, device: torch.device, settings: PrecisionSettings) -> None:
        self.device = device
        self.settings = settings
        self.nonfinite = NonFinite(device)
        scale = settings.loss_scale or self.default_loss_scale
        self.scaler = (
            LossScaler(device, scale, settings.world_size) if scale not in (None, 1) else None
        )
        self.loss_divisor: float | None = None
        self._as_it_is = nullcontext()

    @property
    def requires_synced_skip(self) -> bool:
        """Whether a step needs the gradients of all ranks, so that all skip the same steps."""
        return self.scaler is not None

    @classmethod
    def check(cls, device: torch.device, settings: PrecisionSettings) -> None:
        """Check device and settings, before the rendezvous.

        Raises:
            UsageError: the device does not support the precision, or the precision does not
                support a setting.
        """
        if device.type == "mps" and cls.name not in _ON_A_MAC:
            raise UsageError("HT402.on-a-mac", precision=cls.name)
        for name, flag, supported in _SETTINGS:
            if getattr(settings, name) is not None and name not in cls.takes:
                raise UsageError(
                    "HT401.not-supported", option=flag, precision=cls.name, supported=supported
                )

    def switch(self, undo: ExitStack) -> None:
        """Set torch's global switches.

        Args:
            undo: stack that gets the callbacks to restore the switches.
        """

    def convert(self, model: nn.Module) -> None:
        """Convert the weights of a model, in place."""
        if self.dtype is not None:
            model.to(dtype=self.dtype)

    def adopt(self, optimizer: Optimizer) -> None:
        """Set the tensors that an optimizer updates; called after `convert` of the models."""

    def master(self, parameter: Tensor) -> Tensor:
        """Return the weights that the optimizer updates for a parameter: itself, or its master."""
        return parameter

    def copy_of(self, master: Tensor) -> Tensor:
        """Return the parameter that gets the gradients for what an optimizer updates."""
        return master

    def masters(self) -> Sequence[Tensor]:
        """Return the master weights, if the models' weights are copies."""
        return ()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for the forward pass and the loss."""
        return self._as_it_is

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """Run the backward pass of a micro-batch, with the keywords of `Tensor.backward`.

        The loss is scaled, so that small gradients do not vanish.
        """
        self.nonfinite.check_loss(loss)
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward(**keywords)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, before they are clipped."""
        if self.scaler is not None and _has_gradients(optimizer):
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Do the optimizer step; with a loss scale, skip it after an overflow.

        Gradients are averaged before, so all ranks skip the same steps.
        """
        if self.scaler is None:
            optimizer.step()
        elif _has_gradients(optimizer):
            self.scaler.step(optimizer)

    def update(self) -> None:
        """Count the step and update the loss scale, after the steps of all optimizers."""
        self.nonfinite.end_step(() if self.scaler is None else self.scaler.overflows())
        if self.scaler is not None:
            self.scaler.follow()

    def clear(self, optimizer: Optimizer) -> None:
        """Clear gradients that are not those of the tensors which the optimizer updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        if self.scaler is None:
            return {}
        divisor = {} if self.loss_divisor is None else {"loss_divisor": self.loss_divisor}
        skipped = int(self.nonfinite.skipped)
        return {"scaler": self.scaler.state_dict(), "skipped": skipped, **divisor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
            self.nonfinite.skipped = state["skipped"]
            self.loss_divisor = state.get("loss_divisor")

    def numbers(self) -> dict[str, Any]:
        """Return values for the rows of metrics, equal on all ranks; on a GPU they stay there."""
        if self.scaler is None:
            return {}
        return {"loss_scale": self.scaler.value(), "skipped": self.nonfinite.skipped}


class NonFinite:
    """Counter of steps whose loss is infinite or NaN, or whose gradients overflowed.

    It does not wait for a GPU.

    Args:
        device: device used by this rank; on a GPU the counts stay there.

    Attributes:
        skipped: number of steps skipped after an overflow, equal on all ranks.
        streak: number of consecutive steps without finite numbers, up to the last step, on this
            rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = sums_on_host(device)
        self._loss: Any = False  # whether a micro-batch of this step had a non-finite loss
        self.skipped: Any = 0
        self.streak: Any = 0

    def check_loss(self, loss: Tensor) -> None:
        """Check the loss of a micro-batch."""
        if self._on_host:
            if not math.isfinite(loss.item()):
                self._loss = True
        else:
            self._loss = self._loss | ~torch.isfinite(loss.detach())

    def end_step(self, overflows: Sequence[Tensor]) -> None:
        """Update the counts at the end of a step.

        Args:
            overflows: tensor of each optimizer, above 0 after an overflow; shape (1,) or ().
        """
        if self._on_host and not (overflows or self._loss or self.streak):
            return  # nearly every step
        left_out: Any = False
        if overflows:
            left_out = torch.stack([found.reshape(()) for found in overflows]).sum() > 0
            if self._on_host:
                left_out = left_out.item()
        bad = self._loss | left_out
        self.skipped = self.skipped + left_out
        self.streak = (self.streak + 1) * bad
        self._loss = False


def refuse_older_gpus(device: torch.device, least: tuple[int, int], key: str) -> None:
    """Check that a device is a GPU which computes in a precision.

    Args:
        device: device used by this rank.
        least: lowest compute capability.
        key: key of the error message.

    Raises:
        UsageError: the device is a CPU or an older GPU.
    """
    on_gpu = device.type == "cuda"
    if not (on_gpu and torch.cuda.get_device_capability(device) >= least):
        raise UsageError(key, device=torch.cuda.get_device_name(device) if on_gpu else "a CPU")


def _has_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has gradients; GradScaler raises an error without any."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


# What the GPU of a Mac computes in: it lacks fp64, TF32 and fp8. Apex is for CUDA.
_ON_A_MAC = ("fp32", "bf16", "fp16")
_SETTINGS = (
    ("loss_scale", "--loss-scale", "fp16, O0, O1, O2 or O3"),
    ("keep_batchnorm_fp32", "--keep-batchnorm-fp32", "O2 or O3"),
)
