"""Arms that take turns in one start, on all ranks alike, until time is up."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpctrain.tools.bench.measure import order
from hpctrain.training.preemption import REASONS, Stopped
from hpctrain.training.session import Session

__all__ = ["Times", "calls_for", "in_turns", "slowest", "timed"]

Times = dict[str, list[float]]
Arm = Callable[[], float]


def in_turns(session: Session, arms: Mapping[str, Arm], seconds: float, least: int = 3) -> Times:
    """What each arm returned in each round, at this rank; called by all ranks alike.

    Args:
        session: open, and outside of a run.
        arms: by name; all ranks are together where one begins.
        seconds: no round begins after them.
        least: but for as many.

    Raises:
        Stopped: a rank was asked to stop; all of them leave.
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
    """Wait for all ranks; whether rank 0 has enough.

    Raises:
        Stopped: a rank was asked to stop.
    """
    asked = session.preemption.asked()
    said = [float(enough and session.is_main), *(float(reason == asked) for reason in REASONS)]
    over, *reasons = session.backend.sum_async(said).values()
    for reason, ranks in zip(REASONS, reasons, strict=True):
        if ranks:
            raise Stopped(f"{reason}, while it was measured", os.environ)
    return over > 0


def timed(device: torch.device, action: Callable[[], Any], calls: int = 1) -> float:
    """Seconds of a call, over some of them; the device has done them by then.

    Args:
        device: that the action keeps busy.
        action: what is timed.
        calls: how many, one after the other.
    """
    _finish(device)
    begin = time.perf_counter()
    for _ in range(calls):
        action()
    _finish(device)
    return (time.perf_counter() - begin) / calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def calls_for(session: Session, action: Callable[[], Any], seconds: float, most: int) -> int:
    """How many calls take that long, after some to warm up; the same on all ranks.

    Args:
        session: open.
        action: called by all ranks alike.
        seconds: that they should take together.
        most: calls.
    """
    timed(session.device, action, 2)
    one = timed(session.device, action, 2)
    calls: int = session.backend.broadcast_object(max(1, min(int(seconds / one), most)))
    return calls


def slowest(ranks: Sequence[Times]) -> Times:
    """Of each round the longest time among the ranks: what the world took.

    Args:
        ranks: what `in_turns` gave each of them.
    """
    return {
        name: [max(times) for times in zip(*(one[name] for one in ranks), strict=True)]
        for name in ranks[0]
    }
