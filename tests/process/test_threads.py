"""OMP threads: ranks that share cores divide them, a set OMP_NUM_THREADS stays, rank 0 logs it.

The ranks share one machine; with `layout`, they act as if on several hosts, which share no cores. A
stand-in for the affinity gives them more cores than the machine has. If two are enough, the
affinity is real.
"""

import functools
import logging
import os

import pytest
import ranks
import torch

import hpctrain

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def two_cores(lacking):
    if len(CORES) < 2:
        lacking("two-cores", "the ranks are bound to a core each")


class KeepLines(logging.Handler):
    """A log handler that keeps the lines about cores."""

    def __init__(self, level):
        super().__init__(level)
        self.lines = []

    def emit(self, record):
        if "cores" in record.getMessage():
            self.lines.append((record.levelname, record.getMessage()))


def count_threads(affinity=None, threads=8, workers=0, decided=None):
    """Return a rank's threads before, inside and after a session, and its log lines about cores.

    Args:
        affinity: by rank, the cores (default: the eight of a stand-in).
        threads: of torch at first.
        workers: of the loader.
        decided: by rank, OMP_NUM_THREADS, which torch uses at first.
    """
    rank = hpctrain.detect().rank
    own = decided[rank] if decided else ""
    os.environ["OMP_NUM_THREADS"] = own
    torch.set_num_threads(int(own or threads))
    if affinity:
        bound = set(affinity[rank])
        if bound <= set(CORES):
            os.sched_setaffinity(0, bound)
    else:
        bound = set(range(8))
    if bound != os.sched_getaffinity(0):
        os.sched_getaffinity = lambda pid: bound
    keep = KeepLines(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("hpctrain").addHandler(keep)
    before = torch.get_num_threads()
    with hpctrain.Session(batch_size=1, start_timeout=30, workers=workers):
        inside = torch.get_num_threads()
    return (before, inside, torch.get_num_threads()), keep.lines


def threads_inside(results):
    """Return the threads inside of the session, by rank; check that they are restored after it."""
    counts = [counts for counts, _ in ranks.values(results)]
    assert all(before == after for before, _, after in counts)
    return [inside for _, inside, _ in counts]


def log_of_rank_0(results):
    """Return the lines of rank 0; check that the other ranks log none."""
    lines = [lines for _, lines in ranks.values(results)]
    assert not any(lines[1:])
    return lines[0]


SHARE = "OMP_NUM_THREADS is not set: {} ranks share cores and have at most {} each"


@pytest.mark.parametrize(
    ("options", "layout", "expected", "line"),
    [
        pytest.param({}, (3,), [2, 2, 2], SHARE.format("3 of 3", "2 threads"), id="same-cores"),
        pytest.param(
            {"affinity": [range(8), range(8), range(4)]},
            (3,),
            [2, 2, 1],
            SHARE.format("3 of 3", "1 to 2 threads"),
            id="overlapping-cores",
        ),
        pytest.param(
            {}, (2, 1), [4, 4, 8], SHARE.format("2 of 3", "4 threads"), id="last-host-alone"
        ),
        pytest.param(
            {}, (1, 2), [8, 4, 4], SHARE.format("2 of 3", "4 threads"), id="first-host-alone"
        ),
        # Torch starts one thread for each core; the affinity also counts hyper-threads.
        pytest.param(
            {"threads": 3}, (2,), [3, 3], SHARE.format("2 of 2", "4 threads"), id="never-more"
        ),
        pytest.param({"decided": "222"}, (3,), [2, 2, 2], None, id="omp-num-threads"),
        pytest.param({"decided": "121"}, (3,), [1, 2, 1], None, id="omp-num-threads-differ"),
        pytest.param(
            {"decided": ("1", "", "")},
            (3,),
            [1, 2, 2],
            SHARE.format("2 of 3", "2 threads"),
            id="omp-num-threads-of-one-rank",
        ),
        pytest.param({}, (1,), [8], None, id="one-rank"),
    ],
)
def test_threads_of_ranks_that_share_cores_are_divided(options, layout, expected, line):
    results = ranks.run(sum(layout), functools.partial(count_threads, **options), layout=layout)
    assert threads_inside(results) == expected
    assert log_of_rank_0(results) == ([("INFO", line)] if line else [])


@pytest.mark.usefixtures("two_cores")
def test_threads_of_ranks_bound_to_their_own_cores_are_kept():
    first, second = CORES[:2]
    results = ranks.run(2, count_threads, [{first}, {second}], 1)
    assert threads_inside(results) == [1, 1]
    assert log_of_rank_0(results) == []


@pytest.mark.usefixtures("two_cores")
def test_threads_on_a_shared_core_are_at_least_one():
    first, second = CORES[:2]
    results = ranks.run(3, count_threads, [{first, second}, {first, second}, {first}], 2)
    assert threads_inside(results) == [1, 1, 2]  # the number of torch, where nothing is divided
    ((level, line),) = log_of_rank_0(results)
    assert level == "INFO"
    assert "2 of 3 ranks share cores and have at most 1 thread each" in line


def test_more_threads_than_cores_are_a_warning_with_ranks():
    results = ranks.run(3, count_threads, None, 8, 0, ("1", "6", "6"))
    ((level, line),) = log_of_rank_0(results)
    assert level == "WARNING"
    assert "too few cores for 2 ranks, the first rank 1 on node1: each has 2, for 6 threads" in line
    assert "srun --cpus-per-task=6" in line
    assert "OMP_NUM_THREADS=2" in line


def test_more_loader_workers_than_cores_are_a_warning():
    """Use two hosts: three ranks with 2 cores each, and one rank with 8."""
    results = ranks.run(4, count_threads, None, 8, 4, layout=(3, 1))
    (info, (level, line)) = log_of_rank_0(results)
    assert (info[0], level) == ("INFO", "WARNING")
    assert "too few cores for 3 ranks, the first rank 0 on node1: each has 2" in line
    assert "4 loader workers" in line
    assert "srun --cpus-per-task=4" in line
    results = ranks.run(4, count_threads, None, 8, 4, layout=(1, 3))
    assert "for 3 ranks, the first rank 1 on node2" in log_of_rank_0(results)[1][1]


def test_as_many_loader_workers_as_cores_are_accepted():
    results = ranks.run(2, count_threads, None, 8, 4)
    assert [level for level, _ in log_of_rank_0(results)] == ["INFO"]


def fail_to_open():
    os.environ["OMP_NUM_THREADS"] = ""
    torch.set_num_threads(8)
    os.sched_getaffinity = lambda pid: set(range(8))
    if hpctrain.detect().rank == 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-a,0"
    try:
        hpctrain.Session(batch_size=1, start_timeout=30)
    except hpctrain.HpctrainError:
        return torch.get_num_threads()
    return None


def test_threads_are_restored_when_the_session_does_not_open():
    assert ranks.run(3, fail_to_open) == [8, 8, 8]


def loader_workers(workers):
    """Return the loader workers of a rank on a stand-in for eight cores."""
    os.sched_getaffinity = lambda pid: set(range(8))
    with hpctrain.Session(batch_size=1, start_timeout=30, workers=workers) as session:
        return session.workers


@pytest.mark.parametrize(("layout", "expected"), [((3,), [1, 1, 1]), ((2, 1), [3, 3, 7])])
def test_loader_workers_auto_follow_from_the_cores_of_a_rank(layout, expected):
    assert ranks.values(ranks.run(3, loader_workers, "auto", layout=layout)) == expected
    assert ranks.values(ranks.run(3, loader_workers, 5, layout=layout)) == [5, 5, 5]
