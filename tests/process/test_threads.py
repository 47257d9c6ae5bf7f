"""Ranks that share cores divide them; what somebody decided stays; and rank 0 says so once.

The ranks here share one machine, and those with `layout` act as if on several: simulated hosts
share nothing. A stand-in for the affinity gives them more cores than the machine has; where two
are enough the affinity is real.
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


class Keep(logging.Handler):
    """What a rank says on standard error, without the line that every session has."""

    def __init__(self, level):
        super().__init__(level)
        self.lines = []

    def emit(self, record):
        if "cores" in record.getMessage():
            self.lines.append((record.levelname, record.getMessage()))


def computes(affinity=None, threads=8, workers=0, decided=None):
    """A rank's threads before, inside and after a session, and what it says of cores.

    Args:
        affinity: by rank, the cores (default: the eight of a stand-in).
        threads: that torch begins with.
        workers: of the loader.
        decided: by rank, OMP_NUM_THREADS; torch has read it by now, and begins with it.
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
    keep = Keep(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("hpctrain").addHandler(keep)
    before = torch.get_num_threads()
    with hpctrain.Session(batch_size=1, start_timeout=30, workers=workers):
        inside = torch.get_num_threads()
    return (before, inside, torch.get_num_threads()), keep.lines


def shares(results):
    """By rank, the threads inside; before and after they have to be the same."""
    counts = [counts for counts, _ in ranks.values(results)]
    assert all(before == after for before, _, after in counts)
    return [inside for _, inside, _ in counts]


def said(results):
    """What rank 0 says; the others say nothing."""
    lines = [lines for _, lines in ranks.values(results)]
    assert not any(lines[1:])
    return lines[0]


SHARE = "OMP_NUM_THREADS is not set: {} ranks share cores and have at most {} each"


@pytest.mark.parametrize(
    ("told", "layout", "expected", "line"),
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
        # It begins with one for each whole core, and the affinity counts half ones too.
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
def test_threads_of_ranks_that_share_cores_are_divided(told, layout, expected, line):
    results = ranks.run(sum(layout), functools.partial(computes, **told), layout=layout)
    assert shares(results) == expected
    assert said(results) == ([("INFO", line)] if line else [])


@pytest.mark.usefixtures("two_cores")
def test_threads_of_ranks_bound_to_their_own_cores_are_kept():
    first, second = CORES[:2]
    results = ranks.run(2, computes, [{first}, {second}], 1)
    assert shares(results) == [1, 1]
    assert said(results) == []


@pytest.mark.usefixtures("two_cores")
def test_threads_on_a_shared_core_are_at_least_one():
    first, second = CORES[:2]
    results = ranks.run(3, computes, [{first, second}, {first, second}, {first}], 2)
    assert shares(results) == [1, 1, 2]  # torch's own number, where nothing is divided
    ((level, line),) = said(results)
    assert level == "INFO"
    assert "2 of 3 ranks share cores and have at most 1 thread each" in line


def test_more_threads_than_cores_are_a_warning_with_ranks():
    results = ranks.run(3, computes, None, 8, 0, ("1", "6", "6"))
    ((level, line),) = said(results)
    assert level == "WARNING"
    assert "too few cores for 2 ranks, the first rank 1 on node1: each has 2, for 6 threads" in line
    assert "srun --cpus-per-task=6" in line
    assert "OMP_NUM_THREADS=2" in line


def test_more_loader_workers_than_cores_are_a_warning():
    """Three of a host have 2 cores each, and the one alone has 8."""
    results = ranks.run(4, computes, None, 8, 4, layout=(3, 1))
    (info, (level, line)) = said(results)
    assert (info[0], level) == ("INFO", "WARNING")
    assert "too few cores for 3 ranks, the first rank 0 on node1: each has 2" in line
    assert "4 loader workers" in line
    assert "srun --cpus-per-task=4" in line
    results = ranks.run(4, computes, None, 8, 4, layout=(1, 3))
    assert "for 3 ranks, the first rank 1 on node2" in said(results)[1][1]


def test_as_many_loader_workers_as_cores_are_accepted():
    results = ranks.run(2, computes, None, 8, 4)
    assert [level for level, _ in said(results)] == ["INFO"]


def fails():
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


def test_threads_are_put_back_when_the_session_does_not_open():
    assert ranks.run(3, fails) == [8, 8, 8]


def loads(workers):
    """The loader processes of a rank on eight cores of a stand-in."""
    os.sched_getaffinity = lambda pid: set(range(8))
    with hpctrain.Session(batch_size=1, start_timeout=30, workers=workers) as session:
        return session.workers


@pytest.mark.parametrize(("layout", "expected"), [((3,), [1, 1, 1]), ((2, 1), [3, 3, 7])])
def test_loader_workers_auto_follow_from_the_cores_of_a_rank(layout, expected):
    assert ranks.values(ranks.run(3, loads, "auto", layout=layout)) == expected
    assert ranks.values(ranks.run(3, loads, 5, layout=layout)) == [5, 5, 5]
