"""Errors of several ranks: each text is printed once, and all ranks end with their exit code."""

import os
import signal
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.rendezvous import shared_errors

meet = shared_errors.meet
def announced(*arguments, **more):
    print("meets", flush=True)
    return meet(*arguments, **more)
shared_errors.meet = announced
shared_errors._SECONDS = float(os.environ["SECONDS"])
shared_errors.report_uncaught()
kind, text = sys.argv[1:]
kinds = {"usage": UsageError, "checkpoint": CheckpointError}
raise kinds[kind].of_text("HT001", text, "another", "such")
"""
MESSAGE = "hpctrain: error: {}\n  expected: another\n  fix:      such\n"
MESSAGE += "  more:     hpctrain explain HT001\n"


@pytest.fixture
def rank():
    """Return a function that starts a rank of a start by hand, which fails with a text."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []

    def start(number, text, kind="usage", size=3, **env):
        variables = {
            "RANK": str(number),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SECONDS": "60",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind, text],
            env={**os.environ, **variables, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def ended(processes):
    """Return standard error and exit code of each process."""
    return [(process.communicate(timeout=60)[1], process.returncode) for process in processes]


@pytest.mark.parametrize(
    ("texts", "printing"),
    [
        (("same", "same", "same"), [0]),
        (("same", "same", "other"), [0, 2]),
        (("other", "same", "same"), [0, 1]),
        (("same", "other", "same"), [0, 1]),
        (("one", "two", "three"), [0, 1, 2]),
    ],
)
def test_each_text_is_printed_once_by_its_lowest_rank(rank, texts, printing):
    ends = ended([rank(number, text) for number, text in enumerate(texts)])
    assert ends == [
        (MESSAGE.format(text) if number in printing else "", 2) for number, text in enumerate(texts)
    ]


def test_error_of_one_rank_alone_is_printed(rank):
    (end,) = ended([rank(1, "alone", SECONDS="0.5")])
    assert end == (MESSAGE.format("alone"), 2)


def test_rank_0_prints_before_it_waits_for_the_others(rank):
    process = rank(0, "alone")
    assert process.stderr.readline() == "hpctrain: error: alone\n"
    assert process.poll() is None


@pytest.mark.parametrize("number", [0, 1])
def test_rank_that_is_ended_while_it_waits_has_printed_its_error(rank, number):
    """srun --kill-on-bad-exit ends the other ranks by SIGTERM; their exit code stays 2."""
    process = rank(number, "ended")
    assert process.stdout.readline() == "meets\n"
    process.send_signal(signal.SIGTERM)
    assert ended([process]) == [(MESSAGE.format("ended"), 2)]


def test_other_errors_than_wrong_use_are_printed_by_each_rank_at_once(rank):
    ends = ended([rank(number, "same", "checkpoint") for number in range(3)])
    assert ends == [(MESSAGE.format("same"), 1)] * 3


@pytest.mark.parametrize("kind", ["usage", "checkpoint"])
def test_ranks_of_hpctrain_run_do_not_wait_for_each_other(rank, tmp_path, kind):
    texts = ("same", "other", "same")
    ends = ended(
        [
            rank(number, text, kind, HPCTRAIN_EVIDENCE=str(tmp_path))
            for number, text in enumerate(texts)
        ]
    )
    assert sorted(err for err, _ in ends) == ["", *map(MESSAGE.format, ("other", "same"))]
    assert {code for _, code in ends} == {2 if kind == "usage" else 1}


@pytest.mark.parametrize("env", [{"WORLD_SIZE": ""}, {"RANK": "7"}, {"MASTER_PORT": ""}])
def test_error_in_an_environment_that_is_no_rank_is_printed(rank, env):
    assert ended([rank(0, "no rank", **env)]) == [(MESSAGE.format("no rank"), 2)]
