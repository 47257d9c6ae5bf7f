"""`hpctrain bench` over several ranks: what it finds agrees with itself, and all leave together."""

import contextlib
import io
import json
import os
import signal
from functools import partial

import pytest
import ranks
from battery import HOROVOD_SLOW

from hpctrain.cli import main
from hpctrain.tools.bench import allreduce, input, step


def benches(*words, fault=None):
    """Run the command on a rank: its exit code, and what it printed.

    Args:
        words: of the command.
        fault: a function that a rank calls before, with its number.
    """
    for module in (step, allreduce, input):
        module._BLOCK_SECONDS = 0.01
    if fault:
        fault(int(os.environ["HPCTRAIN_RANK"]))
    backend = ["--backend", os.environ.get("TEST_BACKEND", "auto")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["bench", *words, *(backend if words[0] in ("step", "allreduce") else [])])
    return code, out.getvalue()


def told(results):
    """Return what rank 0 printed, and check that the others printed nothing."""
    (code, said), *others = ranks.values(results)
    assert [code, *others] == [0, *[(0, "")] * len(others)]
    return said


@HOROVOD_SLOW
def test_bench_allreduce_of_three_ranks(run, tmp_path):
    words = ("allreduce", "--sizes", "4B,64kB", "--seconds", "0.2", "--json", "found.json")
    said = told(run(3, benches, *words))
    (saved,) = tmp_path.iterdir()
    found = json.loads(saved.read_text())
    assert found["world"]["world_size"] == 3
    assert found["transport"] == "gloo"
    assert [one["bytes"] for one in found["results"]] == [4, 64_000]
    for one in found["results"]:
        raw, ours, copy = (one["arms"][name] for name in ("raw call", "hpctrain", "copy"))
        for arm in (raw, ours):
            algbw = one["bytes"] / arm["us"]["median"] / 1e3
            assert arm["algbw"] == pytest.approx(algbw)
            assert arm["busbw"] == pytest.approx(algbw * 4 / 3)
        assert raw["ratio"]["median"] == 1.0
        assert ours["ratio"]["low"] <= ours["ratio"]["median"] <= ours["ratio"]["high"]
        assert ours["us"]["count"] == copy["us"]["count"] >= 3
    assert "64 kB" in said


@HOROVOD_SLOW
def test_bench_step_of_three_ranks(run, tmp_path):
    words = ("step", "--batch-size", "2", "--seconds", "0.2", "--json", "found.json")
    said = told(run(3, benches, *words, layout=(2, 1)))
    (saved,) = tmp_path.iterdir()
    found = json.loads(saved.read_text())
    assert found["world"]["num_nodes"] == 2
    assert list(found["arms"]) == ["by hand", "hpctrain", "by hand, nothing exchanged"]
    for arm in found["arms"].values():
        assert arm["images_per_second"] == pytest.approx(3 * 2 / arm["ms"]["median"] * 1e3)
        assert arm["images_per_second"] == pytest.approx(3 * arm["images_per_second_of_a_rank"])
    assert found["scaling"]["count"] == found["arms"]["hpctrain"]["ms"]["count"]
    assert "Scaling" in said


def test_bench_checkpoint_written_by_rank_0_alone(tmp_path):
    words = ("checkpoint", "--size", "1MB", "--seconds", "0.1", "--run-dir", "shared")
    said = told(ranks.run(3, benches, *words))
    assert f"1 MB, half weights and half momenta, in {tmp_path}/shared" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bench_input_of_three_ranks(tmp_path):
    words = ("input", "--workers", "0", "--batch-size", "2", "--seconds", "0.1")
    said = told(ranks.run(3, benches, *words))
    assert "2 of a rank in a batch" in said
    assert not list(tmp_path.iterdir())


def fails(*words, fault=None):
    """The exit code, and the lines of errors that a rank shows."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        code, _ = benches(*words, fault=fault)
    return code, [line for line in shown.getvalue().splitlines() if "error: " in line]


def test_bench_checkpoint_refuses_more_than_the_free_space_with_one_error(tmp_path):
    first, *others = ranks.values(ranks.run(3, fails, "checkpoint", "--size", "900TB"))
    assert others == [(2, [])] * 2
    code, (line,) = first
    assert code == 2
    assert line.startswith("hpctrain: error: ")
    assert "are free on the file system of" in line
    assert not list(tmp_path.iterdir())


def measures(fault):
    return fails("allreduce", "--sizes", "4", "--seconds", "30", fault=fault)


def in_the_middle(what, rank):
    """Let something happen to rank 1 while it measures."""
    timed, calls = allreduce.timed, []

    def hurt(*arguments):
        calls.append(arguments)
        if rank == 1 and len(calls) == 3:
            what()
        return timed(*arguments)

    allreduce.timed = hurt


def is_cancelled():
    os.kill(os.getpid(), signal.SIGTERM)


def is_lost():
    os._exit(9)


@HOROVOD_SLOW
def test_bench_cancelled_ranks_exit_with_75(run, tmp_path):
    results = run(3, measures, partial(in_the_middle, is_cancelled))
    assert results == [("exit", 75)] * 3
    assert not list(tmp_path.iterdir())


@HOROVOD_SLOW
def test_bench_ends_when_a_rank_is_lost(run):
    first, gone, last = run(3, measures, partial(in_the_middle, is_lost))
    assert isinstance(gone, RuntimeError)  # of the test: no result came
    for code, lines in (first, last):
        assert code == 1
        assert len(lines) == 1
