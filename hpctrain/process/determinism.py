"""torch's settings for bit-identical repeats, and for speed if these are not requested.

Source: "Reproducibility" in torch's notes.
"""

import os

import torch

from hpctrain.process.logging import logger

__all__ = ["Determinism"]


class Determinism:
    """Settings of torch for deterministic algorithms, applied at once and restored by `put_back`.

    Args:
        wanted: whether repeats have to be bit-identical.
        device: device used by this rank.
    """

    _WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"

    def __init__(self, wanted: bool, device: torch.device) -> None:
        self._wanted = wanted
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ.get(self._WORKSPACE),
        )
        # For inputs of one size cuDNN measures once which algorithm is fastest; this can vary.
        torch.backends.cudnn.benchmark = device.type == "cuda" and not wanted
        # Called only if requested, because this call makes torch import its compiler.
        if wanted:
            logger.info(
                "deterministic: torch uses only algorithms that repeat bit for bit; on GPUs some "
                "are slower, and a few operations have none and raise an error"
            )
            torch.use_deterministic_algorithms(True)
            if device.type == "cuda":
                # The environment is the only place where cuBLAS reads this setting.
                os.environ.setdefault(self._WORKSPACE, ":4096:8")

    def put_back(self) -> None:
        """Restore torch's previous settings."""
        algorithms, benchmark, workspace = self._before
        torch.backends.cudnn.benchmark = benchmark
        if not self._wanted:
            return
        torch.use_deterministic_algorithms(algorithms)
        if workspace is None:
            os.environ.pop(self._WORKSPACE, None)
