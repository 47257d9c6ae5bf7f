"""World: consistent numbers, and completion by the roster of the rendezvous."""

import dataclasses

import pytest

from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rank": 4}, ("rank 4", "world_size 4")),
        ({"rank": -1}, ("rank -1", "world_size 4")),
        ({"world_size": 0}, ("rank 0", "world_size 0")),
        ({"world_size": -4}, ("rank 0", "world_size -4")),
        ({"local_rank": 4}, ("local_rank 4", "world_size 4")),
        ({"local_rank": -1}, ("local_rank -1", "world_size 4")),
        ({"local_rank": 2, "local_world_size": 2}, ("local_rank 2", "local_world_size 2")),
        ({"local_world_size": 0}, ("local_rank 0", "local_world_size 0")),
        ({"local_world_size": 5}, ("local_world_size 5", "world_size 4")),
        ({"node_rank": 2, "num_nodes": 2}, ("node_rank 2", "num_nodes 2")),
        ({"node_rank": -1, "num_nodes": 2}, ("node_rank -1", "num_nodes 2")),
        ({"num_nodes": 5}, ("num_nodes 5", "world_size 4")),
        ({"num_nodes": 0}, ("num_nodes 0",)),
        ({"num_nodes": 2, "hosts": ("a", "b", "c")}, ("3 hosts (a, b, c)", "num_nodes 2")),
        # One host has all ranks; several hosts leave at least one rank for each of the others.
        ({"local_world_size": 2, "num_nodes": 1}, ("local_world_size 2", "num_nodes 1")),
        ({"local_world_size": 4, "num_nodes": 2}, ("local_world_size 4", "num_nodes 2")),
    ],
)
def test_world_refuses_numbers_that_do_not_fit(values, named):
    fitting = {"rank": 0, "world_size": 4, "local_rank": 0, "launcher": "somebody"}
    World(**fitting)
    with pytest.raises(ContradictionError) as caught:
        World(**fitting | values)
    for text in (*named, "somebody"):
        assert text in caught.value.found
    assert (caught.value.exit_code, caught.value.code) == (2, "HT101")
    assert caught.value.expected
    assert caught.value.fixes


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"world_size": 1}, True),
        ({"world_size": 4, "num_nodes": 1}, True),
        ({"world_size": 4, "num_nodes": 2}, False),
        ({"world_size": 4, "local_world_size": 4}, True),
        ({"world_size": 4, "local_world_size": 2}, False),
        ({"world_size": 4, "num_nodes": 2, "local_world_size": 2}, False),
        ({"world_size": 4}, None),
    ],
)
def test_world_on_one_host(values, expected):
    assert World(rank=0, local_rank=0, **values).on_one_host is expected


@pytest.mark.parametrize(
    ("values", "derived"),
    [
        ({"world_size": 1}, {"local_world_size": 1, "node_rank": 0, "num_nodes": 1}),
        # horovodrun provides no number of hosts, submitit's local executor no ranks of a host.
        ({"local_world_size": 3}, {"node_rank": 0, "num_nodes": 1}),
        ({"node_rank": 0, "num_nodes": 1}, {"local_world_size": 3}),
        ({"num_nodes": 3}, {"local_world_size": 1}),
        # Two hosts of three ranks: this one may have one or two.
        ({"num_nodes": 2}, {}),
        ({"local_world_size": 2}, {}),
        ({"local_world_size": 1}, {}),
        ({}, {}),
    ],
)
def test_fields_that_follow_from_the_others_are_derived(values, derived):
    fields = {"rank": 0, "world_size": 3, "local_rank": 0} | values
    assert World(**fields).derived() == World(**fields | derived)


def test_roster_completes_a_world():
    layout = (0, 1, 1, 0, 1)
    expected = [(0, 2, 0), (0, 3, 1), (1, 3, 1), (1, 2, 0), (2, 3, 1)]
    for rank, (local_rank, local_size, node) in enumerate(expected):
        world = World(rank, 5, local_rank, launcher="env")
        assert world.completed(("a", "b"), layout) == World(
            rank, 5, local_rank, local_size, node, 2, ("a", "b"), "env"
        )
        assert world.hosts is None


def test_local_rank_that_does_not_fit_the_hosts_is_refused():
    with pytest.raises(ContradictionError, match="local_rank 1 and local_world_size 1"):
        World(1, 2, 1).completed(("a", "b"), (0, 1))


def test_world_is_immutable():
    world = World(0, 1, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 1
    assert world == World(0, 1, 0)
    assert hash(world) == hash(World(0, 1, 0))
