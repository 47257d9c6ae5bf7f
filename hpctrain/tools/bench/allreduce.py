"""Benchmark of a sum over the ranks: raw call, hpctrain, and a copy of the same size."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hpctrain.errors import UsageError
from hpctrain.tools.bench import baseline
from hpctrain.tools.bench.measure import compare, describe, spell, table
from hpctrain.tools.bench.turns import Times, calls_for, in_turns, slowest, timed
from hpctrain.training.consensus import on_rank_zero
from hpctrain.training.session import Session

__all__ = ["evaluate", "measure", "show"]

RAW, OURS, COPY = "raw call", "hpctrain", "copy"
_SIZES = (4, 4_000, 64_000, 1_000_000, 4_000_000, 16_000_000)
_SIZES_OF_GPUS = (*_SIZES, 64_000_000, 256_000_000)
_BLOCK_SECONDS, _MOST_CALLS = 0.02, 100
_NUMBER = 4  # bytes of a number in float32


def measure(session: Session, arguments: argparse.Namespace) -> dict[str, Any]:
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
    return {"results": [evaluate(size, slowest([r[size] for r in ranks]), world) for size in sizes]}


def _refuse(sizes: Sequence[int], world: int) -> None:
    if world == 1:
        raise UsageError(
            "HT903",
            "bench allreduce of one rank: there is no other rank to communicate with",
            "two ranks or more",
            "srun -n 2 hpctrain bench allreduce",
            "hpctrain run --nproc-per-node 2 -m hpctrain bench allreduce",
        )
    odd = [size for size in sizes if size % _NUMBER]
    if odd:
        raise UsageError(
            "HT902",
            f"--sizes {odd[0]}",
            "multiples of 4, as a number in float32 has 4 bytes",
            "--sizes 4,1MB",
        )


def _of_size(session: Session, size: int, seconds: float) -> Times:
    """Return the seconds of a call for each arm, one value per round."""
    backend, direct = session.backend, baseline.direct_sum(session.backend)
    tensor = torch.zeros(size // _NUMBER, device=session.device)
    other = torch.empty_like(tensor)
    actions = {
        RAW: lambda: direct(tensor),
        OURS: lambda: backend.sum(tensor),
        COPY: lambda: other.copy_(tensor),
    }
    calls = {
        name: calls_for(session, action, _BLOCK_SECONDS, _MOST_CALLS)
        for name, action in actions.items()
    }
    calls[OURS] = calls[RAW]
    arms = {name: partial(timed, session.device, actions[name], calls[name]) for name in actions}
    return in_turns(session, arms, seconds)


def evaluate(size: int, times: Mapping[str, list[float]], ranks: int) -> dict[str, Any]:
    """Summarise the results for one size.

    Args:
        size: message size in bytes.
        times: seconds of a call at the slowest rank for each arm, one value per round.
        ranks: world size.
    """
    arms = compare(times, RAW, "us", 1e6)
    for arm in arms.values():
        arm["algbw"] = size / arm["us"]["median"] / 1e3
    for name in (RAW, OURS):  # factor: PERFORMANCE.md of NVIDIA's nccl-tests
        arms[name]["busbw"] = arms[name]["algbw"] * 2 * (ranks - 1) / ranks
    return {"bytes": size, "arms": arms}


def show(found: dict[str, Any]) -> str:
    """Format the results as a table with a row for each size."""
    rows = [
        (
            "size",
            "raw call, µs",
            "hpctrain, µs",
            "ratio",
            "algbw GB/s",
            "busbw GB/s",
            "copy GB/s",
        )
    ]
    for result in found["results"]:
        raw, ours, copy = (result["arms"][name] for name in (RAW, OURS, COPY))
        rows.append(
            (
                spell(result["bytes"]),
                describe(raw["us"]),
                describe(ours["us"]),
                describe(ours["ratio"], ".3f"),
                f"{ours['algbw']:.3g}",
                f"{ours['busbw']:.3g}",
                f"{copy['algbw']:.3g}",
            )
        )
    return "\n".join(
        [
            table(rows),
            "",
            "Medians over rounds at the slowest rank, with 95 % intervals; ratios round by round. "
            "The first line is the latency.",
            "algbw: bytes / time; busbw: algbw · 2(n-1)/n, of hpctrain; copy: bytes copied / time, "
            "within the device.",
        ]
    )
