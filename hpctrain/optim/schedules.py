"""Learning-rate schedules as pure functions, so a resumed run needs no state.

The rate is the base rate times a factor that depends only on the number of the step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from hpctrain.errors import UsageError

__all__ = ["Schedule", "apply", "scale"]

_ENDING = ("cosine", "polynomial")  # they depend on the end of the training
_KINDS = ("constant", "step", *_ENDING)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate schedule: a warm-up, then one of four kinds. Optimizer steps count from 0.

    With s = `step`, w = `warmup_steps`, T = `total_steps` and t = (s − w) / (T − w):

        warm-up     (s + 1) / w                    for s < w, whatever the kind; 1 at s = w − 1
        constant    1
        cosine      (1 + cos π t) / 2              0 at s = T
        step        step_factor ^ ⌊s / step_every⌋  counted from the start of the training
        polynomial  (1 − t) ^ power                0 at s = T

    From s = T on, the factor keeps its value at T. The rate of a parameter group with the base rate
    b is b · factor during the warm-up. After it, with l = min(`least`, b), it is

        l + (b − l) · factor

    so cosine and polynomial end at l. A group whose base rate is below `least` keeps its base rate.

    Args:
        kind: "constant", "cosine", "step" or "polynomial".
        warmup_steps: optimizer steps of the warm-up; 0 for none.
        total_steps: optimizer steps of the whole training, with the warm-up; None if unknown.
        step_every: optimizer steps between two reductions of kind "step"; unused by other kinds.
        step_factor: factor of each reduction of kind "step", from 0 to 1.
        power: exponent of kind "polynomial", above 0.
        least: least rate after the warm-up, 0 or more; not with kind "step".

    Raises:
        UsageError: a value is invalid, the kind needs `total_steps`, or the warm-up is not shorter
            than the training.

    Sources: warm-up and steps, Goyal et al. 2017, arXiv 1706.02677, sections 2.2 and 5.1; cosine,
    Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5 without restarts, whose η_min is the
    least rate (`eta_min` of torch's `CosineAnnealingLR`); polynomial with power 2, You, Gitman,
    Ginsburg 2017, arXiv 1708.03888, algorithm 1.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    step_every: int = 1
    step_factor: float = 0.1
    power: float = 2.0
    least: float = 0.0

    def __post_init__(self) -> None:
        for good, name, expected in (
            (self.kind in _KINDS, "kind", f"one of {', '.join(_KINDS)}"),
            (self.warmup_steps >= 0, "warmup_steps", "0 or more"),
            (self.total_steps is None or self.total_steps >= 1, "total_steps", "1 or more"),
            (self.kind != "step" or self.step_every >= 1, "step_every", "1 or more"),
            (0 <= self.step_factor <= 1, "step_factor", "from 0 to 1"),
            (self.power > 0, "power", "above 0"),
            (self.least >= 0, "least", "0 or more"),
            (self.kind != "step" or self.least == 0, "least", '0 for kind "step"'),
        ):
            if not good:
                raise UsageError(
                    "HT406",
                    f"Schedule({name}={getattr(self, name)})",
                    expected,
                    f"{name}=…, {expected}",
                )
        if self.total_steps is None and self.kind in _ENDING:
            raise UsageError(
                "HT410",
                f"--lr-schedule {self.kind}, and the training has no end",
                "a number of epochs or steps",
                "--epochs N",
                "--max-steps N",
            )
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise UsageError(
                "HT411",
                f"a warm-up of {self.warmup_steps:,} of {self.total_steps:,} steps",
                "a warm-up that is shorter than the training",
                "a smaller --lr-warmup-epochs or --lr-warmup-steps",
                "a larger --epochs",
                "a larger --max-steps",
            )

    def factor(self, step: int) -> float:
        """Return the factor of the base learning rate in a step, from 0 to 1.

        Args:
            step: number of optimizer steps done before this one.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.total_steps is not None:
            step = min(step, self.total_steps)
        if self.kind == "step":
            return float(self.step_factor ** (step // self.step_every))
        if self.kind == "constant" or self.total_steps is None:
            return 1.0
        left = (self.total_steps - step) / (self.total_steps - self.warmup_steps)
        if self.kind == "polynomial":
            return float(left**self.power)
        # sin² (π left / 2) = (1 + cos π t) / 2, but exact near the end, where 1 + cos is not.
        return math.sin(math.pi / 2 * left) ** 2

    def describe(self) -> str:
        """Describe the schedule in one line."""
        rest = self.kind
        if self.kind == "step":
            rest = f"times {self.step_factor:g} every {self.step_every:,} steps"
        if self.kind == "polynomial":
            rest = f"polynomial of power {self.power:g}"
        if self.kind in _ENDING:
            rest += f" over {self.total_steps:,} steps"
            rest += f" to {self.least:g}" if self.least else ""
        return f"warm-up {self.warmup_steps:,} steps, {rest}" if self.warmup_steps else rest


def scale(rule: str, global_batch: int, reference_batch: int) -> float:
    """Return the factor that adapts a learning rate from one global batch to another.

    Args:
        rule: "none" for 1, "linear" for B / B₀, "sqrt" for √(B / B₀).
        global_batch: B, samples per step.
        reference_batch: B₀, samples per step for which the rate was tuned.

    Sources: linear, Goyal et al. 2017, arXiv 1706.02677, section 2.1; square root, Krizhevsky
    2014, arXiv 1404.5997, and You et al. 2020, arXiv 1904.00962, section 4.
    """
    ratio = global_batch / reference_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def apply(optimizers: Iterable[Optimizer], schedule: Schedule, step: int) -> None:
    """Set the learning rate of each group to its rate in a step.

    The base rate is the group's `initial_lr`: its `lr` at the first call. It is saved in the
    optimizer's `state_dict()`, as with torch's own schedulers. A learning rate that is a tensor is
    changed in place, without waiting for its device.

    Args:
        optimizers: optimizers of any kind.
        schedule: schedule of the rates.
        step: number of optimizer steps done before this one.
    """
    factor, least = schedule.factor(step), 0.0 if step < schedule.warmup_steps else schedule.least
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group["lr"]
            if "initial_lr" not in group:
                group["initial_lr"] = lr.detach().clone() if isinstance(lr, Tensor) else lr
            base = group["initial_lr"]
            rate = base * factor
            if least:
                low = base.clamp(max=least) if isinstance(base, Tensor) else min(base, least)
                rate = low + (base - low) * factor
            if not isinstance(lr, Tensor):
                group["lr"] = rate
            elif isinstance(rate, Tensor):
                lr.copy_(rate)
            else:
                lr.fill_(rate)
