"""`hpctrain bench` over several ranks: consistent records, and all ranks end together."""

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
from hpctrain.tools.bench import allreduce, step


def run_bench(*words, fault=None):
    """Run the command on a rank; return its exit code and output.

    Args:
        words: of the command.
        fault: a function that a rank calls first, with its number.
    """
    for module in (step, allreduce):
        module._BLOCK_SECONDS = 0.01
    if fault:
        fault(int(os.environ["HPCTRAIN_RANK"]))
    backend = ["--backend", os.environ.get("TEST_BACKEND", "auto")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["bench", *words, *backend])
    return code, out.getvalue()


def output_of_rank_0(results):
    """Return the output of rank 0; check that the others printed nothing."""
    (code, output), *others = ranks.values(results)
    assert [code, *others] == [0, *[(0, "")] * len(others)]
    return output


@HOROVOD_SLOW
def test_bench_allreduce_of_three_ranks(run, tmp_path):
    words = ("allreduce", "--sizes", "4B,64kB", "--seconds", "0.2", "--json", "found.json")
    output = output_of_rank_0(run(3, run_bench, *words))
    (saved,) = tmp_path.iterdir()
    found = json.loads(saved.read_text())
    assert found["world"]["world_size"] == 3
    assert found["transport"] == "gloo"
    assert list(found["results"]) == ["4 B", "64 kB"]
    for size, arms in zip((4, 64_000), found["results"].values(), strict=True):
        for arm in arms.values():
            algbw = size / arm["us"]["median"] / 1e3
            assert arm["algbw"] == pytest.approx(algbw)
            assert arm["busbw"] == pytest.approx(algbw * 4 / 3)
        raw, own = arms["raw call"], arms["hpctrain"]
        assert raw["ratio"]["median"] == 1.0
        assert own["ratio"]["low"] <= own["ratio"]["median"] <= own["ratio"]["high"]
        assert own["us"]["count"] == raw["us"]["count"] >= 3
    assert "64 kB" in output


@HOROVOD_SLOW
def test_bench_step_of_three_ranks(run, tmp_path):
    words = ("step", "--batch-size", "2", "--seconds", "0.2", "--json", "found.json")
    output = output_of_rank_0(run(3, run_bench, *words, layout=(2, 1)))
    (saved,) = tmp_path.iterdir()
    found = json.loads(saved.read_text())
    assert found["world"]["num_nodes"] == 2
    assert list(found["results"]) == ["baseline", "hpctrain", "baseline, no communication"]
    for arm in found["results"].values():
        assert arm["images_per_s"] == pytest.approx(3 * 2 / arm["ms"]["median"] * 1e3)
        assert arm["images_per_s"] == pytest.approx(3 * arm["images_per_s_of_a_rank"])
    assert found["scaling"]["count"] == found["results"]["hpctrain"]["ms"]["count"]
    assert "Scaling" in output


def run_with_errors(*words, fault=None):
    """Run the command on a rank; return its exit code and its error lines."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code, _ = run_bench(*words, fault=fault)
    return code, [line for line in errors.getvalue().splitlines() if "error: " in line]


def measure_allreduce(fault):
    return run_with_errors("allreduce", "--sizes", "4", "--seconds", "30", fault=fault)


def call_during_measurement(fault, rank):
    """Call a function on rank 1 during its measurement."""
    timed, calls = allreduce.timed, []

    def time_with_fault(*arguments):
        calls.append(arguments)
        if rank == 1 and len(calls) == 3:
            fault()
        return timed(*arguments)

    allreduce.timed = time_with_fault


def send_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def exit_at_once():
    os._exit(9)


@HOROVOD_SLOW
def test_bench_cancelled_ranks_exit_with_75(run, tmp_path):
    results = run(3, measure_allreduce, partial(call_during_measurement, send_sigterm))
    assert results == [("exit", 75)] * 3
    assert not list(tmp_path.iterdir())


@HOROVOD_SLOW
def test_bench_ends_when_a_rank_is_lost(run):
    first, lost, last = run(3, measure_allreduce, partial(call_during_measurement, exit_at_once))
    assert isinstance(lost, RuntimeError)  # from the test: the rank sent no result
    for code, lines in (first, last):
        assert code == 1
        assert len(lines) == 1
