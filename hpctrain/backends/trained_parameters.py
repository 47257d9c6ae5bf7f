"""Which parameters of a model are trained, and which of them a loss uses."""

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor, nn

from hpctrain.process.logging import logger

__all__ = ["TRAINED", "Trained", "reached"]

TRAINED = attrgetter("requires_grad")


class Trained:
    """The trained parameters of a prepared model.

    A backend compares `flags` with `TRAINED` of all parameters before each backward pass. A model
    that is frozen as a whole, as a discriminator while its generator learns, exchanges no gradients
    and is not changed.

    Args:
        model: model as given to `prepare`.

    Attributes:
        parameters: all parameters of the model.
        flags: whether each of them was trained at the last `refresh`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.flags = list(map(TRAINED, self.parameters))

    @property
    def changed(self) -> bool:
        """Whether parameters were frozen or unfrozen since the last `refresh`."""
        flags = list(map(TRAINED, self.parameters))
        return flags != self.flags and any(flags)

    def refresh(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Record which parameters are trained now; return the new ones with their names."""
        before = {id(p) for p, flag in zip(self.parameters, self.flags, strict=True) if flag}
        self.parameters = list(self.model.parameters())
        self.flags = list(map(TRAINED, self.parameters))
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
