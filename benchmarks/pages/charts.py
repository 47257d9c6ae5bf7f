"""Draw the pictures of docs/benchmarks.md, from result files only: medians with 95 % intervals."""

import html
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import RESULTS, newest, source

__all__ = ["CHARTS", "Chart", "differing", "draw"]

FOLDER = "docs/images/benchmarks"
_OURS, _OTHERS = "#d9480f", "#868e96"


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of one figure of a benchmark.

    Attributes:
        benchmark: name of the benchmark.
        figure: key of the figure in an arm.
        title: what the bars are, with the unit, and which direction is better.
        group: group of arms; empty where the benchmark has none.
        arms: arms to draw; empty for all that have the figure.
    """

    benchmark: str
    figure: str
    title: str
    group: str = ""
    arms: tuple[str, ...] = ()


# To add a picture, add a line here and the picture to docs/benchmarks.md.
CHARTS = {
    "step": Chart(
        "step_overhead",
        "more_us",
        "µs of a step, over the loop by hand; less is better",
        "one process",
        ("hpctrain", "Lightning Fabric", "accelerate"),
    ),
    "start": Chart(
        "first_allreduce",
        "s",
        "seconds to the first all-reduce, 8 ranks; less is better",
        group="8 ranks",
    ),
    "save": Chart("checkpoint", "stall_s", "seconds a save of 1 GB stops training", "1000 MB"),
    "imagenet": Chart(
        "imagenet", "ratio", "ResNet-50, images/s, × the loop by hand; more is better", "in memory"
    ),
    "gpt": Chart("gpt", "tokens_per_s", "GPT, tokens/s; more is better", "compiled"),
}


def draw(name: str, top: Path) -> bytes:
    """Return a picture as SVG.

    Args:
        name: key of CHARTS.
        top: folder of the repository.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    chart, record = CHARTS[name], _record(CHARTS[name], top)
    arms = dict(_arms(chart, record))
    rows = range(len(arms))
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(7, 0.9 + 0.42 * len(arms)), layout="constrained")
        axes = figure.subplots()
        medians = [own["median"] for own in arms.values()]
        ends = [
            [own["median"] - own["low"] for own in arms.values()],
            [own["high"] - own["median"] for own in arms.values()],
        ]
        colours = [_OURS if arm.startswith("hpctrain") else _OTHERS for arm in arms]
        axes.barh(rows, medians, xerr=ends, color=colours, height=0.6, capsize=3)
        axes.set_yticks(rows, arms)
        axes.invert_yaxis()
        axes.set_title(chart.title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Description": source(record)})
    return file.getvalue()


def differing(top: Path) -> list[str]:
    """Return the names of the pictures that are missing or of other results than the newest."""
    return [
        name for name in CHARTS if _shown(path(name, top)) != source(_record(CHARTS[name], top))
    ]


def path(name: str, top: Path) -> Path:
    """Return the file of a picture."""
    return top / FOLDER / f"{name}.svg"


def _record(chart: Chart, top: Path) -> Mapping[str, Any]:
    for record in newest(top / RESULTS, chart.benchmark):
        if not chart.group or chart.group in record["results"]:
            return record
    raise ValueError(f"no results of {chart.benchmark}, {chart.group}")


def _arms(chart: Chart, record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, float]]]:
    results = record["results"]
    group = results[chart.group] if chart.group else results
    for arm, figures in group.items():
        if chart.figure in figures and (not chart.arms or arm in chart.arms):
            yield arm, figures[chart.figure]


def _shown(file: Path) -> str:
    """Return the source that a picture names; empty where there is none."""
    text = file.read_text() if file.exists() else ""
    found = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    return html.unescape(found[1]) if found else ""
