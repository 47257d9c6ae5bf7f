"""Uninterrupted runs, with which tests compare resumed ones, and variables of ranks."""

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
