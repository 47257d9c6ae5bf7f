"""Which parameters of a model are trained, and which of them a loss depends on."""

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor, nn

from hpctrain.process.logging import logger

__all__ = ["Trained", "reached"]

_TRAINED = attrgetter("requires_grad")


class Trained:
    """The trained parameters of a prepared model.

    Args:
        model: model as given to `prepare`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._all = list(model.parameters())
        self._flags = list(map(_TRAINED, self._all))

    def changed(self) -> bool:
        """Check whether parameters were frozen or unfrozen. Cost: it reads each parameter.

        A model that is frozen as a whole, as a discriminator while its generator learns, exchanges
        no gradients and needs no change.
        """
        flags = list(map(_TRAINED, self._all))
        return flags != self._flags and any(flags)

    def refresh(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Record which parameters are trained now; return the new ones with their names."""
        before = {id(p) for p, flag in zip(self._all, self._flags, strict=True) if flag}
        self._all = list(self.model.parameters())
        self._flags = list(map(_TRAINED, self._all))
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        new = [(name, parameter) for name, parameter in named if id(parameter) not in before]
        logger.info(
            "%d parameters are trained from now on; new%s",
            len(named),
            f": {new[0][0]} and {len(new) - 1} more" if new else ": none",
        )
        return new


def reached(*outputs: Tensor) -> set[int] | None:
    """Return the ids of the parameters on which losses or outputs of a model depend.

    Returns:
        None if a part of the graph is hidden: torch's checkpoint(use_reentrant=True) computes it
        again in the backward pass.
    """
    nodes, visited, found = [output.grad_fn for output in outputs], set(), set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return None
        found.add(id(getattr(node, "variable", None)))
        nodes += [before for before, _ in node.next_functions]
    return found
