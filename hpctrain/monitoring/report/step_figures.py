"""Figures of step times: a histogram, and the times of each rank that show slow ones."""

import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from hpctrain.cluster.texts import ranks_text
from hpctrain.monitoring import figures
from hpctrain.monitoring.report import wording
from hpctrain.monitoring.report.run_reader import RecordedRun, quantile
from hpctrain.rundir.used import edge

__all__ = ["draw_ranks", "draw_times"]


def draw_times(runs: Sequence[RecordedRun]) -> tuple[Figure, str]:
    """Return a histogram of rank 0's step times in each run that has them, and a caption."""
    shown = [(number, run) for number, run in enumerate(runs) if run.timings.buckets]
    drawn = figures.figure(legend_lines=len(shown))
    axes = drawn.add_subplot(xscale="log", xlabel="time of a step", ylabel="share of the steps")
    axes.set_title("time of a step, rank 0")
    sentences = []
    outlines = []
    for number, run in shown:
        buckets = run.timings.buckets
        bins = range(min(buckets), max(buckets) + 1)
        shares = np.array([buckets[bucket] for bucket in bins]) / buckets.total()
        edges = [edge(bucket) for bucket in (*bins, bins.stop)]
        hue = figures.color(number)
        axes.stairs(shares, edges, fill=True, color=hue, alpha=0.25)
        outlines.append(axes.stairs(shares, edges, color=hue))
        usual, late = (wording.duration(quantile(buckets, share)) for share in (0.5, 0.99))
        sentences.append(
            f"{run.label}: half of {buckets.total():,} steps take at most {usual}, 99 of 100 at "
            f"most {late}, the longest {wording.duration(edge(bins.stop))}."
        )
    first, last = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if last < 20 * first else (1.0,)))
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.xaxis.set_minor_formatter("")
    if len(runs) > 1:
        figures.legend(drawn, outlines, [run.label for _, run in shown])
    return drawn, " ".join(sentences)


def draw_ranks(run: RecordedRun) -> tuple[Figure, str]:
    """Return the times of each rank, with marks above slow ones, and a caption."""
    timings = run.timings
    drawn = figures.figure(legend_lines=1)
    axes = drawn.add_subplot(xlabel="rank", ylabel="seconds of a step")
    axes.set_title(figures.shortened(f"ranks of {run.label}", 60), parse_math=False)
    caption = f"Means of {timings.steps:,} steps."
    lines = []
    names = ("waiting for data", "forward pass")
    for number, (name, seconds, slow) in enumerate(
        zip(names, timings.means, timings.slow, strict=True)
    ):
        hue = figures.color(number)
        lines += axes.plot(seconds, "os"[number], color=hue)
        if slow:
            above = seconds[slow] + 0.06 * timings.means.max()
            axes.plot(slow, above, "v", color=hue, markersize=6)
            times = float(seconds.max()), float(statistics.median_low(seconds))
            most, median = map(wording.duration, times)
            where = ranks_text(slow, [wording.text(host) for host in timings.hosts])
            caption += f" Slow by {name}, marked: {where}, up to {most} (median {median})."
    if not any(timings.slow):
        caption += " No rank is slow."
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.set_ylim(bottom=0.0)
    figures.legend(drawn, lines, names)
    return drawn, caption
