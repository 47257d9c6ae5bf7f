"""Test sums over the ranks: whether they are exact, and how fast they are."""

import statistics
import time

import torch

from hpctrain.backends.base import Backend

__all__ = ["checked", "run_sums"]

_MB = 10**6
_CHECKED = (1, 1000, 100_003)  # elements; 2, 4, 8 … ranks cannot share the last evenly
_REPEATS = 5


def checked(backend: Backend, count: int) -> bool:
    """Check whether a sum of whole numbers that differ between ranks is exact on this rank."""
    pattern = torch.arange(count, dtype=torch.float64, device=backend.device) % 1009 + 1
    total = backend.world_size * (backend.world_size + 1) // 2
    return bool(torch.equal(backend.sum(pattern * (backend.rank + 1)), pattern * total))


def run_sums(backend: Backend) -> tuple[bool, dict[int, float]]:
    """Check and time sums on this rank; all ranks must call this together.

    Returns:
        Whether all sums were exact on this rank; and the bus bandwidth in GB/s, by size in bytes.
    """
    # Run every check, even after a wrong sum: each sum needs all ranks.
    exact = sum(checked(backend, count) for count in _CHECKED) == len(_CHECKED)
    n, largest = backend.world_size, 64 * _MB if backend.device.type == "cuda" else 16 * _MB
    # Bytes over each rank's link per second. Source: bus bandwidth in nccl-tests' PERFORMANCE.md.
    speeds = {
        size: 2 * (n - 1) / n * size / _time_sum(backend, size) / 1e9 for size in (_MB, largest)
    }
    return exact, speeds


def _time_sum(backend: Backend, size: int) -> float:
    """Return the median time of a sum in seconds, until the device has finished it."""
    tensor = torch.zeros(size // 4, device=backend.device)
    seconds = []
    for _ in range(1 + _REPEATS):  # the first sum opens connections
        backend.barrier()
        began = time.perf_counter()
        backend.sum(tensor)
        if backend.device.type == "cuda":
            torch.cuda.synchronize(backend.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
