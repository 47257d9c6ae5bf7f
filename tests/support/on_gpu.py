"""Ranks on a GPU, whose results can be read without one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ranks
import torch

from hpctrain.cluster.visible_gpus import CUDA
from hpctrain.process.pytree import map_tensors

DEVICE = torch.device("cuda")
# Ranks start CUDA and NCCL, and torch.compile its compiler.
_TIMEOUT = 300.0


def run(
    size: int, function: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
) -> list[Any]:
    """`ranks.run`, with time for CUDA to start, and with results on the host.

    Args:
        size: ranks.
        function, arguments, env: as there; the GPUs are those that this process sees.
    """
    more = {CUDA: ",".join(visible()), **(env or {})}
    return ranks.run(size, _on_host, function, *arguments, timeout=_TIMEOUT, env=more)


def _on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().cpu(), function(*arguments))


def visible() -> list[str]:
    """The GPUs that this process sees, as CUDA names them."""
    given = os.environ.get(CUDA)
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


@contextmanager
def never_waits() -> Iterator[None]:
    """Within it whatever makes the host wait for the GPU raises an error.

    torch knows of copies to and from the host and of what asks for a number on the GPU, not of
    torch.distributed and of events.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
