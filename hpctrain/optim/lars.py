"""LARS: momentum SGD with the length of each layer's step scaled to the norm of its weights."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hpctrain.errors import UsageError
from hpctrain.optim.layerwise import ForeachGroup, Layerwise, not_negative, trust_ratios

__all__ = ["LARS"]


class LARS(Layerwise):
    """Layer-wise Adaptive Rate Scaling.

    For each parameter tensor w with gradient g, weight decay β and trust coefficient η:

        λ = η ‖w‖ / (‖g‖ + β ‖w‖ + eps)         1 if β = 0, ‖w‖ = 0 or ‖g‖ = 0
        d = λ (g + β w)
        v ← momentum · v + d                    v = 0 before the first step
        w ← w − lr · v                          nesterov: w − lr · (d + momentum · v)

    The learning rate is outside of the momentum, as in `torch.optim.SGD` and in apex's LARC
    around it (`clip=False`). Algorithm 1 of the paper, and the MLPerf reference, have it inside:
    v ← momentum · v + lr · d, w ← w − v. Both are equal for a constant rate. When the rate changes,
    a step here follows the change at once. β = 0 exempts norms and biases (see `layerwise`), as
    the MLPerf reference does with its list of names.

    Args:
        params: parameters or groups, as for any optimizer of torch.
        lr: learning rate: a number, or a tensor with one element that is read on the device.
        momentum: factor of the momentum; 0 for none, without state.
        weight_decay: β.
        trust_coefficient: η.
        eps: summand that keeps λ finite.
        nesterov: whether to use Nesterov momentum; needs a momentum above 0.

    Raises:
        UsageError: a setting is negative, or nesterov is set without momentum.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017, arXiv
    1708.03888, section 4 and algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        not_negative("LARS", **settings)
        if nesterov and not momentum:
            raise UsageError(
                "HT406",
                "LARS(…, momentum=0, nesterov=True)",
                "a momentum above 0",
                "momentum=0.9",
            )
        super().__init__(params, {**settings, "nesterov": nesterov})

    def update(self, parts: list[ForeachGroup]) -> None:
        """Update all parameters that have gradients."""
        for part in parts:
            weights = part.weights()
            scaled = _scaled(part.group, weights, part.gradients())
            part.descend(weights, self._with_momentum(part, scaled))

    def _with_momentum(self, part: ForeachGroup, scaled: list[Tensor]) -> list[Tensor]:
        momentum = part.group["momentum"]
        if not momentum:
            return scaled
        buffers = self.buffers(part, "momentum_buffer")
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, scaled)
        if not part.group["nesterov"]:
            return buffers
        return list(torch._foreach_add(scaled, buffers, alpha=momentum))


def _scaled(group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Return λ (g + β w) of each layer."""
    decay, trust, eps = group["weight_decay"], group["trust_coefficient"], group["eps"]
    if not decay:
        return gradients
    ratios = trust_ratios(weights, gradients, lambda w, g: trust * w / (g + decay * w + eps))
    scaled = list(torch._foreach_add(gradients, weights, alpha=decay))
    torch._foreach_mul_(scaled, ratios)
    return scaled
