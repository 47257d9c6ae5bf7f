"""A real Slurm of four hosts, for the tests of this folder."""

import cluster as slurm
import pytest


@pytest.fixture(scope="session")
def cluster(lacking):
    missing = slurm.available()
    if missing:
        lacking("slurm", missing)
    started = slurm.Cluster()
    started.start()
    yield started
    started.stop()
