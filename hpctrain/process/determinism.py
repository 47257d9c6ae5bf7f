"""torch's settings for bit-identical repeats, and for speed if these are not requested.

Source: "Reproducibility" in torch's notes.
"""

import os
from contextlib import ExitStack

import torch

from hpctrain.process.logging import logger

__all__ = ["choose_algorithms"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def choose_algorithms(wanted: bool, device: torch.device, undo: ExitStack) -> None:
    """Set whether torch uses deterministic algorithms, or the fastest ones.

    Args:
        wanted: whether repeats have to be bit-identical.
        device: device used by this rank.
        undo: stack that gets the callbacks to restore the settings.
    """
    undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    # For inputs of one size cuDNN measures once which algorithm is fastest; this can vary.
    torch.backends.cudnn.benchmark = device.type == "cuda" and not wanted
    if not wanted:
        return
    logger.info(
        "deterministic: torch uses only algorithms that repeat bit for bit; on GPUs some "
        "are slower, and a few operations have none and raise an error"
    )
    undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    # Called only if requested, because this call makes torch import its compiler.
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda" and _WORKSPACE not in os.environ:
        # The environment is the only place where cuBLAS reads this setting.
        undo.callback(os.environ.pop, _WORKSPACE, None)
        os.environ[_WORKSPACE] = ":4096:8"
