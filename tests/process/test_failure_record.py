"""Failure records decide which rank shows its traceback."""

import pytest

from hpctrain.cluster.env_vars import EVIDENCE
from hpctrain.process import failure_record


def test_first_rank_alone_shows_its_traceback(tmp_path):
    env = {EVIDENCE: str(tmp_path)}
    assert [failure_record.shows(env) for _ in range(3)] == [True, False, False]
    assert failure_record.shown(env) == failure_record.process()


@pytest.mark.parametrize("env", [{}, {EVIDENCE: ""}, {EVIDENCE: "/nowhere"}])
def test_each_rank_shows_its_traceback_without_a_writable_folder(env):
    assert all(failure_record.shows(env) for _ in range(2))


def test_each_text_is_shown_by_one_rank(tmp_path):
    env = {EVIDENCE: str(tmp_path)}
    texts = ("one", "two", "one", "two\udcff", "two")
    assert [failure_record.shows(env, text) for text in texts] == [True, True, False, True, False]
    assert failure_record.shown(env) == ""
