"""What a precision is, and does in a step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.errors import UsageError
from hpctrain.precision.nonfinite import NonFinite
from hpctrain.precision.scaler import LossScaler

__all__ = ["Precision", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a precision may be told.

    Attributes:
        loss_scale: a number, "dynamic", or None for that of the precision.
        keep_batchnorm_fp32: whether batch norm stays in fp32 where weights are in half precision;
            None for what the precision does.
        world_size: ranks that share a step.
    """

    loss_scale: float | str | None = None
    keep_batchnorm_fp32: bool | None = None
    world_size: int = 1


class Precision:
    """Numbers as torch keeps them; the others change a hook or two.

    In a step they are called in this order: `backward` for each micro-batch; then, for each
    optimizer, `unscale` where gradients are clipped, and `step`; then `update` and `clear`.

    Args:
        device: of this rank.
        settings: held to the precision by `check`.

    Attributes:
        name: as in `--precision`.
        dtype: of the weights and of the batches' floating-point tensors; None leaves both.
        reduced: whether convolutions and matrix products are in half precision.
        takes: the settings that it takes.
        scaler: of the loss; None where it has no scale.
        nonfinite: counts the steps without finite numbers.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    reduced: ClassVar[bool] = False
    takes: ClassVar[frozenset[str]] = frozenset()
    default_loss_scale: ClassVar[float | str | None] = None

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.device = device
        self.settings = settings
        self.nonfinite = NonFinite(device)
        scale = settings.loss_scale or self.default_loss_scale
        self.scaler = (
            LossScaler(device, scale, settings.world_size) if scale not in (None, 1, 1.0) else None
        )
        self._as_it_is = nullcontext()

    @property
    def requires_synced_skip(self) -> bool:
        """Whether a step needs the gradients of all ranks, so that all leave out the same ones."""
        return self.scaler is not None

    @classmethod
    def check(cls, device: torch.device, settings: Settings) -> None:
        """Look for what cannot work, before the ranks meet.

        Raises:
            UsageError: the device lacks the precision, or a setting is not its own.
        """
        del device
        for name, flag, where in _SETTINGS:
            if getattr(settings, name) is not None and name not in cls.takes:
                raise UsageError(
                    f"{flag} with --precision {cls.name}", where, f"leave {flag} out, or {where}"
                )

    def switch(self, undo: ExitStack) -> None:
        """Set torch's switches.

        Args:
            undo: gets what puts them back.
        """

    def convert(self, model: nn.Module) -> None:
        """Change the weights of a model, in place."""
        if self.dtype is not None:
            model.to(dtype=self.dtype)

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer work on what it has to; after `convert` of the models."""

    def master(self, parameter: Tensor) -> Tensor:
        """The weights behind a parameter of a model: itself, or those that it is a copy of."""
        return parameter

    def masters(self) -> Sequence[Tensor]:
        """The weights behind those of the models, where these are copies."""
        return ()

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        return self._as_it_is

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to go backward from, so that small gradients do not vanish."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch."""
        self.nonfinite.see(loss)
        scaled = loss if self.scaler is None else self.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients to their true size, before they are clipped."""
        if self.scaler is not None and _has_gradients(optimizer):
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step; left out after an overflow where the loss has a scale.

        Gradients are averaged before, so all ranks leave out the same.
        """
        if self.scaler is None:
            optimizer.step()
        elif _has_gradients(optimizer):
            self.scaler.step(optimizer)

    def update(self) -> None:
        """After the steps of all optimizers."""
        if self.scaler is None:
            self.nonfinite.end(())
            return
        self.nonfinite.end(self.scaler.overflows())
        self.scaler.follow()

    def clear(self, optimizer: Optimizer) -> None:
        """Clear the gradients."""
        optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        if self.scaler is None:
            return {}
        return {"scaler": self.scaler.state_dict(), "skipped": int(self.nonfinite.skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
            self.nonfinite.skipped = state["skipped"]

    def numbers(self) -> dict[str, Any]:
        """For the rows of metrics, the same on all ranks; on a GPU they stay there."""
        if self.scaler is None:
            return {}
        return {"loss_scale": self.scaler.value(), "skipped": self.nonfinite.skipped}


def _has_gradients(optimizer: Optimizer) -> bool:
    """GradScaler raises for an optimizer whose models had no part in the loss."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


_SETTINGS = (
    ("loss_scale", "--loss-scale", "--precision fp16, O0, O1, O2 or O3"),
    ("keep_batchnorm_fp32", "--keep-batchnorm-fp32", "--precision O2 or O3"),
)
