"""Ranks on a GPU, with results on the host."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from ranks import run as run_ranks

from hpctrain.cluster.visible_gpus import CUDA
from hpctrain.process.pytree import map_tensors

DEVICE = torch.device("cuda")
# Ranks initialize CUDA and NCCL, and torch.compile starts its compiler.
_TIMEOUT = 300.0


def run(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    layout: Sequence[int] = (),
    timeout: float = _TIMEOUT,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run `ranks.run` with time for CUDA to start; return the results on the host.

    Over NCCL the others wait for a rank that was killed, until their launcher ends them.

    Args:
        size: ranks.
        function, arguments, layout, timeout, env: as of `ranks.run`; the GPUs are those that this
            process sees.
    """
    more = {CUDA: ",".join(visible()), **(env or {})}
    return run_ranks(
        *(size, _on_host, function, *arguments),
        layout=layout,
        timeout=timeout,
        env=more,
        kill_rest=True,
    )


def _on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().cpu(), function(*arguments))


def visible() -> list[str]:
    """Return the GPUs that this process sees, by their names for CUDA."""
    given = os.environ.get(CUDA)
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


@contextmanager
def never_waits() -> Iterator[None]:
    """Raise an error where the host waits for the GPU, for as long as the block lasts.

    torch detects copies to and from the host, and reads of a value on the GPU, but not
    torch.distributed and events.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
