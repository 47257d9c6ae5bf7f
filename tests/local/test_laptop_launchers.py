"""The example, unchanged, by the launchers that a laptop has."""

import launches
import pytest


@pytest.mark.parametrize("launcher", ["torchrun", "hpctrain run"])
def test_the_losses_are_those_of_one_process(launcher, sameness_reference, tmp_path):
    command = [*launches.LOCAL[launcher], str(launches.TWICE), *launches.SAMENESS]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0, done.stderr
    launches.same_losses(tmp_path, sameness_reference)
