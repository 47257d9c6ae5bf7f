"""The curves of a run: metrics in one plot, long runs, and metric names with any text."""

import json
import sys

import pytest

from hpctrain import jobs
from hpctrain.errors import UsageError
from hpctrain.jobs import job_curves
from hpctrain.monitoring import curves, figures

ROWS = [
    {"step": 10, "epoch": 0, "time": 1.0, "loss": 2.0, "lr": 0.1, "samples_per_second": 5},
    {"step": 20, "epoch": 0, "time": 2.0, "loss": float("nan"), "lr": 0.1},
    {"step": 20, "epoch": 0, "time": 2.5, "top1": 0.5, "top5": 0.9, "eval_loss": 1.5},
    {"step": 30, "epoch": 1, "time": 3.0, "loss": 1.0, "lr": 0.05, "note": "text", "flag": True},
]
PNG = b"\x89PNG\r\n\x1a\n"


def panels_of(rows):
    return curves.panels([curves.History("train-7", curves.collect(rows)[0], [])])


def test_curves_group_losses_and_accuracies_first():
    drawn = {panel.name: panel.curves for panel in panels_of([{"step": 0, "lr": 0.1}, *ROWS])}
    assert list(drawn) == ["loss", "accuracy", "lr", "samples_per_second"]
    assert [curve.label for curve in drawn["accuracy"]] == ["top1", "top5"]
    loss, eval_loss = drawn["loss"]
    assert (list(loss.steps), list(loss.middle), list(loss.missing)) == ([10, 30], [2, 1], [20])
    assert (list(eval_loss.steps), list(eval_loss.middle)) == ([20], [1.5])


def test_curves_skip_rows_without_step():
    (panel,) = panels_of([{"step": 1, "loss": 1.0}, {"loss": 1.0}, {"step": None, "loss": 1.0}])
    assert list(panel.curves[0].steps) == [1]


@pytest.mark.parametrize(
    "rows",
    [[], ROWS, [{"step": 1, "$\\frac{": 1.0, "_hidden": 2.0}], [{"step": 1, "loss": 1e400}]],
)
def test_curves_draw_any_metric_name(rows):
    assert job_curves.png(rows, "$\\broken{ <script> \x1b[2J").startswith(PNG)


def test_curves_redraw_png_file_until_job_ends(tmp_path, capsys):
    states = ["PENDING", "RUNNING", "RUNNING", "COMPLETED"]
    rounds = iter([[], ROWS[:1], ROWS[:1], ROWS])
    path = tmp_path / "curves.png"
    assert job_curves.follow("train-7", lambda: next(rounds), states, path) == path
    assert path.read_bytes().startswith(PNG)
    # Without new rows, nothing is drawn.
    assert [line.split(": ")[1][:7] for line in capsys.readouterr().err.splitlines()] == [
        *("nothing", "step 10", "step 30")
    ]


def test_curves_ctrl_c_ends_only_the_drawing(tmp_path):
    def interrupted():
        yield "RUNNING"
        raise KeyboardInterrupt

    assert job_curves.follow("train-7", list, interrupted(), tmp_path / "curves.png")


def test_curves_without_matplotlib_name_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[notebook\]'"):
        job_curves.png(ROWS, "train-7")


def test_curves_of_several_runs_have_a_panel_for_each_metric(tmp_path, monkeypatch):
    drawn = []
    png = figures.png
    monkeypatch.setattr(figures, "png", lambda *args: drawn.append(args) or png(*args))
    runs = [tmp_path / "lr-0.1", tmp_path / "lr-0.2"]
    for run in runs:
        run.mkdir()
        (run / "run.json").write_text("{}")
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert jobs.curves(*runs).startswith(PNG)
    ((panels, title),) = drawn
    assert [panel.name for panel in panels][:3] == ["loss", "eval_loss", "top1"]
    assert [curve.label for curve in panels[2].curves] == ["lr-0.1", "lr-0.2"]
    assert title == "2 runs"
    with pytest.raises(UsageError, match="HT655"):
        jobs.curves(runs[0], tmp_path)
