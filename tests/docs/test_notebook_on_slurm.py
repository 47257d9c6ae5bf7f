"""examples/notebook.ipynb, executed unchanged on a host of a real Slurm."""

import json

import launches
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

NOTEBOOK = launches.TOP / "examples" / "notebook.ipynb"
EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, "done.ipynb")
"""


def test_notebook_submits_and_trains_on_slurm(cluster, tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    done = cluster.run(
        [launches.PYTHON, "-c", EXECUTE, NOTEBOOK],
        cwd=tmp_path,
        env={**cluster.environ(), "IPYTHONDIR": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    outputs = [cell["outputs"] for cell in cells if cell.get("outputs")]
    job, (figure,), accuracy, log, row = outputs
    assert "Job(id='" in "".join(job[0]["data"]["text/plain"])
    assert figure["data"]["image/png"]  # one figure, which is drawn again in its place
    assert "of the test images are right" in "".join(accuracy[0]["text"])
    assert float("".join(accuracy[0]["text"]).partition("%")[0]) > 80
    assert "top-1 " in "".join(log[0]["text"])  # the end of the log
    assert "'top1'" in "".join(row[0]["data"]["text/plain"])
    (run,) = (tmp_path / "runs").glob("train-*")
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    assert json.loads((run / "run.json").read_text())["world"]["num_nodes"] == 2
