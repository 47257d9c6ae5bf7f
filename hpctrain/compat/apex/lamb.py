"""LAMB, which torch does not have: Adam with each layer's step scaled to its weights' norm."""

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hpctrain.errors import UsageError

__all__ = ["LAMB"]


class LAMB(Optimizer):
    """Layer-wise Adaptive Moments for Batch training, in steps that never wait for a GPU.

    For each parameter tensor w with gradient g, in its step t = 1, 2, …, with weight decay β:

        g ← g / max(1, ‖all gradients‖ / max_grad_norm)
        m ← β₁ m + (1 − β₁) g                   without grad_averaging: β₁ m + g
        v ← β₂ v + (1 − β₂) g²
        m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)     without bias_correction: m and v
        u = m̂ / (√v̂ + eps) + β w                without adam_w_mode: β w is added to g
        r = ‖w‖ / ‖u‖                            1 if ‖w‖ = 0 or ‖u‖ = 0, and if β = 0 without
                                                 use_nvlamb
        w ← w − lr · r · u

    Half-precision parameters have their computation and state in fp32.

    Attributes:
        needs_whole_weights: True, as r needs the norms of whole weights.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    2020, arXiv 1904.00962, algorithm 2; apex/optimizers/fused_lamb.py for the options.
    """

    needs_whole_weights = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do an optimizer step; parameters without a gradient are not changed.

        Raises:
            UsageError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = [(group, one) for group in self.param_groups for one in _alike(group["params"])]
        gradients = [_wide([_dense(p.grad) for p in parameters]) for _, parameters in parts]
        if parts:
            norms = [_norms(some) for some in gradients]
            norm = torch.linalg.vector_norm(torch.cat([one.to(norms[0].device) for one in norms]))
        for (group, parameters), some in zip(parts, gradients, strict=True):
            excess = (norm / group["max_grad_norm"]).clamp(min=1.0).to(some[0].device)
            self._update(group, parameters, list(torch._foreach_div(some, excess)))
        return loss

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Update parameters of one device and dtype."""
        decay, weights = group["weight_decay"], _wide(parameters)
        if decay and not group["adam_w_mode"]:
            torch._foreach_add_(gradients, weights, alpha=decay)
        updates = self._adam(group, parameters, gradients)
        if decay and group["adam_w_mode"]:
            torch._foreach_add_(updates, weights, alpha=decay)
        if decay or group["use_nvlamb"]:
            own, theirs = _norms(weights), _norms(updates)
            # Filled on the device, because an `if` would wait for it.
            ratios = (own / theirs).masked_fill((own == 0) | (theirs == 0), 1.0)
            torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
        if weights[0] is not parameters[0]:
            torch._foreach_copy_(parameters, weights)

    def _adam(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Update the moments of each parameter, and return m̂ / (√v̂ + eps)."""
        beta1, beta2 = group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        for state, gradient in zip(states, gradients, strict=True):
            # A number, not a tensor, so the corrections need no read from the device.
            state["step"] = state.get("step", 0) + 1
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(gradient)
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        if group["bias_correction"]:
            torch._foreach_div_(roots, [math.sqrt(1 - beta2 ** one["step"]) for one in states])
        torch._foreach_add_(roots, group["eps"])
        if group["bias_correction"]:
            # m̂ / root = m / ((1 − β₁ᵗ) root), which saves memory of the size of the weights.
            torch._foreach_mul_(roots, [1 - beta1 ** one["step"] for one in states])
        return list(torch._foreach_div(means, roots))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state exactly: the state of half-precision parameters stays in fp32."""
        super().load_state_dict(state_dict)
        # torch has rounded the state to the dtype of the parameters.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    (wide,) = _wide([value])
                    self.state[parameter][name] = wide.to(parameter.device, copy=True)


def _alike(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the parameters that have gradients by device and dtype, for one kernel each."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            lists.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(lists.values())


def _dense(gradient: Tensor | None) -> Tensor:
    """Return a gradient after a check of its kind."""
    if gradient is None or gradient.layout != torch.strided or gradient.is_complex():
        raise UsageError("HT407.sparse-or-complex-gradient")
    return gradient


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype in at least fp32, without a copy of those that are."""
    return [one.to(torch.promote_types(one.dtype, torch.float32)) for one in tensors]


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, of shape (len(tensors),), on their device."""
    return torch.stack(torch._foreach_norm(tensors, 2))
