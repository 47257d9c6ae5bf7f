"""The random states of a rank: Python's, NumPy's and torch's, as plain values and tensors."""

import random
from typing import Any

import numpy
import torch

__all__ = ["capture", "put_back", "seed"]


def seed(number: int, device: torch.device, everything: bool) -> None:
    """Begin a stream of random numbers.

    Args:
        number: from 0 on, below 2**63.
        device: whose generator besides that of the CPU. `torch.manual_seed` asks for all kinds of
            devices, which takes 0.5 ms where torch was built for GPUs and there is none.
        everything: whether those of Python and NumPy begin anew too, or torch's alone.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    if everything:
        random.seed(number)
        numpy.random.seed(number % 2**32)  # which takes no more


def capture(device: torch.device) -> dict[str, Any]:
    """The state of each generator, in types that `torch.load(weights_only=True)` takes.

    Args:
        device: whose generator besides that of the CPU.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    kind, keys, *rest = numpy.random.get_state()
    states["numpy"] = (kind, [int(key) for key in keys], *rest)
    return states


def put_back(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what `capture` has seen.

    Args:
        states: of `capture`.
        device: whose generator besides that of the CPU; it may be of another kind than before.
    """
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
