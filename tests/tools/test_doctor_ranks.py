"""`hpctrain doctor` over several ranks: ranks that differ, wrong sums, lost ranks."""

import contextlib
import io
import json
import os
import re
import time

import launches
import pytest
import ranks

from hpctrain.tools import doctor
from hpctrain.tools.doctor import machine
from hpctrain.tools.doctor import ranks as of_ranks
from hpctrain.tools.doctor.report import finding

RUN = [launches.PYTHON, "-m", "hpctrain", "run"]
DOCTOR = ["-m", "hpctrain", "doctor"]


def examines(own=None, fault=None, run=None, as_json=True, seconds=120.0):
    """Run the doctor on a rank without Horovod; return its exit code and output.

    Args:
        own: additional variables by rank.
        fault: a function that a rank calls first, with its number.
        run, as_json, seconds: options of the doctor.
    """
    rank = int(os.environ["HPCTRAIN_RANK"])
    # The real check imports torch and Horovod in another interpreter.
    machine.check_horovod = lambda: "not installed"
    os.environ.update((own or {}).get(rank, {}))
    if fault:
        fault(rank)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = doctor.examine(run, seconds, as_json)
    return code, out.getvalue()


def output_of_rank_0(results):
    """Return the exit code and output of rank 0; check that the others printed nothing."""
    (code, output), *others = ranks.values(results)
    assert others == [(0, "")] * len(others)
    return code, output


def subjects(output, *levels):
    return {one["subject"]: one for one in output["findings"] if one["level"] in levels}


def test_doctor_of_three_ranks_in_json(tmp_path):
    code, line = output_of_rank_0(ranks.run(3, examines, layout=(2, 1)))
    output = json.loads(line)
    assert code == int(bool(subjects(output, "problem")))
    rows = output["ranks"]
    assert [row["rank"] for row in rows] == [0, 1, 2]
    assert [row["host"] for row in rows] == ["node1", "node1", "node2"]
    assert [row["local_rank"] for row in rows] == [0, 1, 0]
    assert [row["device"] for row in rows] == ["cpu"] * 3
    assert output["all_reduce"] == {"transport": "gloo", "correct": True, "wrong_at_ranks": []}
    assert not {"all-reduce", "shared directory"} & {one["subject"] for one in output["findings"]}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.e2e
def test_doctor_under_hpctrain_run_in_text(tmp_path):
    done = launches.start([*RUN, "--nodes", "3", "--nproc-per-node", "1", *DOCTOR], tmp_path)
    lines = done.stdout.splitlines()
    assert all(line.startswith("0: ") for line in lines)
    output = done.stdout
    assert "3 (hosts: 3)" in output
    for rank in range(3):
        assert f"node{rank + 1}           rank {rank}: cpu" in output
    assert "exact sums at all ranks over gloo" in output
    assert list(tmp_path.iterdir()) == []


def test_doctor_shows_a_rank_with_other_variables_and_no_secret():
    many = str(len(os.sched_getaffinity(0)) + 1)
    own = {"OMP_NUM_THREADS": many, "NCCL_DEBUG": "WARN"}
    own |= {"NCCL_NET_TOKEN": "own-7f7f", "WANDB_API_KEY": "key-3b3b"}
    output, text = (
        output_of_rank_0(ranks.run(3, examines, {1: own}, None, None, as_json, layout=(1, 1, 1)))[1]
        for as_json in (True, False)
    )
    for text_shown in (output, text):
        assert "NCCL_DEBUG" in text_shown
        assert "own-7f7f" not in text_shown
        assert "key-3b3b" not in text_shown
    warned = subjects(json.loads(output), "warning")
    assert "at rank 1 on node2" in warned["network"]["found"]
    assert warned["cores"]["ranks"] == [1]
    assert json.loads(output)["all_reduce"]["correct"] is True
    line = rf"cores \(rank 1 on node2\): \d+ of \d+ may be used, OMP_NUM_THREADS={many}"
    assert re.search(line, text)


def loses_torch(rank):
    if rank == 2:
        broken = finding("torch.broken", python="python3", error="libcublas.so.13")
        machine.import_torch = lambda: (None, broken)


def test_doctor_names_a_rank_with_broken_torch():
    code, output = output_of_rank_0(ranks.run(3, examines, None, loses_torch, layout=(1, 2)))
    assert code == 1
    problems = subjects(json.loads(output), "problem")
    assert problems["torch"]["ranks"] == [2]
    assert "libcublas.so.13" in problems["torch"]["found"]
    assert json.loads(output)["all_reduce"] is None
    assert "not tried" in subjects(json.loads(output), "warning")["all-reduce"]["found"]
    assert [row["device"] for row in json.loads(output)["ranks"]] == ["cpu", "cpu", "none"]


def another_torch(rank):
    """Give rank 1 another version of torch."""
    import torch

    if rank == 1:
        torch.__version__ = "99.0.0"


def test_doctor_reports_what_the_consistency_check_refuses():
    code, output = output_of_rank_0(ranks.run(2, examines, None, another_torch, layout=(1, 1)))
    assert code == 1
    problem = subjects(json.loads(output), "problem")["torch"]
    assert "99.0.0 at rank 1 on node2" in problem["found"]
    assert (problem["expected"], problem["code"]) == ("one version of torch", "HT208")
    assert json.loads(output)["all_reduce"] is None


def miscounts(rank):
    """Make the sums of rank 1 wrong."""
    checked = of_ranks.checked
    of_ranks.checked = lambda backend, count: checked(backend, count) and rank != 1


def test_doctor_names_a_rank_with_a_wrong_all_reduce():
    code, output = output_of_rank_0(ranks.run(3, examines, None, miscounts))
    assert code == 1
    problem = subjects(json.loads(output), "problem")["all-reduce"]
    assert problem["ranks"] == [1]
    assert "wrong sum over gloo" in problem["found"]
    assert json.loads(output)["all_reduce"]["wrong_at_ranks"] == [1]


def set_clock_back(rank):
    """Put the clock of rank 2 back."""
    now = time.time
    if rank == 2:
        time.time = lambda: now() - 90


def test_doctor_names_a_rank_whose_clock_is_behind():
    _, output = output_of_rank_0(ranks.run(3, examines, None, set_clock_back, layout=(1, 1, 1)))
    warned = subjects(json.loads(output), "warning")["clocks"]
    assert warned["ranks"] == [2]
    assert warned["found"].startswith("up to -")


def change_folder(rank):
    """Move rank 2 into another folder."""
    os.makedirs(f"folder-of-{rank // 2}", exist_ok=True)
    os.chdir(f"folder-of-{rank // 2}")


def test_doctor_names_a_rank_whose_run_directory_is_not_shared(tmp_path):
    code, output = output_of_rank_0(ranks.run(3, examines, None, change_folder, layout=(1, 1, 1)))
    assert code == 1
    problem = subjects(json.loads(output), "problem")["shared directory"]
    assert problem["ranks"] == [2]
    assert "folder-of-1" in problem["found"]
    assert not [name for _, _, files in os.walk(tmp_path) for name in files]


def exit_before_sums(rank):
    """End rank 1 before the first sum."""
    if rank == 1:
        of_ranks.checked = lambda backend, count: os._exit(0)


def test_doctor_reports_a_rank_lost_in_the_all_reduce():
    results = ranks.run(3, examines, None, exit_before_sums)
    code, output = results[0]
    assert code == 1
    assert "cannot compute a sum" in subjects(json.loads(output), "problem")["all-reduce"]["found"]
    assert len(json.loads(output)["ranks"]) == 3
    assert results[2] == (0, "")


@pytest.mark.slow
def test_doctor_names_a_rank_missing_at_the_rendezvous():
    results = ranks.run(3, examines, None, None, None, True, 20.0, absent=[1])
    code, output = results[0]
    assert code == 1
    assert results[2] == (1, "")  # rank 0 prints the error for all
    assert json.loads(output)["machine"]["python"]
    start = subjects(json.loads(output), "problem")["start"]
    assert "rank 1 of 3 did not connect within 20 s" in start["found"]
    assert start["code"].startswith("HT")
