"""Watchdog over NCCL: a rank that hangs is named, and torch writes the collectives."""

import re
from pathlib import Path

import pytest
from test_hangs import IN_SCRIPT, IN_STOP, run_until_hang, stop_process


@pytest.mark.parametrize(
    ("how", "victim", "words", "stack"),
    [
        pytest.param("backward", 1, "in the backward pass", IN_SCRIPT[1], id="backward"),
        pytest.param("before", 2, *IN_SCRIPT, id="in the script"),
        pytest.param(stop_process, 1, *IN_STOP, id="stopped"),
    ],
)
def test_rank_that_hangs_over_nccl_is_named(nccl, how, victim, words, stack):
    """Let one rank hang; name it, show its stack and the collectives, and end all ranks."""
    reason, logs = run_until_hang(nccl, how, victim, (3,))
    assert reason.startswith(f"rank {victim} on node1: silent for ")
    assert words in reason
    assert f"{stack}\n" in logs["node1"]
    dumps = re.search(r"collectives of NCCL, for torchfrtrace: (.+)", logs["node1"])
    assert dumps, logs["node1"]
    files = [Path(name) for name in dumps[1].split()]
    # A stopped process cannot write.
    assert len(files) >= (2 if how is stop_process else 3)
    assert all(path.stat().st_size for path in files)
