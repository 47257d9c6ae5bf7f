"""The notebooks of examples/, without Slurm."""

import launches
import nbformat
import notebooks
import pytest


@pytest.mark.parametrize("name", ["notebook", "sweep"])
def test_notebook_is_valid_and_has_no_outputs(name):
    notebook = nbformat.read(notebooks.FOLDER / f"{name}.ipynb", 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    for cell in code:
        compile(cell.source, f"{name} {cell.id}", "exec")


@pytest.mark.slow
@pytest.mark.e2e
def test_sweep_on_one_machine(tmp_path):
    # Without the programs of Slurm, which the machine of the tests may have.
    env = {**notebooks.environ(tmp_path), "PATH": str(launches.BIN)}
    done = launches.start(notebooks.command("sweep"), tmp_path, timeout=600, **env)
    assert done.returncode == 0, done.stderr
    notebooks.check_sweep(tmp_path, "hpctrain")
