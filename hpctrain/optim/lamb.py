"""LAMB: Adam with the length of each layer's step scaled to the norm of its weights."""

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hpctrain.errors import UsageError
from hpctrain.optim.layerwise import ForeachGroup, Layerwise, norms, not_negative, trust_ratios

__all__ = ["LAMB"]


class LAMB(Layerwise):
    """Layer-wise Adaptive Moments for Batch training.

    For each parameter tensor w with gradient g, in its step t = 1, 2, …, with weight decay β:

        m ← β₁ m + (1 − β₁) g                   without grad_averaging: β₁ m + g
        v ← β₂ v + (1 − β₂) g²
        m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)     without bias_correction: m and v
        u = m̂ / (√v̂ + eps) + β w
        r = ‖w‖ / ‖u‖                            1 if β = 0, ‖w‖ = 0 or ‖u‖ = 0
        w ← w − lr · r · u

    This is the paper's algorithm 2 with φ(z) = z, and with the options, names and defaults of
    apex's FusedLAMB, except `max_grad_norm`, which is 1.0 there. Each parameter counts its own
    steps, so the correction is also right after a time without gradients.

    Args:
        params: parameters or groups, as for any optimizer of torch.
        lr: learning rate: a number, or a tensor with one element that is read on the device.
        betas: β₁ and β₂.
        eps: summand that keeps u finite.
        weight_decay: β. With 0, the parameters take the steps of Adam (see `layerwise`).
        bias_correction: whether to correct the moments for their start at zero.
        adam_w_mode: whether decay is a part of u, as in AdamW; otherwise β w is added to g.
        grad_averaging: whether a new gradient has the weight 1 − β₁ in m; otherwise 1.
        max_grad_norm: maximum norm of this optimizer's gradients over all groups; larger gradients
            are divided by ‖g‖ / max_grad_norm. None for no clipping, as in the paper.
        use_nvlamb: whether layers without decay have a trust ratio as well.

    Raises:
        UsageError: a setting is negative, a beta is not below 1, or `max_grad_norm` is 0.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2020, arXiv 1904.00962, algorithm 2; apex/optimizers/fused_lamb.py for the options.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = None,
        use_nvlamb: bool = False,
    ) -> None:
        not_negative("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(
                "HT406",
                f"LAMB(…, betas={betas})",
                "two numbers from 0 to below 1",
                "betas=(0.9, 0.999)",
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(
                "HT406",
                f"LAMB(…, max_grad_norm={max_grad_norm})",
                "a norm above 0",
                "max_grad_norm=None for no clipping",
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)

    def update(self, parts: list[ForeachGroup]) -> None:
        """Update all parameters that have gradients."""
        norm = None
        if any(part.group["max_grad_norm"] is not None for part in parts):
            norm = _norm(parts)
        for part in parts:
            group = part.group
            decay = group["weight_decay"]
            weights, gradients = part.weights(), _clipped(part, norm)
            if decay and not group["adam_w_mode"]:
                gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
            updates = self._adam(part, gradients)
            if decay and group["adam_w_mode"]:
                torch._foreach_add_(updates, weights, alpha=decay)
            if decay or group["use_nvlamb"]:
                torch._foreach_mul_(updates, trust_ratios(weights, updates, torch.div))
            part.descend(weights, updates)

    def _adam(self, part: ForeachGroup, gradients: list[Tensor]) -> list[Tensor]:
        """Update the moments of each layer, and return m̂ / (√v̂ + eps)."""
        group = part.group
        beta1, beta2 = group["betas"]
        means, squares = self.buffers(part, "exp_avg"), self.buffers(part, "exp_avg_sq")
        states = [self.state[p] for p in part.parameters]
        for state in states:
            # A number, not a tensor, so the corrections need no read from the device.
            state["step"] = state.get("step", 0) + 1
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        steps = [state["step"] for state in states]
        roots = torch._foreach_sqrt(squares)
        if group["bias_correction"]:
            torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        if group["bias_correction"]:
            # m̂ / root = m / ((1 − β₁ᵗ) root), which saves memory of the size of the weights.
            torch._foreach_mul_(roots, [1 - beta1**step for step in steps])
        return list(torch._foreach_div(means, roots))


def _norm(parts: list[ForeachGroup]) -> Tensor:
    """Return the norm of all gradients of a step, of shape (), on the device of the first one."""
    each = [norms([p.grad for p in part.parameters if p.grad is not None]) for part in parts]
    total: Tensor = torch.linalg.vector_norm(torch.cat([one.to(each[0].device) for one in each]))
    return total


def _clipped(part: ForeachGroup, norm: Tensor | None) -> list[Tensor]:
    """Return the gradients, divided by the excess of their norm over the maximum."""
    largest = part.group["max_grad_norm"]
    gradients = part.gradients()
    if norm is None or largest is None:
        return gradients
    excess = (norm / largest).clamp(min=1.0).to(gradients[0].device, part.dtype)
    return list(torch._foreach_div(gradients, excess))
