"""Uninterrupted runs, with which tests compare resumed ones."""

import pytest


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    import faults

    return faults.References(tmp_path_factory)
