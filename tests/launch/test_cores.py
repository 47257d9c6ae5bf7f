"""Cores of the ranks of a host: how many there are, and which rank gets which."""

import os

import pytest

from hpctrain.launch import cores

# Two NUMA nodes of four physical cores, each with two hardware threads: 0 and 8, 1 and 9, …
NODES = {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return a function that sets the affinity of this process, and the topology of the host."""
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path)
    affinity = set()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, wanted: affinity.update(wanted))
    monkeypatch.setattr(os, "cpu_count", lambda: max(affinity) + 1)

    def describe(usable, nodes=None):
        affinity.clear()
        affinity.update(usable)
        for node, members in (nodes or {}).items():
            for core in members:
                topology = tmp_path / "cpu" / f"cpu{core}" / "topology"
                topology.mkdir(parents=True)
                (topology.parent / f"node{node}").mkdir()
                (topology / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
        return affinity

    return describe


def test_ranks_get_whole_cores_of_one_numa_node(host):
    host(range(16), NODES)
    assert cores.divided(2, {}) == [set(NODES[0]), set(NODES[1])]
    quarters = [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]
    assert cores.divided(4, {}) == quarters
    assert cores.divided(8, {}) == [{core, core + 8} for core in range(8)]


def test_three_ranks_on_eight_cores_get_all_of_them_once(host):
    host(range(8))
    parts = cores.divided(3, {})
    assert sorted(map(len, parts)) == [2, 3, 3]
    assert sorted(core for part in parts for core in part) == list(range(8))
    assert all(max(part) - min(part) == len(part) - 1 for part in parts)


def test_only_cores_of_the_affinity_are_divided(host):
    host([1, 2, 5, 9, 13, 14], NODES)
    assert cores.divided(3, {}) == [{1, 9}, {2, 5}, {13, 14}]
    assert cores.available({}) == 6


@pytest.mark.parametrize(
    ("usable", "ranks", "env"),
    [
        (4, 1, {}),
        (4, 5, {}),
        (1, 2, {}),
        (8, 2, {"SLURM_CPUS_ON_NODE": "4"}),  # which of them are the job's is not known
    ],
)
def test_ranks_are_not_bound(host, usable, ranks, env):
    host(range(usable))
    assert cores.divided(ranks, env) is None


@pytest.mark.parametrize(("text", "expected"), [("4", 4), ("8", 8), ("16", 8), ("0", 8), ("", 8)])
def test_available_cores_are_those_of_the_affinity_and_of_the_job(host, text, expected):
    host(range(8))
    env = {"SLURM_CPUS_ON_NODE": text}
    assert cores.available(env) == expected
    assert (cores.divided(2, env) is None) == (expected < 8)


def test_affinity_grows_to_the_cores_of_the_job(host):
    affinity = host([0, 7])
    cores.widen({})
    cores.widen({"SLURM_CPUS_ON_NODE": "2"})
    assert affinity == {0, 7}
    cores.widen({"SLURM_CPUS_ON_NODE": "8"})
    assert affinity == set(range(8))
    assert cores.divided(2, {"SLURM_CPUS_ON_NODE": "8"}) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
