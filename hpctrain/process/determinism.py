"""torch's switches for bit-equal repeats, and for speed where they are not asked for.

Source: "Reproducibility" in torch's notes.
"""

import os

import torch

from hpctrain.process.logging import logger

__all__ = ["Determinism"]


class Determinism:
    """Switches them when asked to, and knows what they were before.

    Args:
        wanted: whether repeats have to be bit-equal.
        device: of this rank.
    """

    _WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

    def __init__(self, wanted: bool, device: torch.device) -> None:
        self._wanted = wanted
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ.get(self._WORKSPACE),
        )
        # Of images of one size cuDNN finds its fastest algorithms once; which, depends on the day.
        torch.backends.cudnn.benchmark = device.type == "cuda" and not wanted
        # Not touched where not asked for: torch imports its compiler to switch this one.
        if wanted:
            logger.info(
                "deterministic: torch uses only algorithms that repeat bit for bit; on GPUs some "
                "are slower, and a few operations have none and raise an error"
            )
            torch.use_deterministic_algorithms(True)
            if device.type == "cuda":
                # cuBLAS reads it from nowhere else.
                os.environ.setdefault(self._WORKSPACE, ":4096:8")

    def put_back(self) -> None:
        """Leave torch as it was found."""
        algorithms, benchmark, workspace = self._before
        torch.backends.cudnn.benchmark = benchmark
        if not self._wanted:
            return
        torch.use_deterministic_algorithms(algorithms)
        if workspace is None:
            os.environ.pop(self._WORKSPACE, None)
