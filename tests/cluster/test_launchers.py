"""Detection of each launcher, its World, its rendezvous point, and contradictions."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_env import (
    BATCH,
    ENV_LAUNCHER,
    HPCTRAIN,
    STEP,
    TORCHRUN,
    changed,
    launcher_variables,
)

from hpctrain.cli.explain import as_json
from hpctrain.cluster.launchers import LAUNCHERS, detect, readings, survey
from hpctrain.cluster.launchers.base import LauncherStore
from hpctrain.cluster.world import World
from hpctrain.errors import ContradictionError, HpctrainError, UsageError


def explain(env):
    """Return the output of `hpctrain explain --json` for an environment, and its error."""
    try:
        start, error = survey(env), None
    except HpctrainError as refused:
        start, error = None, refused
    return as_json(start, list(readings(env))), error


ALONE = World(0, 1, 0, 1, 0, 1, launcher="none")


@pytest.mark.parametrize(
    ("env", "world"),
    [
        ({}, ALONE),
        ({"PATH": "/bin", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}, ALONE),
        (BATCH, ALONE),
        # The shell of salloc, which may be an interactive step: not a rank of four.
        (changed(BATCH, SLURM_PROCID=None, SLURM_LOCALID=None, SLURM_NODEID=None), ALONE),
        (changed(BATCH, SLURM_STEP_ID="4294967290"), ALONE),
        (changed(BATCH, SLURM_STEP_ID="4294967291"), ALONE),
        (STEP, World(3, 4, 0, 1, 1, 2, ("node1", "node2"), "slurm")),
        (TORCHRUN, World(2, 4, 0, 2, 1, 2, None, "torchrun")),
        ({**STEP, **TORCHRUN}, World(2, 4, 0, 2, 1, 2, None, "torchrun")),
        ({**BATCH, **TORCHRUN}, World(2, 4, 0, 2, 1, 2, None, "torchrun")),
        (ENV_LAUNCHER, World(1, 2, 1, launcher="env")),
        (changed(ENV_LAUNCHER, LOCAL_WORLD_SIZE="2"), World(1, 2, 1, 2, 0, 1, None, "env")),
        (
            changed(ENV_LAUNCHER, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"),
            World(0, 1, 0, 1, 0, 1, None, "env"),
        ),
        ({**BATCH, **ENV_LAUNCHER}, World(1, 2, 1, launcher="env")),
        (HPCTRAIN, World(2, 3, 0, 1, 1, 2, ("node1", "node2"), "hpctrain")),
    ],
)
def test_launcher_is_detected_with_its_world(env, world):
    assert detect(env) == world


def test_detect_reads_the_environment_of_the_process(monkeypatch):
    for name in [*STEP, *TORCHRUN, *HPCTRAIN, "HPCTRAIN_LAUNCHER"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENV_LAUNCHER.items():
        monkeypatch.setenv(name, value)
    assert detect() == World(1, 2, 1, launcher="env")


def test_slurm_step_smaller_than_its_job_counts_its_own_tasks():
    env = changed(
        STEP,
        SLURM_NTASKS="8",
        SLURM_NNODES="4",
        SLURM_TASKS_PER_NODE="2(x4)",
        SLURM_JOB_NODELIST="node[1-4]",
        SLURM_NODELIST="node[1-4]",
        SLURM_STEP_NODELIST="node[2-3]",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
        SLURM_PROCID="1",
    )
    assert detect(env) == World(1, 2, 0, 1, 1, 2, ("node2", "node3"), "slurm")


def test_slurm_uneven_tasks_per_node_give_local_world_sizes():
    seen = []
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    for rank, (node, local) in enumerate(places):
        env = changed(
            STEP,
            SLURM_JOB_NODELIST="node[1-4]",
            SLURM_STEP_NODELIST="node[1-4]",
            SLURM_STEP_NUM_NODES="4",
            SLURM_STEP_NUM_TASKS="7",
            SLURM_STEP_TASKS_PER_NODE="2(x3),1",
            SLURM_PROCID=str(rank),
            SLURM_NODEID=str(node),
            SLURM_LOCALID=str(local),
        )
        world = detect(env)
        seen.append((world.rank, world.node_rank, world.local_rank, world.local_world_size))
    assert seen == [(r, n, lo, 1 if n == 3 else 2) for r, (n, lo) in enumerate(places)]


_LAYOUT = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda one: one.name)
@given(layout=_LAYOUT, start=st.integers(0, 2**31))
def test_launcher_environ_is_read_back_for_any_layout(launcher, layout, start):
    if launcher.name == "none":
        assert launcher.environ(ALONE, (1,), start) == {}
        return
    hosts = tuple(f"node{n}" for n in range(len(layout)))
    size, keys = sum(layout), set()
    ranks = [(node, local) for node, tasks in enumerate(layout) for local in range(tasks)]
    for rank, (node, local) in enumerate(ranks):
        world = World(rank, size, local, layout[node], node, len(hosts), hosts, launcher.name)
        env = launcher.environ(world, layout, start)
        start_found = survey(env)
        assert start_found.world.launcher == launcher.name
        for field in ("rank", "world_size", "local_rank"):
            assert getattr(start_found.world, field) == getattr(world, field)
        for field in ("local_world_size", "node_rank", "num_nodes", "hosts"):
            assert getattr(start_found.world, field) in (getattr(world, field), None)
        if launcher.name in ("hpctrain", "torchrun", "slurm", "mvapich2"):
            assert (start_found.world.node_rank, start_found.world.num_nodes) == (node, len(layout))
        if launcher.name in ("torchrun", "slurm", "env"):
            assert start_found.rendezvous_point.address == hosts[0]
        keys.add(start_found.rendezvous_point.key)
    assert len(keys) == 1
    assert survey(launcher.environ(world, layout, start + 1)).rendezvous_point.key not in keys


def test_rendezvous_key_differs_for_each_attempt_of_torchrun():
    again = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert survey(TORCHRUN).rendezvous_point.key != survey(again).rendezvous_point.key


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("SLURM_JOB_ID", "816"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_RESTART_COUNT", "1"),
        ("SLURM_CLUSTER_NAME", "oak"),
    ],
)
def test_rendezvous_key_differs_for_each_slurm_step_and_restart(name, other):
    assert survey(STEP).rendezvous_point.key != survey({**STEP, name: other}).rendezvous_point.key


@pytest.mark.parametrize(
    ("env", "address", "port"),
    [
        (STEP, "node1", None),
        (changed(STEP, SLURM_DISTRIBUTION="cyclic:block"), "node1", None),
        # Rank 0 may be on another host than the first of the list.
        (changed(STEP, SLURM_DISTRIBUTION="arbitrary"), None, None),
        (changed(STEP, MASTER_ADDR="node9", MASTER_PORT="1234"), "node9", 1234),
        # The agent itself listens on its port.
        (TORCHRUN, "node1", None),
        (ENV_LAUNCHER, "node1", 29500),
        (changed(ENV_LAUNCHER, HPCTRAIN_MAIN_ADDRESS="ib-node1"), "ib-node1", 29500),
        (changed(ENV_LAUNCHER, HPCTRAIN_MAIN_PORT="1234"), "node1", 1234),
        (HPCTRAIN, "127.0.0.1", None),
        # LSF's first host is the one of the batch script, where jsrun starts nothing.
        (launcher_variables("jsrun", LSB_MCPU_HOSTS="batch 1 node1 3 node2 1"), "node1", None),
        ({}, None, None),
    ],
)
def test_rendezvous_address_and_port_come_from_launcher_or_user(env, address, port):
    point = survey(env).rendezvous_point
    assert (point.address, point.port) == (address, port)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.9,192.168.0.9:36701",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "3",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "2001",
}


@pytest.mark.parametrize(
    ("env", "sure", "others", "store"),
    [
        (STEP, True, (), None),
        (changed(STEP, SLURM_DISTRIBUTION="arbitrary"), False, ("node1", "node2"), None),
        # The variable that a batch script exports may not fit the distribution.
        (
            changed(STEP, SLURM_DISTRIBUTION="arbitrary", MASTER_ADDR="node1"),
            True,
            ("node1", "node2"),
            None,
        ),
        (TORCHRUN, True, (), LauncherStore("torchrun", "node1", 29500)),
        (changed(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False"), True, (), None),
        (OPENMPI, False, (), None),
        (changed(OPENMPI, **JOB), False, ("node1", "node2", "node3"), None),
        (changed(OPENMPI, HPCTRAIN_MAIN_ADDRESS="node3", **JOB), True, (), None),
        (HOROVODRUN, False, (), LauncherStore("horovodrun", "10.0.0.1", 2001)),
        (changed(HOROVODRUN, HPCTRAIN_MAIN_ADDRESS="node3"), True, (), None),
        (ENV_LAUNCHER, True, (), None),
    ],
)
def test_rendezvous_asks_more_hosts_if_the_host_of_rank_0_is_uncertain(env, sure, others, store):
    point = survey(env).rendezvous_point
    assert (point.sure, point.others, point.store) == (sure, others, store)


def test_openmpi_impossible_number_of_hosts_is_ignored():
    """Open MPI 4.1.4 sets this on the second host, with --map-by seq and a hostfile in a job."""
    assert detect({**OPENMPI, "OMPI_MCA_orte_num_nodes": "6"}).num_nodes is None
    assert detect({**OPENMPI, "OMPI_MCA_orte_num_nodes": "3"}).num_nodes == 3


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "LocalHost",
        "localhost.localdomain",
        "ip6-localhost",
        "127.0.0.1",
        "127.0.1.1",
        "::1",
        "::ffff:127.0.0.1",
        "0.0.0.0",
        "::",
    ],
)
@pytest.mark.parametrize("name", ["MASTER_ADDR", "HPCTRAIN_MAIN_ADDRESS"])
@pytest.mark.parametrize("env", [STEP, changed(ENV_LAUNCHER, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")])
def test_loopback_address_is_refused_for_several_hosts(env, name, address):
    with pytest.raises(ContradictionError, match=f"{name}={address}") as caught:
        survey({**env, name: address})
    assert caught.value.code == "HT106"
    assert name in caught.value.fixes[0]
    simulated = survey({**env, name: address, "HPCTRAIN_HOSTNAME": "node2"})
    assert simulated.rendezvous_point.address == address
    assert survey({**env, name: "localhost1"}).rendezvous_point.address == "localhost1"


def test_torchrun_agents_may_use_localhost():
    assert survey({**TORCHRUN, "MASTER_ADDR": "localhost"}).rendezvous_point.address == "localhost"


def test_rendezvous_key_without_launcher_is_port_and_job():
    alone = survey(ENV_LAUNCHER).rendezvous_point
    assert alone.only_port
    jobs = [survey({**ENV_LAUNCHER, "SLURM_JOB_ID": job}).rendezvous_point for job in ("7", "8")]
    assert not any(point.only_port for point in jobs)
    assert jobs[0].key != jobs[1].key != alone.key


@pytest.mark.parametrize(
    ("exported", "interface"),
    [
        ({}, None),
        ({"HPCTRAIN_INTERFACE": "ib0"}, "ib0"),
        ({"GLOO_SOCKET_IFNAME": "eth1,eth2"}, "eth1"),
        ({"HPCTRAIN_INTERFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth1,eth2"}, "eth1"),
    ],
)
def test_network_interface_can_be_chosen(exported, interface):
    assert survey({**STEP, **exported}).rendezvous_point.interface == interface


def test_two_network_interfaces_are_refused():
    with pytest.raises(
        ContradictionError, match="HPCTRAIN_INTERFACE=ib0 and GLOO_SOCKET_IFNAME=eth"
    ) as caught:
        survey({**STEP, "HPCTRAIN_INTERFACE": "ib0", "GLOO_SOCKET_IFNAME": "eth0"})
    assert caught.value.code == "HT107"


def test_hostname_can_be_given():
    assert survey(HPCTRAIN).rendezvous_point.host == "node2"


def test_torch_variables_that_agree_with_srun_change_nothing():
    exported = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "node1"}
    start = survey({**STEP, **exported})
    assert start.world == detect(STEP)
    reasons = {one.variable: one.reason for one in readings({**STEP, **exported})}
    assert reasons["RANK"] == "same value as SLURM_PROCID"
    assert reasons["SLURM_PROCID"] == ""


@pytest.mark.parametrize(
    ("exported", "names"),
    [
        ({"RANK": "2", "WORLD_SIZE": "4"}, ("SLURM_PROCID=3", "RANK=2")),
        ({"RANK": "3", "WORLD_SIZE": "8"}, ("SLURM_STEP_NUM_TASKS=4", "WORLD_SIZE=8")),
        ({"WORLD_SIZE": "2"}, ("SLURM_STEP_NUM_TASKS=4", "WORLD_SIZE=2")),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"},
            ("SLURM_LOCALID=0", "LOCAL_RANK=3"),
        ),
    ],
)
def test_torch_variables_that_disagree_with_srun_are_refused(exported, names):
    with pytest.raises(ContradictionError) as caught:
        detect({**STEP, **exported})
    for name in names:
        assert name in caught.value.found
    assert caught.value.code == "HT104"
    unset, other = caught.value.fixes
    assert unset == f"unset {' '.join(sorted(exported))}"
    # Each fix works as printed.
    assert detect(changed(STEP, **dict.fromkeys(unset.split()[1:]))) == detect(STEP)
    named = re.search(r"env HPCTRAIN_LAUNCHER=(\w+)", other)[1]
    assert detect({**STEP, **exported, "HPCTRAIN_LAUNCHER": named}).launcher == named


def test_launcher_variable_overrides_detection():
    exported = {**ENV_LAUNCHER, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    assert detect({**STEP, **exported, "HPCTRAIN_LAUNCHER": "env"}).rank == 2
    assert detect({**STEP, **exported, "HPCTRAIN_LAUNCHER": "slurm"}).rank == 3
    assert detect({**STEP, **exported, "HPCTRAIN_LAUNCHER": "none"}) == ALONE
    assert detect({**STEP, **TORCHRUN, "HPCTRAIN_LAUNCHER": "slurm"}).rank == 3
    assert detect({**STEP, "HPCTRAIN_LAUNCHER": ""}).launcher == "slurm"
    with pytest.raises(UsageError, match="HPCTRAIN_LAUNCHER='pbs'") as caught:
        detect({"HPCTRAIN_LAUNCHER": "pbs"})
    for launcher in LAUNCHERS:
        assert launcher.name in caught.value.expected
    assert caught.value.exit_code == 2


@given(
    st.dictionaries(
        st.sampled_from(sorted({*STEP, *TORCHRUN, *HPCTRAIN, "SLURM_RESTART_COUNT"})),
        st.sampled_from(
            ["0", "1", "2", "3", "4", "-1", "", "x", "²", "1(x2)", "node[1-2]", "9" * 30]
        ),
    ),
    st.sampled_from([{}, STEP, TORCHRUN, ENV_LAUNCHER, HPCTRAIN]),
)
def test_any_environment_gives_a_world_or_exit_code_2(noise, env):
    output, error = explain({**env, **noise})
    if error is not None:
        assert error.exit_code == 2
    else:
        assert 0 <= output["rank"] < output["world_size"]
        assert 0 <= output["local_rank"] < output["world_size"]
    json.dumps(output)


@pytest.mark.parametrize(
    ("extra", "label", "restarts"),
    [
        ({}, "815", 0),
        ({"SLURM_RESTART_COUNT": "2"}, "815", 2),
        ({"SLURM_ARRAY_JOB_ID": "812", "SLURM_ARRAY_TASK_ID": "3"}, "812_3", 0),
        ({"SLURM_ARRAY_JOB_ID": "815", "SLURM_ARRAY_TASK_ID": "0"}, "815_0", 0),
    ],
)
@pytest.mark.parametrize("env", [BATCH, STEP, {**STEP, **TORCHRUN}])
def test_job_id_comes_from_slurm_under_every_launcher(env, extra, label, restarts):
    output, _ = explain({**env, **extra})
    assert (output["job_id"], output["restart_count"]) == (label, restarts)


def test_explain_json_has_the_source_of_each_value():
    output, _ = explain(STEP)
    assert output == {
        "launcher": "slurm",
        "rank": 3,
        "world_size": 4,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 1,
        "num_nodes": 2,
        "hosts": ("node1", "node2"),
        "main_address": "node1",
        "main_port": None,
        "job_id": "815",
        "restart_count": 0,
        "sources": {
            "rank": "SLURM_PROCID",
            "world_size": "SLURM_STEP_NUM_TASKS",
            "local_rank": "SLURM_LOCALID",
            "local_world_size": "SLURM_STEP_TASKS_PER_NODE",
            "node_rank": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
            "hosts": "SLURM_STEP_NODELIST",
        },
        "ignored": [
            {
                "variable": "SLURM_NTASKS",
                "value": "4",
                "field": "world_size",
                "launcher": "slurm",
                "reason": "same value as SLURM_STEP_NUM_TASKS",
            },
            {
                "variable": "SLURM_NNODES",
                "value": "2",
                "field": "num_nodes",
                "launcher": "slurm",
                "reason": "same value as SLURM_STEP_NUM_NODES",
            },
        ],
        "warnings": [],
    }


@pytest.mark.parametrize("env", [{}, TORCHRUN, ENV_LAUNCHER, HPCTRAIN, {"RANK": "0"}])
def test_explain_json_has_every_key_for_any_environment(env):
    output, _ = explain(env)
    assert output.keys() == explain(STEP)[0].keys()
    known = {name: value for name, value in output.items() if value not in (None, {}, [])}
    ignored = known.pop("ignored", ())
    for field in known.get("sources", ()):
        assert known[field] is not None
    if env == {"RANK": "0"}:
        assert known == {}
        assert [(one["variable"], one["value"]) for one in ignored] == [("RANK", "0")]


def test_explain_says_why_variables_are_ignored():
    reasons = {one.variable: one.reason for one in readings({**STEP, **TORCHRUN}) if one.reason}
    assert reasons["SLURM_PROCID"] == "describes the process that started torchrun"
    assert {"SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"} <= reasons.keys()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & reasons.keys()
    reasons = {one.variable: one.reason for one in readings(BATCH) if one.reason}
    assert reasons["SLURM_PROCID"] == "no SLURM_STEP_ID of a step whose task this is"
    reasons = {one.variable: one.reason for one in readings({**STEP, "HPCTRAIN_LAUNCHER": "none"})}
    assert reasons["SLURM_PROCID"] == "HPCTRAIN_LAUNCHER=none"


def test_docs_have_a_row_for_each_launcher():
    text = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
    order, _, proofs = text.partition("## How each was proved")
    rows = {line.split()[1]: line for line in order.splitlines() if line.startswith("| ")}
    names = [launcher.name for launcher in LAUNCHERS]
    assert [name for name in rows if name in names] == names
    for launcher in LAUNCHERS:
        variables = {name for names in launcher.variables.values() for name in names}
        for variable in {*variables, *launcher.composed.values()}:
            assert f"`{variable}`" in rows[launcher.name]
        assert all(mark in rows[launcher.name] for mark in launcher.marks)
        assert re.search(rf"^\|.*\b{launcher.name}\b.*\|", proofs, re.MULTILINE)


def test_explain_warns_of_idle_tasks_without_srun():
    (warning,) = explain(BATCH)[0]["warnings"]
    assert warning.keys() == {"code", "found", "fixes"}
    assert "3 of the 4 tasks of job 815" in warning["found"]
    assert "srun" in warning["fixes"][0]
