"""Execution of the notebooks of examples/, as Jupyter does it, and the outputs of their cells."""

import json
import re

import launches

FOLDER = launches.TOP / "examples"
_EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, "done.ipynb")
"""


def command(name):
    """Return the command that executes examples/NAME.ipynb in the current folder."""
    return [launches.PYTHON, "-c", _EXECUTE, str(FOLDER / f"{name}.ipynb")]


def environ(folder):
    """Return variables that keep the files of Jupyter in a folder."""
    return {"IPYTHONDIR": str(folder), "MPLCONFIGDIR": str(folder)}


def outputs(folder):
    """Return the outputs of each cell that has some, after the command in this folder."""
    cells = json.loads((folder / "done.ipynb").read_text())["cells"]
    return [cell["outputs"] for cell in cells if cell.get("outputs")]


def text(output):
    """Return the text of an output: of a stream, or of a value."""
    return "".join(output["text"] if "text" in output else output["data"]["text/plain"])


def check_sweep(folder, launcher):
    """Check the outputs of the sweep, and that its runs are those of its table.

    Args:
        folder: folder of the execution.
        launcher: launcher of the runs.
    """
    parts = [one.get("data", one) for cell in outputs(folder) for one in cell]
    (table,) = ("".join(part["text/markdown"]) for part in parts if "text/markdown" in part)
    rows = re.findall(r"^\| ([\d.]+) \| (\d+) \| (\**)([\d.]+)%", table, re.MULTILINE)
    ends = [(folder / "runs/sweep" / f"lr-{lr}-batch-{batch}") for lr, batch, *_ in rows]
    assert len(set(ends)) == 6
    for run, (lr, batch, _, value) in zip(ends, rows, strict=True):
        summary = json.loads((run / "summary.json").read_text())
        assert summary["status"] == "done"
        assert f"{summary['metrics']['top1']:.1%}" == f"{value}%"
        (start,) = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
        options, world = start["options"], start["world"]
        assert options["global_batch"] == int(batch)
        metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        assert {row["lr"] for row in metrics if "lr" in row} == {float(lr)}
        assert (world["launcher"], world["world_size"]) == (launcher, 2)
    # The weights that were loaded score as the best run did.
    (best,) = (value for *_, mark, value in rows if mark)
    assert float(best) == max(float(value) for *_, value in rows) > 90
    printed = "".join("".join(part["text"]) for part in parts if part.get("name") == "stdout")
    assert f"{best}% of 360 test images are right" in printed
    assert sum("image/png" in part for part in parts) == 2
