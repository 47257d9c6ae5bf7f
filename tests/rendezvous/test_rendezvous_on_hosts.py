"""Rendezvous on hosts with several networks: missing ranks, hosts that are cut off, addresses.

Most ranks do not import torch: they meet and return the roster. Ranks of tests about gloo open a
Session.
"""

import contextlib
import json
import shlex
import shutil
import subprocess
import time

import cluster as slurm
import launches
import pytest

pytestmark = pytest.mark.slurm

HOSTS = ["node1", "node2", "node3"]
SRUN = ("srun", "-N3", "-n3", "-w", "node[1-3]")
JOB = ("sbatch", "--wait", "-N3", "-n3", "-w", "node[1-3]")
START_TIMEOUT = 8  # where it must run out; ranks of a busy machine start seconds apart
GRACE = 18  # seconds after --start-timeout until the last rank has printed its error
PATIENCE = 60  # seconds until a hang is an error; all that works takes much less

# A rank: its options are JSON. It makes a file before the rendezvous, waits for a file if it must
# be late, and writes its outcome to a file, because its network may be cut.
RANK = """
import json, os, subprocess, sys, time
from pathlib import Path

options = json.loads(sys.argv[1])
folder = Path(options["folder"])

from hpctrain import errors, rendezvous
from hpctrain.cluster import launchers

errors.report_uncaught()


def touch(name):
    (folder / name).touch()


def wait_for(path):
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def meet():
    result = rendezvous.meet(
        start.world, start.rendezvous_point, {}, options["start_timeout"], error=start.waste
    )
    if result.listener is not None:
        result.listener.close()
    return {"hosts": result.world.hosts, "addresses": result.roster.addresses}


def train():
    import hpctrain

    with hpctrain.Session(batch_size=1, start_timeout=options["start_timeout"]) as session:
        touch(f"open-{rank}")
        sums = []
        for number in range(options["rounds"]):
            if "turns" in options and session.is_main:
                other, ahead = options["turns"]
                if number >= ahead:
                    wait_for(Path(other, f"round-{number - ahead}"))
            sums.append(session.sum(options["number"]))
            if session.is_main:
                touch(f"round-{number}")
        return {
            "hosts": session.world.hosts,
            "addresses": session._context.roster.addresses,
            "sums": sums,
            "peers": peers(),
        }


def peers():
    # The other ends of this process's connections: the store's and gloo's.
    listing = subprocess.run(
        ["ss", "-Htnp", "state", "established"], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in listing.stdout.splitlines() if f"pid={os.getpid()}," in line]
    found = {fields[3].rpartition(":")[0].strip("[]") for fields in lines}
    return sorted({address.removeprefix("::ffff:") for address in found})


def hold_before_the_backend(file):
    # After the rendezvous, before gloo connects the ranks.
    from hpctrain import backends

    opened = backends.open_backend

    def wait_and_open(*arguments):
        touch(f"met-{rank}")
        wait_for(folder / file)
        return opened(*arguments)

    backends.open_backend = wait_and_open


start = launchers.survey()
rank = start.world.rank
if options["train"]:
    import hpctrain.training.session
if "hold" in options:
    hold_before_the_backend(options["hold"])
touch(f"began-{rank}")
if str(rank) in options["late"]:
    wait_for(folder / options["late"][str(rank)])
began = time.monotonic()
outcome = {}
try:
    outcome = train() if options["train"] else meet()
except errors.HpctrainError as error:
    outcome = {"error": str(error), "code": error.exit_code}
    raise
except BaseException as error:
    outcome = {"error": f"another error: {error!r}", "code": -1}
    raise
finally:
    outcome |= {"seconds": round(time.monotonic() - began, 1), "host": os.uname().nodename}
    (folder / f".{rank}").write_text(json.dumps(outcome))
    (folder / f".{rank}").rename(folder / f"outcome-{rank}")
"""


class Start:
    """The ranks that one command starts, and the files that they write to a folder."""

    def __init__(self, folder, process):
        self.folder, self.process = folder, process

    def wait_for(self, *names):
        """Wait until files exist."""
        for name in names:
            wait_until((self.folder / name).exists, self)

    def touch(self, name):
        (self.folder / name).touch()

    def outcomes(self, *ranks):
        """Return the outcomes of ranks; print their seconds."""
        self.wait_for(*(f"outcome-{rank}" for rank in ranks))
        outcomes = [json.loads((self.folder / f"outcome-{rank}").read_text()) for rank in ranks]
        for rank, outcome in zip(ranks, outcomes, strict=True):
            print(f"{self.folder.name}: rank {rank} {outcome}")
        return outcomes

    def results(self, size=3):
        """Return the outcomes of all ranks; check that they met at the addresses of their hosts."""
        outcomes = self.outcomes(*range(size))
        for outcome in outcomes:
            assert "error" not in outcome, outcome["error"]
            assert set(outcome["hosts"]) == {one["host"] for one in outcomes}
            assert outcome["addresses"] == [slurm.address(one["host"]) for one in outcomes]
        return outcomes

    def errors(self, *ranks):
        """Return the error messages of ranks; check that they came in time."""
        outcomes = self.outcomes(*ranks)
        for outcome in outcomes:
            assert outcome.get("code", -1) > 0, outcome
            assert outcome["seconds"] < START_TIMEOUT + GRACE
        return [outcome["error"] for outcome in outcomes]

    def log(self):
        return (self.folder / "log").read_text()


def wait_until(condition, start):
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, start.log()
        time.sleep(0.02)


def callers(cluster, host):
    """Return the addresses of the peers of a host's rendezvous port."""
    listing = cluster.run(["ss", "-Htn", "state", "established"], host).stdout
    pairs = [[end.rpartition(":") for end in line.split()[2:4]] for line in listing.splitlines()]
    return {
        peer[0].strip("[]").removeprefix("::ffff:")
        for own, peer in pairs
        if 20000 <= int(own[2]) < 32000
    }


@pytest.fixture
def start(cluster, tmp_path):
    """Return a function that starts ranks by a command; the end of the test cancels them."""
    processes = []

    def start_ranks(launcher, name="start", env=None, train=False, late=None, **options):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rank.py").write_text(RANK)
        options_of_rank = {"folder": str(folder), "start_timeout": PATIENCE, "train": train}
        options_of_rank |= {"late": late or {}, "number": 1, "rounds": 1, **options}
        command = [*launcher, launches.PYTHON, str(folder / "rank.py"), json.dumps(options_of_rank)]
        if launcher[0].startswith("mpirun"):
            (folder / "job").write_text(f"#!/bin/sh\n{shlex.join(command)}\n")
            command = [*JOB, f"--output={folder / 'log'}", str(folder / "job")]
        with (folder / "log").open("a") as log:
            process = subprocess.Popen(
                cluster.command(command),
                env={**cluster.environ(), "OMP_NUM_THREADS": "1", **(env or {})},
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        processes.append(process)
        return Start(folder, process)

    try:
        yield start_ranks
    finally:
        if any(process.poll() is None for process in processes):
            cluster.clear()
        for process in processes:
            process.wait(PATIENCE)


@pytest.mark.parametrize(("variable", "late"), [("HPCTRAIN_MAIN_PORT", "0"), ("MASTER_PORT", "2")])
@pytest.mark.slow
def test_two_jobs_on_one_port_train_at_once_and_stay_separate(start, tmp_path, variable, late):
    """Start B while A waits for a rank; then both run their sums in turns."""
    job = {"env": {variable: "23456"}, "train": True, "rounds": 4}
    first = start(SRUN, "A", late={late: "go"}, turns=[str(tmp_path / "B"), 1], **job)
    first.wait_for("began-0", "began-1", "began-2")
    second = start(SRUN, "B", turns=[str(tmp_path / "A"), 0], number=1000, **job)
    second.wait_for("open-0")
    first.touch("go")
    assert [outcome["sums"] for outcome in first.results()] == [[3] * 4] * 3
    assert [outcome["sums"] for outcome in second.results()] == [[3000] * 4] * 3


# Rank 0 on another host than the first.


@pytest.mark.slow
def test_rank_0_on_the_host_that_slurm_hostfile_puts_it(start, tmp_path):
    (tmp_path / "hosts").write_text("node3\nnode1\nnode2\n")
    env = {"SLURM_HOSTFILE": str(tmp_path / "hosts")}
    outcomes = start(["srun", "-n3", "-m", "arbitrary"], env=env, train=True).results()
    assert [outcome["host"] for outcome in outcomes] == ["node3", "node1", "node2"]


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [("cyclic", [*HOSTS, *HOSTS]), ("plane=2", ["node1"] * 2 + ["node2"] * 2 + ["node3"] * 2)],
)
@pytest.mark.slow
def test_rendezvous_of_several_ranks_per_host(start, distribution, hosts):
    launcher = [*SRUN, "-n6", "--ntasks-per-node=2", "-m", distribution]
    assert [outcome["host"] for outcome in start(launcher).results(6)] == hosts


FREELY = "--allow-run-as-root --oversubscribe --bind-to none"


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("mpirun.openmpi --allow-run-as-root --map-by seq --hostfile ../hosts -np 3", "openmpi"),
        (f"mpirun.openmpi {FREELY} --map-by node -H node2:2,node3:1 -np 3", "openmpi"),
        ("mpirun.mpich -n 3 -hosts node2,node3", "mpich"),
    ],
)
@pytest.mark.slow
def test_mpirun_with_rank_0_not_on_the_first_host(start, tmp_path, lacking, command, part):
    (tmp_path / "hosts").write_text("node3\nnode1\nnode2\n")
    program, *options = command.split()
    if shutil.which(program) is None:
        lacking(part, f"no {program} here")
    outcomes = start([program, *options]).results()
    assert outcomes[0]["host"] != "node1"


# Missing ranks.


@contextlib.contextmanager
def network_cut(cluster, host):
    cluster.cut(host)
    try:
        yield
    finally:
        cluster.mend(host)
        cluster.clear()


CUT_OFF = [pytest.param("node1", marks=pytest.mark.slow), "node3"]


@pytest.mark.parametrize("host", CUT_OFF)
def test_host_cut_off_before_the_rendezvous_is_named_on_both_sides(cluster, start, host):
    made = start(SRUN, late=dict.fromkeys("012", "go"), start_timeout=START_TIMEOUT)
    made.wait_for("began-0", "began-1", "began-2")
    with network_cut(cluster, host):
        made.touch("go")
        errors = made.errors(0, 1, 2)
    lost = (1, 2) if host == "node1" else (2,)
    for rank, error in enumerate(errors):
        if rank in lost:
            assert f"rank {rank} on {HOSTS[rank]} did not find rank 0 at node1" in error
            # "No route to host", or no answer as long as its Ethernet address is in the cache.
            assert f"node1 = {slurm.address('node1')}: " in error
        else:
            named = "ranks 1 and 2" if host == "node1" else "rank 2"
            assert f"{named} of 3 did not connect within {START_TIMEOUT} s" in error
            assert f"no connection from {' and '.join(HOSTS[r] for r in lost)}" in error


@pytest.mark.slow
def test_host_of_rank_0_cut_off_during_the_rendezvous_is_named(cluster, start):
    made = start(SRUN, late={"2": "never"}, start_timeout=START_TIMEOUT)
    made.wait_for("began-0", "began-1")
    wait_until(lambda: slurm.address("node2") in callers(cluster, "node1"), made)
    with network_cut(cluster, "node1"):
        (error,) = made.errors(1)
    assert "rank 1 on node2 did not find rank 0 at node1" in error
    assert f"{slurm.address('node1')} answered, then was lost" in error


@pytest.mark.parametrize("host", CUT_OFF)
@pytest.mark.slow
def test_host_cut_off_after_the_rendezvous_is_named_on_both_sides(cluster, start, host):
    made = start(SRUN, train=True, hold="go", start_timeout=START_TIMEOUT)
    made.wait_for("met-0", "met-1", "met-2")
    with network_cut(cluster, host):
        made.touch("go")
        errors = made.errors(0, 1, 2)
    lost = (1, 2) if host == "node1" else (2,)
    for rank, error in enumerate(errors):
        if rank in lost:
            store = f"rank {rank} on {HOSTS[rank]} cannot open the store of rank 0"
            assert f"{store} at {slurm.address('node1')} port" in error
            assert "on node1" in error
        else:
            assert "took part in the rendezvous" in error
            assert any(HOSTS[other] in error for other in lost)
            assert "but did not connect within" in error


# Names, addresses and interfaces.


@pytest.mark.slow
def test_wrong_hosts_file_is_named_on_each_host(cluster, start):
    wrong = {
        "node2": ("127.0.1.1 node1", "node1 resolves to 127.0.1.1, which is this host"),
        "node3": (f"{slurm.address('node2')} node1", f"node1 = {slurm.address('node2')}: Connec"),
        "node4": ("", "node1 does not resolve"),
    }
    with contextlib.ExitStack() as files:
        for host, (line, _) in wrong.items():
            files.enter_context(cluster.hosts_file(host, with_node1(host, line)))
        made = start(["srun", "-N4", "-n4"], start_timeout=START_TIMEOUT)
        first, *others = made.errors(0, 1, 2, 3)
    assert f"ranks 1-3 of 4 did not connect within {START_TIMEOUT} s" in first
    assert "no connection from node2, node3 and node4" in first
    for (rank, error), (host, (_, message)) in zip(
        enumerate(others, 1), wrong.items(), strict=True
    ):
        assert f"rank {rank} on {host} did not find rank 0 at node1" in error
        assert message in error


@pytest.mark.slow
def test_address_without_an_answer_does_not_delay_the_rendezvous(cluster, start):
    """Give rank 0's name four addresses: no answer, refused, this host, and the right one."""
    silent = f"{slurm.SLOW_NETWORK}.99"
    neighbour = [silent, "lladdr", "02:00:00:00:00:99", "dev", "eth1", "nud", "permanent"]
    addresses = [silent, slurm.address("node4"), "127.0.1.1", slurm.address("node1")]
    lines = "\n".join(f"{address} node1" for address in addresses)
    cluster.run(["ip", "neigh", "replace", *neighbour], "node2", check=True)
    try:
        with cluster.hosts_file("node2", with_node1("node2", lines)):
            made = start(SRUN, late={"0": "go"})
            calls = ["ss", "-Htn", "state", "syn-sent", "dst", silent]
            wait_until(lambda: cluster.run(calls, "node2").stdout, made)
            made.touch("go")
            assert made.results()[0]["seconds"] < 10
    finally:
        cluster.run(["ip", "neigh", "del", silent, "dev", "eth1"], "node2", check=True)


def with_node1(host, lines):
    """Return the hosts file of a host with other lines for node1."""
    lines_of_others = [text for text in slurm.hosts_text(host).splitlines() if " node1" not in text]
    return "\n".join([*lines_of_others, lines, ""])


@pytest.fixture
def ipv6_only(cluster, lacking):
    """Return a context in which host names are IPv6 addresses of a network, see `Cluster.ipv6`."""
    if not slurm.has_ipv6():
        lacking("ipv6", "this kernel has none")

    @contextlib.contextmanager
    def only(interface):
        addresses = [slurm.address6(host, interface) for host in HOSTS]
        names = [f"{address} {host}" for address, host in zip(addresses, HOSTS, strict=True)]
        text = "\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""])
        with contextlib.ExitStack() as stack:
            for host in HOSTS:
                stack.enter_context(cluster.hosts_file(host, text))
                stack.enter_context(cluster.ipv6(host, interface))
            yield addresses

    return only


@pytest.mark.parametrize("env", [{}, {"HPCTRAIN_INTERFACE": "eth1"}], ids=["found", "named"])
@pytest.mark.slow
def test_hosts_without_ipv4_train_over_ipv6(ipv6_only, start, env):
    with ipv6_only("eth1") as addresses:
        outcomes = start(SRUN, env=env, train=True).outcomes(0, 1, 2)
    for rank, outcome in enumerate(outcomes):
        assert "error" not in outcome, outcome["error"]
        assert outcome["addresses"] == addresses
        assert outcome["sums"] == [3]
        others = {address for other, address in enumerate(addresses) if other != rank}
        assert others <= set(outcome["peers"]) <= set(addresses)


@pytest.mark.slow
def test_rendezvous_of_hosts_with_ipv6_names(ipv6_only, start):
    with ipv6_only("eth0") as addresses:
        for outcome in start(SRUN).outcomes(0, 1, 2):
            assert "error" not in outcome, outcome["error"]
            assert outcome["addresses"] == addresses


@pytest.mark.slow
def test_network_interface_of_the_user_is_used(start):
    outcomes = start(SRUN, env={"HPCTRAIN_INTERFACE": "eth1"}, train=True).outcomes(0, 1, 2)
    addresses = [f"{slurm.SLOW_NETWORK}.{number}" for number in (1, 2, 3)]
    for outcome in outcomes:
        assert "error" not in outcome, outcome["error"]
        assert outcome["addresses"] == addresses
        assert outcome["sums"] == [3]
        assert set(outcome["peers"]) <= set(addresses)
