"""Figures of step times: a histogram, and bars that show slow ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter, LogLocator

from hpctrain.cluster.texts import ranks_text
from hpctrain.monitoring.report import figures, wording
from hpctrain.monitoring.report.figures import Drawn
from hpctrain.monitoring.report.run_reader import RecordedRun
from hpctrain.monitoring.report.step_times import edge, quantile

__all__ = ["draw_ranks", "draw_times"]

_FEW = 16  # maximum number of ranks that each have a number


def draw_times(runs: Sequence[RecordedRun]) -> Drawn | None:
    """Draw a histogram of rank 0's step times; return None if no run has them."""
    shown = [(number, run) for number, run in enumerate(runs) if run.timings.buckets]
    if not shown:
        return None
    sheet = figures.sheet("time of a step", "share of the steps")
    axes = sheet.axes[0]
    sentences = []
    for number, run in shown:
        buckets = run.timings.buckets
        bins = range(min(buckets), max(buckets) + 1)
        shares = np.array([buckets[bucket] for bucket in bins], dtype=float) / buckets.total()
        edges = [edge(bucket) for bucket in (*bins, bins.stop)]
        color = figures.color(number)
        dashes = figures.DASHES[number % len(figures.DASHES)]
        axes.stairs(shares, edges, fill=True, color=color, alpha=0.25)
        axes.stairs(shares, edges, color=color, linestyle=dashes, label=run.label)
        usual, late = (wording.duration(quantile(buckets, share)) for share in (0.5, 0.99))
        sentences.append(
            (f"{run.label}: " if len(runs) > 1 else "")
            + f"Half of {wording.number(buckets.total())} steps take at most {usual}, 99 of 100 at "
            f"most {late}, the longest {wording.duration(edge(bins.stop))}."
        )
    axes.set_xscale("log")
    first, last = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if last < 20 * first else (1.0,)))
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.xaxis.set_minor_formatter("")
    if len(runs) > 1:
        # Each run has a filled patch and an outline; the outline has the dashes.
        sheet.legend(axes.patches[1::2], [run.label for _, run in shown])
    text = " ".join(sentences)
    return sheet.done("step-times", "time of a step, rank 0", f"Histogram. {text}", text)


def draw_ranks(run: RecordedRun, number: int, alone: bool) -> Drawn | None:
    """Draw data wait and forward time of each rank; return None with fewer than two ranks.

    Args:
        run: run with the ranks.
        number: number of the run in the report.
        alone: whether it is the only run.
    """
    ranks = run.timings.ranks
    if len(ranks) < 2:
        return None
    sheet = figures.Sheet(rows=2)
    slow_data = [number for number, rank in enumerate(ranks) if rank.slow_data]
    slow_forward = [number for number, rank in enumerate(ranks) if rank.slow_forward]
    _bars(sheet.axes[0], "waits for data", [rank.data for rank in ranks], slow_data)
    _bars(sheet.axes[1], "forward", [rank.forward for rank in ranks], slow_forward)
    sheet.axes[1].set_xlabel("rank")
    if len(ranks) <= _FEW:
        sheet.axes[1].set_xticks(range(len(ranks)))
    caption = f"Means of {wording.number(run.timings.steps)} steps."
    for name, slow in (("data", slow_data), ("the forward pass", slow_forward)):
        if slow:
            caption += f" Slow by {name}, marked: {ranks_text(slow)}."
    if not slow_data and not slow_forward:
        caption += " No rank is slow."
    title = "ranks" if alone else f"ranks of {run.label}"
    stem = "ranks" if alone else f"ranks-{number + 1}"
    alt = f"Bars for each of {len(ranks)} ranks: waiting for data, and forward pass. {caption}"
    return sheet.done(stem, title, alt, caption)


def _bars(axes: Any, label: str, seconds: list[float], slow: list[int]) -> None:
    """Draw bars of all ranks; slow ranks have another colour and a mark."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    # One outline of bars and gaps, because thousands of patches would be slow.
    edges = np.sort(np.concatenate([np.arange(len(seconds)) - 0.4, np.arange(len(seconds)) + 0.4]))
    for number, ranks in ((0, set(range(len(seconds))) - set(slow)), (1, set(slow))):
        heights = np.zeros(2 * len(seconds) - 1)
        heights[::2] = [value if rank in ranks else 0.0 for rank, value in enumerate(seconds)]
        axes.stairs(heights, edges, fill=True, color=figures.color(number))
    if slow:
        tops = [seconds[rank] + 0.08 * max(seconds) for rank in slow]
        axes.plot(slow, tops, linestyle="", marker="v", color=figures.color(1))
    axes.set_ylim(bottom=0.0)
