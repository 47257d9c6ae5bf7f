"""The fixture that skips a test without Horovod."""

import importlib.util

import pytest


@pytest.fixture(scope="module")
def horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build --mpi")
