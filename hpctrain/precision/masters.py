"""fp32 master weights of a model in half precision.

Source: Micikevicius et al., "Mixed Precision Training", 2018 (arXiv 1710.03740), section 3.1.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.errors import UsageError

__all__ = ["Masters"]


class Masters:
    """Master of each parameter of a model (the copy), with the same shape, in fp32."""

    def __init__(self) -> None:
        self._master: dict[Tensor, nn.Parameter] = {}
        self._copy: dict[Tensor, nn.Parameter] = {}
        self._collected: set[int] = set()  # optimizers whose masters have this step's gradients

    def keep(self, parameter: nn.Parameter) -> None:
        """Make the master of a parameter, before the parameter is converted to half precision."""
        if parameter not in self._master:
            data = parameter.detach().to(torch.float32, copy=True)
            master = nn.Parameter(data, parameter.requires_grad)
            self._master[parameter] = master
            self._copy[master] = parameter

    def of(self, parameter: Tensor) -> Tensor:
        """Return the master of a copy; for any other parameter, the parameter itself."""
        return self._master.get(parameter, parameter)

    def all(self) -> Sequence[Tensor]:
        """Return the masters, in the order of the `keep` calls."""
        return [master.detach() for master in self._master.values()]

    def give(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's parameters by their masters, and keep their state."""
        for group in optimizer.param_groups:
            group["params"] = [self.of(parameter) for parameter in group["params"]]
        for copy, master in self._pairs(optimizer):
            if copy in optimizer.state:
                state = optimizer.state.pop(copy)
                optimizer.state[master] = {name: _widen(value) for name, value in state.items()}

    def collect(self, optimizer: Optimizer) -> None:
        """Copy the gradients to the masters; once per step."""
        if id(optimizer) in self._collected:
            return
        self._collected.add(id(optimizer))
        if any(p in self._master for group in optimizer.param_groups for p in group["params"]):
            self.give(optimizer)  # a group that was added later
        for copy, master in self._pairs(optimizer):
            master.grad = None if copy.grad is None else copy.grad.to(torch.float32)

    def copy_back(self, optimizer: Optimizer) -> None:
        """Copy the masters of an optimizer to their copies, at the end of a step."""
        self._collected.discard(id(optimizer))
        pairs = list(self._pairs(optimizer))
        if pairs:
            copies, masters = zip(*pairs, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(copies, masters)

    def clear(self, optimizer: Optimizer) -> None:
        """Clear the gradients of the copies."""
        self._collected.discard(id(optimizer))
        for copy, _ in self._pairs(optimizer):
            copy.grad = None

    def clear_masters(self, optimizer: Optimizer) -> None:
        """Clear the gradients of the masters, if the optimizer's `zero_grad` is not called."""
        for _, master in self._pairs(optimizer):
            master.grad = None

    def refresh(self, copies: Iterable[Tensor]) -> None:
        """Update the masters from their copies, where other values were loaded into the copies."""
        with torch.no_grad():
            for copy in copies:
                master = self._master.get(copy)
                if master is not None:
                    same = master.to(copy.dtype) == copy
                    master.copy_(torch.where(same, master, copy.to(master.dtype)))

    def take_copies(self) -> None:
        """Copy all copies to their masters, with the values rounded to half precision."""
        with torch.no_grad():
            for copy, master in self._master.items():
                master.copy_(copy)

    def load(self, masters: Sequence[Tensor]) -> None:
        """Load the masters of a checkpoint.

        Raises:
            UsageError: the masters belong to other models.
        """
        own = list(self._master.values())
        if [tuple(m.shape) for m in masters] != [tuple(m.shape) for m in own]:
            raise UsageError(
                "HT405",
                f"the checkpoint has {len(masters)} master weights of other shapes than the "
                f"{len(own)} of the prepared models",
                "the same models and --keep-batchnorm-fp32",
                "--run-dir DIR for another directory",
            )
        with torch.no_grad():
            for (copy, master), saved in zip(self._master.items(), masters, strict=True):
                master.copy_(saved)
                copy.copy_(saved)

    def _pairs(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield the copies and masters of an optimizer."""
        for group in optimizer.param_groups:
            for master in group["params"]:
                copy = self._copy.get(master)
                if copy is not None:
                    yield copy, master


def _widen(value: object) -> object:
    """Convert a momentum in half precision to fp32; return other values unchanged."""
    if isinstance(value, Tensor) and value.dtype == torch.float16:
        return value.float()
    return value
