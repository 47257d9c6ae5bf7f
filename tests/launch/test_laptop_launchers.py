"""examples/mnist.py, unchanged, by the launchers of a laptop."""

import json

import launches
import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "launcher", ["hpctrain run", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_launcher_of_three_ranks_has_the_losses_of_one_process(
    launcher, reproducibility_reference, tmp_path
):
    command = [*launches.LOCAL[launcher], str(launches.TWICE), *launches.PARITY]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0, done.stderr
    launches.same_losses(tmp_path, reproducibility_reference)
    assert json.loads((tmp_path / "fp64" / "run.json").read_text())["world"]["world_size"] == 3
