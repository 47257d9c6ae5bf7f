"""Arms that run in turn within one start, in the same order on all ranks, until time is up."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpctrain.tools.bench.measure import order
from hpctrain.training.preemption import REASONS, Stopped
from hpctrain.training.session import Session

__all__ = ["Times", "calls_for", "finish", "in_turns", "slowest", "timed"]

Times = dict[str, list[float]]
Arm = Callable[[], float]


def in_turns(session: Session, arms: Mapping[str, Arm], seconds: float, least: int = 3) -> Times:
    """Run the arms in turn and return this rank's results; all ranks must call this together.

    Args:
        session: open session, outside of a run.
        arms: arms by name; each starts when all ranks are ready.
        seconds: seconds after which no new round begins.
        least: number of rounds to run even after that.

    Returns:
        Results of each arm, one value per round.

    Raises:
        Stopped: a rank received a stop request; all ranks stop.
    """
    found: Times = {name: [] for name in arms}
    end, number = time.monotonic() + seconds, 0
    while not _together(session, number >= least and time.monotonic() >= end):
        for name in order(list(arms), number):
            _together(session, False)
            found[name].append(arms[name]())
        number += 1
    return found


def _together(session: Session, enough: bool) -> bool:
    """Wait for all ranks, and return whether rank 0 has enough rounds.

    Raises:
        Stopped: a rank received a stop request.
    """
    request = session.preemption.asked(save_margin=0.0)
    flags = [float(enough and session.is_main), *(float(reason == request) for reason in REASONS)]
    over, *reasons = session.backend.sum_async(flags).values()
    for reason, ranks in zip(REASONS, reasons, strict=True):
        if ranks:
            raise Stopped(f"{reason}, while it was measured", os.environ)
    return over > 0


def timed(device: torch.device, action: Callable[[], Any], calls: int = 1) -> float:
    """Return the mean seconds of a call, until the device has finished it.

    Args:
        device: device that the action uses.
        action: function to time.
        calls: number of calls, one after the other.
    """
    finish(device)
    begin = time.perf_counter()
    for _ in range(calls):
        action()
    finish(device)
    return (time.perf_counter() - begin) / calls


def finish(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calls_for(session: Session, action: Callable[[], Any], seconds: float, most: int) -> int:
    """Return how many calls take the given time, the same number on all ranks.

    It calls the action twice to warm up, and twice to time it. All ranks must call this together.

    Args:
        session: open session.
        action: function to call.
        seconds: time that the calls should take together.
        most: largest number of calls.
    """
    timed(session.device, action, 2)
    one_call = timed(session.device, action, 2)
    calls: int = session.backend.broadcast_object(max(1, min(int(seconds / one_call), most)))
    return calls


def slowest(ranks: Sequence[Times]) -> Times:
    """Return the longest time among the ranks for each arm and round, as all ranks wait for it.

    Args:
        ranks: result of `in_turns` at each rank.
    """
    return {
        name: [max(row) for row in zip(*(times[name] for times in ranks), strict=True)]
        for name in ranks[0]
    }
