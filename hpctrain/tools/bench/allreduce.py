"""Benchmark of a sum over the ranks: the raw call and hpctrain's, by message size."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from hpctrain.errors import UsageError
from hpctrain.tools.bench import baseline
from hpctrain.tools.bench.measure import Results, compare, spell
from hpctrain.tools.bench.turns import Times, calls_for, in_turns, slowest, timed
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = ["evaluate", "measure"]

RAW, OURS = "raw call", "hpctrain"
_SIZES = (4, 4_000, 64_000, 1_000_000, 4_000_000, 16_000_000)
_SIZES_OF_GPUS = (*_SIZES, 64_000_000, 256_000_000)
_BLOCK_SECONDS, _MOST_CALLS = 0.02, 100
_NUMBER = 4  # bytes of a number in float32


def measure(session: Session, arguments: argparse.Namespace) -> Results:
    """Measure latency and bandwidth for each size; all ranks must call this together.

    Args:
        session: open session.
        arguments: arguments `sizes` (bytes; None for the default sizes) and `seconds`.

    Raises:
        UsageError: there is only one rank, or a size is no multiple of 4 bytes.
    """
    world = session.world.world_size
    sizes = arguments.sizes or (_SIZES_OF_GPUS if session.device.type == "cuda" else _SIZES)
    on_rank_zero(session.backend, lambda: _refuse(sizes, world))
    times = {size: _of_size(session, size, arguments.seconds / len(sizes)) for size in sizes}
    ranks = session.backend.gather_object(times)
    if not session.is_main:
        return {}
    return {
        "title": "times of the slowest rank",
        "results": {
            spell(size): evaluate(size, slowest([own[size] for own in ranks]), world)
            for size in sizes
        },
        "notes": "The smallest size shows the latency. busbw: bytes / time · 2(n-1)/n.",
    }


def _refuse(sizes: Sequence[int], world: int) -> None:
    if world == 1:
        raise UsageError("HT903.one-rank")
    if odd := next((size for size in sizes if size % _NUMBER), None):
        raise UsageError("HT902.odd-size", size=odd)


def _of_size(session: Session, size: int, seconds: float) -> Times:
    """Return the seconds of a call for each arm, one value per round."""
    backend, direct = session.backend, baseline.direct_sum(session.backend)
    tensor = torch.zeros(size // _NUMBER, device=session.device)
    actions = {RAW: lambda: direct(tensor), OURS: lambda: backend.sum(tensor)}
    calls = [calls_for(session, one, _BLOCK_SECONDS, _MOST_CALLS) for one in actions.values()]
    arms = {
        name: partial(timed, session.device, action, calls[0]) for name, action in actions.items()
    }
    return in_turns(session, arms, seconds)


def evaluate(size: int, times: Mapping[str, list[float]], ranks: int) -> dict[str, Results]:
    """Summarise the results for one size.

    Args:
        size: message size in bytes.
        times: seconds of a call at the slowest rank for each arm, one value per round.
        ranks: world size.
    """
    arms = compare({name: {"us": [1e6 * one for one in own]} for name, own in times.items()}, RAW)
    for arm in arms.values():  # factor: PERFORMANCE.md of NVIDIA's nccl-tests
        arm["algbw"] = size / arm["us"]["median"] / 1e3
        arm["busbw"] = arm["algbw"] * 2 * (ranks - 1) / ranks
    return arms
