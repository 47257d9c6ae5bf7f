"""Uninterrupted runs, with which tests compare resumed ones, and attempts of one launch."""

import os

import pytest


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    import faults

    return faults.References(tmp_path_factory)


@pytest.fixture
def evidence(tmp_path):
    """Return the variables of ranks that leave failure records."""
    (tmp_path / "evidence").mkdir()
    return {"HPCTRAIN_EVIDENCE": str(tmp_path / "evidence")}


@pytest.fixture
def memory():
    """Return the folder of a launch in /dev/shm."""
    from hpctrain.process import shared_memory

    folder = shared_memory.folder_of(f"test-{os.getpid()}")
    yield folder
    shared_memory.remove(folder)


@pytest.fixture
def attempt(memory):
    """Return a function that starts an attempt of the launch; see `faults.start`.

    Three ranks copy their state, the last of them on a host of its own.
    """
    import faults

    def attempt(number, *options, hurt=(), layout=(2, 1), **more):
        env = {"HPCTRAIN_MEMORY": str(memory), "HPCTRAIN_START": f"launch/{number}"}
        options = (*faults.IN_MEMORY, *options)
        return faults.start(sum(layout), *options, hurt=hurt, env=env, layout=layout, **more)

    return attempt
