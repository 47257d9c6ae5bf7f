"""Ledger of the faults of hosts."""

import subprocess
import time
from pathlib import Path

import pytest

from hpctrain.rundir import host_ledger
from hpctrain.rundir.host_ledger import LEDGER, LOST, PREFLIGHT, avoided, note

HERE = Path()


def test_host_with_two_faults_in_a_day_is_avoided():
    note(HERE, ["maple", "oak"], LOST, "5")
    assert avoided(HERE) == []
    note(HERE, ["maple"], LOST, "6")
    assert avoided(HERE) == ["maple"]


def test_one_fault_is_enough_in_the_same_job_and_before_a_start():
    note(HERE, ["maple"], LOST, "5")
    note(HERE, ["oak"], PREFLIGHT, "4")
    assert avoided(HERE) == ["oak"]
    assert avoided(HERE, "5") == ["oak", "maple"]  # the newest first


def test_faults_are_forgotten_after_a_day(monkeypatch):
    note(HERE, ["maple", "maple"], LOST, "5")
    tomorrow = time.time() + 24 * 3600 + 1
    monkeypatch.setattr(host_ledger.time, "time", lambda: tomorrow)
    assert avoided(HERE, "5") == []


def test_command_that_clears_hosts():
    note(HERE, ["maple", "oak", "maple2"] * 2, LOST, "5")
    subprocess.run(host_ledger.clearing(["maple", "oak"]), shell=True, check=True)
    assert avoided(HERE) == ["maple2"]


@pytest.mark.parametrize(
    "text", [b"", b"\xff\n[]\n{}\n", b'{"time": "x", "host": 1}\n', b"[" * 100_000, b'{"time"']
)
def test_damaged_ledger(text):
    LEDGER.parent.mkdir()
    LEDGER.write_bytes(text + b"\n")
    assert avoided(HERE) == []
    note(HERE, ["maple", "maple"], LOST, "5")
    assert avoided(HERE) == ["maple"]


def test_ledger_that_cannot_be_written_or_read():
    LEDGER.mkdir(parents=True)
    note(HERE, ["maple"], LOST, "5")
    assert avoided(HERE, "5") == []
