"""Activation checkpointing: the activations of a block are computed again in the backward pass.

Source: `torch.utils.checkpoint` in torch's documentation; Chen et al., "Training Deep Nets with
Sublinear Memory Cost", 2016 (arXiv 1604.06174).
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.backends.blocks import find_blocks
from hpctrain.errors import UsageError
from hpctrain.process.logging import logger

__all__ = ["apply"]


def apply(model: nn.Module, names: str | None) -> None:
    """Let the blocks of a model keep their inputs only; the numbers stay the same.

    Args:
        model: model, changed in place.
        names: names of the blocks' classes, as for `find_blocks`.

    Raises:
        UsageError: the model has no blocks.
    """
    blocks = find_blocks(model, names)
    if not blocks:
        raise UsageError(
            "HT609",
            f"--activation-checkpointing, and no container of the {type(model).__name__} has "
            "several modules of one class",
            "blocks whose activations are computed again",
            "--fsdp-blocks CLASS, with the class of the blocks",
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    logger.info("the activations of %d blocks are computed again", len(blocks))
