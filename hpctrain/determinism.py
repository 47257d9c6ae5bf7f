"""torch's switches for bit-equal repeats.

Source: "Reproducibility" in torch's notes.
"""

import os

import torch

__all__ = ["Determinism"]


class Determinism:
    """Switches them when asked to, and knows what they were before.

    Args:
        wanted: whether repeats have to be bit-equal.
        device: of this rank.
    """

    _WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

    def __init__(self, wanted: bool, device: torch.device) -> None:
        # Not touched where not asked for: torch imports its compiler to switch the first one.
        self._changed = wanted
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ.get(self._WORKSPACE),
        )
        if wanted:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            if device.type == "cuda":
                # cuBLAS reads it from nowhere else.
                os.environ.setdefault(self._WORKSPACE, ":4096:8")

    def put_back(self) -> None:
        """Leave torch as it was found."""
        if not self._changed:
            return
        algorithms, benchmark, workspace = self._before
        torch.use_deterministic_algorithms(algorithms)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(self._WORKSPACE, None)
