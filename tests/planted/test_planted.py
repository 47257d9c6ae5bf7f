"""The table of planted bugs fits the current product and tests."""

import os
from pathlib import Path
from unittest import mock

import bugs
import pytest

BUGS = bugs.load()


class Collector:
    """A plugin that keeps the names of the tests that pytest collected."""

    def __init__(self):
        self.names = set()

    def pytest_collection_finish(self, session):
        self.names = {item.nodeid for item in session.items}
        # Also the names without parameters.
        self.names |= {name.partition("[")[0] for name in self.names}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_fits_product(bug):
    assert not bugs.mistakes(bug)
    assert bug.new != bug.old
    assert bug.tier in ("default", "all")


def absent(named, *options):
    """Return the names of tests that pytest does not collect."""
    files = sorted({name.partition("::")[0] for name in named})
    collector = Collector()
    with mock.patch.dict(os.environ):  # imports of tests change it
        code = pytest.main(
            ["--collect-only", "-qq", *options, *filter(os.path.exists, files)], plugins=[collector]
        )
    assert code == pytest.ExitCode.OK
    return sorted(named - collector.names)


def test_planted_bugs_name_tests_of_their_tier(request, monkeypatch):
    monkeypatch.chdir(bugs.TOP)
    everything = request.config.getoption("--all")
    named = {test for bug in BUGS if everything or bug.tier == "default" for test in bug.tests}
    assert absent(named, *["--all"] * everything) == []


@pytest.mark.slow
def test_slow_cases_exist(monkeypatch):
    monkeypatch.chdir(bugs.TOP)
    lines = Path("tests/slow_cases.txt").read_text().splitlines()
    assert absent({line for line in lines if not line.startswith("#")}, "--all") == []


def test_planted_bugs_are_many_and_most_are_of_the_default_tier():
    assert len(BUGS) >= 45
    assert all(bug.tests for bug in BUGS)
    assert sum(bug.tier == "default" for bug in BUGS) >= 0.8 * len(BUGS)
