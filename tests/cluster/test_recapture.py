"""The launchers of this machine still set the variables in the files of tests/cluster/env/."""

import environments
import pytest

# Takes minutes, and fails only with other versions of the launchers.
pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture(scope="session")
def captured(cluster, tmp_path_factory):
    """Capture once every start whose programs are installed here."""
    names = [
        name
        for name, (program, _) in environments.BY_START.items()
        if not environments.lacks(program, cluster)[0]
    ]
    return environments.capture(names, cluster, tmp_path_factory.mktemp("environments"))


@pytest.mark.parametrize("name", environments.BY_START)
def test_launcher_sets_the_captured_environment(name, cluster, captured, lacking):
    program, start = environments.BY_START[name]
    part, why = environments.lacks(program, cluster)
    if part:
        lacking(part, why)
    document = captured[name]
    if isinstance(document, environments.CaptureError):
        pytest.fail(str(document))
    found = environments.differences(
        start, environments.load(environments.of_version(name, cluster.version)), document
    )
    assert not found, "\n".join(found)
