"""Undisturbed runs, to which resumed ones are compared."""

import pytest


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    import faults

    return faults.References(tmp_path_factory)
