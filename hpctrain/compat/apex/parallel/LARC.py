"""apex.parallel.LARC, as a hook of torch's optimizers."""  # noqa: N999, as Apex's module

from typing import Any

import torch
from torch.optim import Optimizer

from hpctrain.errors import UsageError

__all__ = ["LARC"]


def LARC(  # noqa: N802, as Apex's class
    optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
) -> Optimizer:
    """Let an optimizer take steps with a learning rate for each parameter tensor.

    For each tensor w with gradient g, weight decay β, learning rate lr and trust coefficient η:

        λ = η ‖w‖ / (‖g‖ + β ‖w‖ + eps)         clip: λ = min(λ / lr, 1)
        g ← λ (g + β w)                         unchanged if ‖w‖ = 0 or ‖g‖ = 0

    Then the optimizer takes its own step, without weight decay. So with `clip` the rate is
    min(λ, lr), as in LARC, and without it λ · lr, as in LARS.

    Args:
        optimizer: optimizer; it is changed in place, and is its own attribute `optim`.
        trust_coefficient: η.
        clip: whether the optimizer's learning rate is an upper bound.
        eps: summand that keeps λ finite.

    Returns:
        The optimizer.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017, arXiv
    1708.03888, section 4; clipping and the cases of zero as in apex/parallel/LARC.py.
    """
    decays: list[float] = []

    @torch.no_grad()
    def scale(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise UsageError("HT415.closure-with-larc")
        decays.clear()
        for group in optimizer.param_groups:
            decay = group.get("weight_decay", 0)
            decays.append(decay)
            group["weight_decay"] = 0
            for w in group["params"]:
                if w.grad is None:
                    continue
                w_norm, g_norm = torch.linalg.vector_norm(w), torch.linalg.vector_norm(w.grad)
                rate = trust_coefficient * w_norm / (g_norm + decay * w_norm + eps)
                if clip:
                    rate = (rate / group["lr"]).clamp(max=1)
                # `where`, because an `if` would wait for the device.
                fits = (w_norm > 0) & (g_norm > 0)
                w.grad.copy_(torch.where(fits, rate * (w.grad + decay * w), w.grad))

    def give_back(*_: Any) -> None:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(give_back)
    # Scripts give Apex's `optim` to torch's schedulers, which refuse Apex's class.
    optimizer.optim = optimizer  # type: ignore[attr-defined]
    return optimizer
