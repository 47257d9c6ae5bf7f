"""Failure records decide which rank shows its traceback."""

import errno
import os

import pytest

from hpctrain.cluster.env_vars import EVIDENCE, HOSTNAME
from hpctrain.errors import RankLostError
from hpctrain.process import failure_record


def test_first_rank_alone_shows_its_traceback(tmp_path):
    env = {EVIDENCE: str(tmp_path)}
    assert [failure_record.shows(env) for _ in range(3)] == [True, False, False]
    assert failure_record.shown(env) == failure_record.process()


@pytest.mark.parametrize("env", [{}, {EVIDENCE: ""}, {EVIDENCE: "/nowhere"}])
def test_each_rank_shows_its_traceback_without_a_writable_folder(env):
    assert all(failure_record.shows(env) for _ in range(2))


def test_one_rank_shows_its_traceback_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    env = {EVIDENCE: str(tmp_path)}
    assert [failure_record.shows(env) for _ in range(2)] == [True, False]


def test_each_text_is_shown_by_one_rank(tmp_path):
    env = {EVIDENCE: str(tmp_path)}
    texts = ("one", "two", "one", "two\udcff", "two")
    assert [failure_record.shows(env, text) for text in texts] == [True, True, False, True, False]
    assert failure_record.shown(env) == ""


def test_ranks_of_a_host_share_one_file_and_the_first_failure_of_each_counts(tmp_path):
    env = {EVIDENCE: str(tmp_path), HOSTNAME: "node1"}
    for rank in range(3):
        failure_record.note_session(rank, env)
        failure_record.note_session(rank + 3, {**env, HOSTNAME: "node2"})
    for error in (ValueError("a"), RankLostError("b")):
        failure_record.note_failure(2, error, env)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks-node1", "ranks-node2"]
    found = failure_record.failures(tmp_path)
    assert {rank: one.description for rank, one in found.items()} == {2: "ValueError: a"}
    hosts = dict.fromkeys(range(3), "node1") | dict.fromkeys(range(3, 6), "node2")
    assert failure_record.sessions(tmp_path) == hosts


def test_line_that_a_killed_rank_has_begun_hides_no_other_rank(tmp_path):
    env = {EVIDENCE: str(tmp_path), HOSTNAME: "node1"}
    failure_record.note_session(0, env)
    with open(tmp_path / "ranks-node1", "a") as file:
        file.write('{"rank": 1, "fail')
    failure_record.note_session(2, env)
    assert failure_record.sessions(tmp_path) == {0: "node1", 2: "node1"}


@pytest.mark.parametrize("env", [{}, {EVIDENCE: ""}, {EVIDENCE: "/nowhere"}])
def test_rank_without_a_writable_folder_records_nothing(env):
    failure_record.note_session(0, env)
    failure_record.note_failure(0, ValueError("a"), env)
    failure_record.note_fresh(env)
