"""`hpctrain doctor` over several ranks: who is unlike the others, and is a sum right?"""

import contextlib
import io
import json
import os
import time
from functools import partial

import launches
import pytest
import ranks

from hpctrain.tools import doctor
from hpctrain.tools.doctor import exchange, software

RUN = [launches.PYTHON, "-m", "hpctrain", "run"]
DOCTOR = ["-m", "hpctrain", "doctor"]


def examines(own=None, fault=None, run=None, as_json=True, seconds=120.0):
    """Run the doctor on a rank, as if without Horovod: its exit code, and what it printed.

    Args:
        own: by rank, variables that it has besides.
        fault: a function that a rank calls before, with its number.
        run, as_json, seconds: the doctor's.
    """
    rank = int(os.environ["HPCTRAIN_RANK"])
    # An interpreter on each host would import torch and Horovod for it.
    software.horovod = partial(software.judge_horovod, False, None)
    os.environ.update((own or {}).get(rank, {}))
    if fault:
        fault(rank)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = doctor.examine(run, seconds, as_json)
    return code, out.getvalue()


def told(results):
    """Return what rank 0 returned and printed, and check that the others printed nothing."""
    (code, said), *others = ranks.values(results)
    assert others == [(0, "")] * len(others)
    return code, said


def subjects(said, *levels):
    return {one["subject"]: one for one in said["findings"] if one["level"] in levels}


def test_doctor_of_three_ranks_in_json(tmp_path):
    code, line = told(ranks.run(3, examines))
    said = json.loads(line)
    assert code == int(bool(subjects(said, "problem")))
    assert [row["rank"] for row in said["ranks"]] == [0, 1, 2]
    assert [row["local_rank"] for row in said["ranks"]] == [0, 1, 2]
    assert len({row["pid"] for row in said["ranks"]}) == 3
    assert all(abs(row["clock_offset"]) < 1 for row in said["ranks"])
    sums = said["all_reduce"]
    assert (sums["transport"], sums["correct"], sums["wrong_at_ranks"]) == ("gloo", True, [])
    assert [one["bytes"] for one in sums["bus_bandwidth"]] == [10**6, 16 * 10**6]
    assert all(one["gigabytes_per_second"] > 0 for one in sums["bus_bandwidth"])
    assert sums["copy_gigabytes_per_second"] > 0
    assert said["pairs"] == []  # one host
    assert subjects(said, "ok")["shared directory"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.e2e
def test_doctor_under_hpctrain_run_in_text(tmp_path):
    done = launches.start([*RUN, "--nodes", "3", "--nproc-per-node", "1", *DOCTOR], tmp_path)
    lines = done.stdout.splitlines()
    assert all(line.startswith("0: ") for line in lines)
    said = done.stdout
    assert "3 ranks on 3 hosts" in said
    for host in ("node1", "node2", "node3"):
        assert host in said
    assert "all ranks on 3 hosts see the same" in said
    assert "exact at all ranks, over gloo" in said
    assert "6 ways: " in said
    assert list(tmp_path.iterdir()) == []


def test_doctor_measures_all_pairs_of_hosts():
    code, said = told(ranks.run(4, examines, layout=(2, 1, 1)))
    pairs = {(one["source"], one["target"]) for one in json.loads(said)["pairs"]}
    hosts = [f"node{n}" for n in range(1, 4)]
    assert pairs == {(a, b) for a in hosts for b in hosts if a != b}
    assert all(one["gigabytes_per_second"] > 0 for one in json.loads(said)["pairs"])
    assert code == int(bool(subjects(json.loads(said), "problem")))


def test_doctor_marks_a_rank_with_other_variables_and_shows_no_secret():
    own = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "", "NCCL_DEBUG": "WARN"}
    own |= {"NCCL_NET_TOKEN": "own-7f7f", "WANDB_API_KEY": "key-3b3b"}
    said, text = (
        told(ranks.run(3, examines, {1: own}, None, None, as_json, layout=(1, 1, 1)))[1]
        for as_json in (True, False)
    )
    for shown in (said, text):
        assert "NCCL_DEBUG" in shown
        assert "own-7f7f" not in shown
        assert "key-3b3b" not in shown
    rows = json.loads(said)["ranks"]
    assert [row["differs"] for row in rows] == [[], ["visible", "threads"], []]
    warned = subjects(json.loads(said), "warning")
    assert warned["threads"]["ranks"] == [1]
    assert warned["threads"]["found"] == "1 on ranks 0, 2; 3 on rank 1 of node2"
    assert json.loads(said)["all_reduce"]["correct"] is True
    assert "hidden *  3 *" in text


def loses_torch(rank):
    if rank == 2:
        broken = software.torch({}, "OSError: libcublas.so.13")
        software.import_torch = lambda: (None, broken)


def test_doctor_names_a_rank_with_broken_torch():
    code, said = told(ranks.run(3, examines, None, loses_torch, layout=(1, 2)))
    assert code == 1
    problems = subjects(json.loads(said), "problem")
    assert problems["torch"]["ranks"] == [2]
    assert "libcublas.so.13" in problems["torch"]["found"]
    assert json.loads(said)["all_reduce"] is None
    assert "not tried" in subjects(json.loads(said), "warning")["all-reduce"]["found"]
    assert [row["torch"] == "none" for row in json.loads(said)["ranks"]] == [False, False, True]


def miscounts(rank):
    """Give the sums of rank 1 another last element."""
    checked = exchange.checked
    exchange.checked = lambda backend, count: checked(backend, count) and rank != 1


def test_doctor_names_a_rank_with_a_wrong_all_reduce():
    code, said = told(ranks.run(3, examines, None, miscounts))
    assert code == 1
    problem = subjects(json.loads(said), "problem")["all-reduce"]
    assert problem["ranks"] == [1]
    assert "wrong sum over gloo at rank 1" in problem["found"]
    assert json.loads(said)["all_reduce"]["wrong_at_ranks"] == [1]


def is_late(rank):
    """Put the clock of rank 2 back."""
    now = time.time
    if rank == 2:
        time.time = lambda: now() - 90


def test_doctor_names_a_host_whose_clock_is_behind():
    _, said = told(ranks.run(3, examines, None, is_late, layout=(1, 1, 1)))
    warned = subjects(json.loads(said), "warning")["clocks"]
    assert warned["ranks"] == [2]
    assert warned["found"].startswith("node3 is ")
    assert warned["found"].endswith(" s behind node1")
    assert json.loads(said)["ranks"][2]["clock_offset"] == pytest.approx(-90, abs=1)


def is_elsewhere(rank):
    """Move rank 2 into another folder."""
    os.makedirs(f"folder-of-{rank // 2}", exist_ok=True)
    os.chdir(f"folder-of-{rank // 2}")


def test_doctor_names_a_rank_whose_run_directory_is_not_shared(tmp_path):
    code, said = told(ranks.run(3, examines, None, is_elsewhere, layout=(1, 1, 1)))
    assert code == 1
    problem = subjects(json.loads(said), "problem")["shared directory"]
    assert problem["ranks"] == [2]
    assert "folder-of-1" in problem["found"]
    assert not [name for _, _, files in os.walk(tmp_path) for name in files]


def falls_silent(rank):
    """End rank 1 before the first sum."""
    if rank == 1:
        exchange.run_sums = lambda backend: os._exit(0)


def test_doctor_reports_a_rank_lost_in_the_all_reduce():
    results = ranks.run(3, examines, None, falls_silent)
    code, said = results[0]
    assert code == 1
    assert "cannot compute a sum" in subjects(json.loads(said), "problem")["all-reduce"]["found"]
    assert len(json.loads(said)["ranks"]) == 3
    assert results[2] == (0, "")


@pytest.mark.slow
def test_doctor_names_a_rank_missing_at_the_rendezvous():
    results = ranks.run(3, examines, None, None, None, True, 20.0, absent=[1])
    code, said = results[0]
    assert code == 1
    assert results[2] == (1, "")  # rank 0 says it for all
    assert subjects(json.loads(said), "ok")["python"]
    start = subjects(json.loads(said), "problem")["start"]
    assert "rank 1 of 3 did not come within 20 s" in start["found"]
