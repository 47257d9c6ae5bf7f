"""Changes that `amp.initialize` makes to an optimizer."""

import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.compat.apex.model_conversion import Mastered
from hpctrain.compat.apex.scale import Scale
from hpctrain.errors import UsageError
from hpctrain.precision import Precision

__all__ = ["Adopted", "master_params"]


class Adopted:
    """State of an optimizer under amp, from its backward passes to its step.

    It replaces `step`, `zero_grad` and `add_param_group` of the optimizer, so a script and its
    learning rate schedule call them as before.

    Args:
        optimizer: optimizer, which is changed in place.
        precision: precision of the optimizer's models.

    Attributes:
        scaled: whether the gradients are still scaled, after `delay_unscale`.
        skip: whether the next step is skipped.
    """

    def __init__(self, optimizer: Optimizer, precision: Precision) -> None:
        self.optimizer = optimizer
        self.precision = precision
        self._mastered = precision if isinstance(precision, Mastered) else None
        self.scaled = self.skip = False
        self._before: dict[Tensor, Tensor] = {}  # unscaled gradients of earlier backward passes
        self._plain: dict[str, Any] = {}
        precision.adopt(optimizer)
        for name in ("step", "zero_grad", "add_param_group"):
            self._plain[name] = plain = getattr(optimizer, name)
            setattr(optimizer, name, _replaced(plain, getattr(self, name), optimizer))
        optimizer._amp = self  # type: ignore[attr-defined]

    @staticmethod
    def check(optimizer: Optimizer) -> None:
        """Check that an optimizer can be adopted.

        Raises:
            UsageError: the optimizer was adopted before.
        """
        if hasattr(optimizer, "_amp"):
            raise UsageError("HT413.optimizer-again", optimizer=type(optimizer).__name__)

    @classmethod
    def of(cls, optimizer: Any) -> "Adopted":
        """Return the state of an adopted optimizer.

        Raises:
            UsageError: `amp.initialize` did not adopt the optimizer.
        """
        known = getattr(optimizer, "_amp", None)
        if not isinstance(known, cls):
            raise UsageError("HT413.unknown-optimizer", optimizer=type(optimizer).__name__)
        return known

    def prepare(self) -> None:
        """Set unscaled gradients aside before a backward pass, which will make scaled ones."""
        if self._mastered is not None:
            self._mastered.begin()
        if self.scaled:
            return
        own = master_params(self.optimizer)
        self._before = {p: p.grad for p in own if p.grad is not None}
        for parameter in self._before:
            parameter.grad = None
        self.precision.clear(self.optimizer)

    def unscale(self, scale: Scale) -> None:
        """Unscale the gradients after a backward pass, and add those that were set aside."""
        if self._mastered is not None:
            self._mastered.collect(self.optimizer)
        if any(parameter.grad is not None for parameter in master_params(self.optimizer)):
            # Without gradients there is no overflow check, so `follow` would not update the scale,
            # and GradScaler refuses a second unscale_() before an update.
            scale.unscale_(self.optimizer)
        for parameter, gradient in self._before.items():
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient
        self._before = {}

    def step(self, closure: Any = None) -> Any:
        """Take a step of the optimizer, unless there was an overflow.

        Raises:
            UsageError: a closure is given, or the gradients are still scaled.
        """
        if closure is not None:
            raise UsageError("HT415.closure-with-amp")
        if self.scaled:
            raise UsageError("HT416.scaled-gradients")
        # Learning rate schedules warn if there was no step. A skipped step counts for them.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        result = None if self.skip else self._plain["step"]()
        self.skip = False
        if self._mastered is not None:
            self._mastered.copy_back(self.optimizer)
            for _, master in self._mastered.pairs(self.optimizer):
                master.grad = None  # model.zero_grad() does not clear it
        return result

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """Clear the gradients of masters and copies."""
        self._plain["zero_grad"](*arguments, **keywords)
        self.precision.clear(self.optimizer)
        self._before = {}
        self.scaled = False

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add parameters, of the models or others, and use their masters if they have any."""
        self._plain["add_param_group"](group)
        self.precision.adopt(self.optimizer)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the parameters that an optimizer updates, for instance to clip gradients."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _replaced(plain: Any, own: Any, optimizer: Optimizer) -> MethodType:
    """Return a method of an optimizer with the attributes that learning rate schedules read."""

    @functools.wraps(plain)
    def method(_: Optimizer, *arguments: Any, **keywords: Any) -> Any:
        return own(*arguments, **keywords)

    return MethodType(method, optimizer)
