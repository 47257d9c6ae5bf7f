"""`hpctrain doctor`: its findings, its output, and its work without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.cluster import env_vars, visible_gpus
from hpctrain.cluster.job import Allocation
from hpctrain.rendezvous import Roster
from hpctrain.tools.doctor import (
    communication,
    devices,
    findings,
    formatting,
    limits,
    network,
    rank_comparison,
    scheduler,
    shown_variables,
    software,
    storage,
    subprocesses,
)
from hpctrain.tools.doctor.communication import Pair
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding

MIB, GIB = 2**20, 2**30


def doctor(*arguments, **env):
    """Run the command as a user does, with more variables."""
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", "doctor", *arguments],
        env={**env_vars.scrubbed(os.environ), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def level(finding, word=""):
    """Return the level of a finding; check that all but OK have a fix."""
    assert bool(finding.fixes) == (finding.level != OK)
    assert isinstance(finding.fixes, tuple)
    assert all(fix and "    " not in fix for fix in finding.fixes)
    assert word in finding.found
    return finding.level


# torch, CUDA and Horovod


def test_doctor_torch_present_missing_or_broken():
    facts = {"version": "2.15.0", "cuda": "13.2", "hip": None, "nccl": "2.30.7"}
    assert level(software.torch(facts), "2.15.0, CUDA 13.2, NCCL 2.30.7") == OK
    assert level(software.torch({**facts, "cuda": None, "nccl": None}), "CPU build") == OK
    assert level(software.torch({**facts, "hip": "6.2"}), "ROCm 6.2, RCCL") == OK
    assert level(software.torch({}), "not installed") == PROBLEM
    assert level(software.torch({}, "OSError: libcuda\nis not"), "libcuda is not") == PROBLEM


@pytest.mark.parametrize(
    ("answer", "expected", "word"),
    [
        ((0, '{"version": "0.28.1", "gloo": true, "mpi": false, "nccl": false}'), OK, "gloo"),
        ((0, 'a warning\n{"version": "0.28.1", "mpi": true, "nccl": true}\n'), OK, "mpi, nccl"),
        ((0, '{"version": "0.28.1"}'), WARNING, "no transport"),
        ((0, "not JSON"), WARNING, "not JSON"),
        ((0, "[]"), WARNING, "[]"),
        ((1, "Traceback\nImportError: undefined symbol"), WARNING, "undefined symbol"),
        ((1, ""), WARNING, "fails"),
        ((-11, ""), WARNING, "SIGSEGV"),
        ((-99, ""), WARNING, "signal 99"),
        (None, WARNING, "takes more than"),
    ],
)
def test_doctor_judges_horovod_by_its_import(answer, expected, word):
    finding = software.judge_horovod(True, answer)
    assert level(finding, word) == expected
    assert finding.fixes == (() if expected == OK else ("hpctrain horovod build",))


def test_doctor_missing_horovod_is_ok():
    assert level(software.judge_horovod(False, None)) == OK


@pytest.mark.parametrize(
    ("on_host", "listed", "seen", "job", "expected"),
    [
        (0, None, 0, None, OK),
        (0, None, 0, 4, PROBLEM),
        (4, None, 4, None, OK),
        (4, None, 0, None, PROBLEM),
        (4, (), 0, None, OK),
        (4, (), 0, 4, OK),
        (4, ("0",), 1, None, OK),
        (4, None, 1, 1, OK),  # the others belong to another job
        (4, None, 3, None, WARNING),
        (4, ("0", "1"), 1, None, WARNING),
        (1, ("MIG-a", "MIG-b"), 1, None, OK),
    ],
)
def test_doctor_compares_gpus_seen_by_torch_with_those_visible(
    on_host, listed, seen, job, expected
):
    visible = None if listed is None else visible_gpus.Visible(listed, "CUDA_VISIBLE_DEVICES")
    why = ("the driver is too old", ("install a newer driver",))
    assert level(devices.judge_gpus(on_host, visible, seen, job, why)) == expected


@pytest.mark.parametrize(
    ("own", "built", "expected"),
    [
        ("sm_90", ["sm_80", "sm_90"], OK),
        ("sm_89", ["sm_80", "sm_90"], OK),
        ("sm_70", ["sm_75", "sm_80"], PROBLEM),
        ("sm_80", ["sm_86"], PROBLEM),
        ("sm_120", ["sm_75", "compute_90"], OK),
        ("sm_75", ["compute_90"], PROBLEM),
        ("sm_103", ["sm_100f"], OK),
        ("sm_103", ["sm_100a"], PROBLEM),
        ("sm_90", ["sm_90a"], OK),
        ("sm_120", ["compute_90a"], PROBLEM),
        ("gfx90a", ["gfx906", "gfx90a"], OK),
        ("gfx1100", ["gfx906", "gfx90a"], PROBLEM),
        ("sm_90", [], PROBLEM),
        ("sm_90", ["what", "sm_", ""], PROBLEM),
    ],
)
def test_doctor_compute_capability_is_in_the_torch_build(own, built, expected):
    assert level(devices.judge_architecture(own, built)) == expected


HEAD = """
| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |
"""


def test_doctor_driver_supports_the_cuda_of_torch():
    assert devices.read_driver(HEAD) == ("550.54.15", (12, 4))
    assert devices.read_driver("NVIDIA-SMI has failed") is None
    assert devices.read_driver("Driver Version: 550.1") == ("550.1", None)
    assert level(devices.judge_driver("550.54.15", (12, 4), "12.8")) == OK
    assert level(devices.judge_driver("550.54.15", (12, 4), "13.2"), "CUDA 13.2") == PROBLEM
    assert level(devices.judge_driver("580", (13, 0), "12.8")) == OK
    assert level(devices.judge_driver("550.1", None, "12.8")) == OK


def test_doctor_names_a_gpu_without_code_in_the_torch_build(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'{HEAD}END\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(visible_gpus, "here", lambda: ["0", "1"])
    names = {0: ("H100", 9, 0), 1: ("V100", 7, 0)}

    def properties(index):
        name, major, minor = names[index]
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 * GIB)

    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_arch_list=lambda: ["sm_80", "sm_90"],
        get_device_properties=properties,
    )
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.8", hip=None))
    both, driver, new, old = devices.examine(torch, None, None, None)
    assert level(both, "2 here, torch finds 2") == OK
    assert level(driver, "550.54.15") == OK
    assert (new.subject, level(new, "H100, 80 GiB: sm_90")) == ("GPU 0", OK)
    assert (old.subject, level(old, "V100")) == ("GPU 1", PROBLEM)
    refused = Finding("GPUs", PROBLEM, "one is shared", ("mend it",))
    assert devices.examine(torch, None, None, refused)[0] is refused


# limits of the system


@pytest.mark.parametrize(
    ("soft", "hard", "size", "expected"),
    [
        (1024, 4096, 1, OK),
        (1024, 4096, 2000, OK),  # the Session raises the limit
        (1024, None, 100_000, OK),
        (None, None, 100_000, OK),
        (1024, 1024, 2000, PROBLEM),
    ],
)
def test_doctor_open_files_limit(soft, hard, size, expected):
    assert level(limits.judge_open_files(soft, hard, size)) == expected


def test_doctor_locked_memory_limit_matters_to_infiniband():
    assert level(limits.judge_locked_memory(64 * 1024, False)) == OK
    assert level(limits.judge_locked_memory(64 * 1024, True), "64 KiB") == WARNING
    assert level(limits.judge_locked_memory(None, True), "unlimited") == OK


def test_doctor_process_limit():
    assert level(limits.judge_processes(None, None)) == OK
    assert level(limits.judge_processes(100, 30_000)) == WARNING
    assert level(limits.judge_processes(100, 100)) == WARNING


@pytest.mark.parametrize(
    ("cores", "on_host", "env", "expected", "word"),
    [
        (8, 8, {}, OK, "8 of 8"),
        (8, 64, {"OMP_NUM_THREADS": "2"}, OK, "6 left for loader workers"),
        (8, 64, {"OMP_NUM_THREADS": "4,2"}, OK, "4 left"),
        (2, 64, {"OMP_NUM_THREADS": "8"}, WARNING, "more threads than cores"),
        (2, 64, {"MKL_NUM_THREADS": "8"}, WARNING, "MKL_NUM_THREADS=8"),
        (8, 8, {"OMP_NUM_THREADS": "many"}, WARNING, "no number"),
        (8, 8, {"OMP_NUM_THREADS": "²"}, WARNING, "no number"),
        (8, 8, {"OMP_NUM_THREADS": "-1"}, WARNING, "no number"),
        (8, 8, {"OMP_NUM_THREADS": "9" * 5000}, WARNING, "no number"),
        (8, 8, {"OMP_NUM_THREADS": ""}, OK, "8 of 8"),
        (1, 64, {}, WARNING, "1 of 64"),
        (1, 1, {}, OK, "1 of 1"),
    ],
)
def test_doctor_threads_and_cores(cores, on_host, env, expected, word):
    assert level(limits.judge_cores(cores, on_host, env, True), word) == expected
    assert "left" not in limits.judge_cores(cores, on_host, env, False).found


def test_doctor_ranks_that_share_cores():
    two = {"mask": "3", "threads": "1"}
    own = [{"mask": f"{1 << n:x}", "threads": "1"} for n in range(3)]
    for own_facts, hosts in ((own, "aaa"), ([two, two], "aa"), ([two] * 3, "abc"), ([two], "a")):
        ranks = roster(*own_facts, hosts=list(hosts))
        assert not rank_comparison.judge_cores(ranks.entries, rank_comparison.rows(ranks))
    ranks = roster(*[two] * 3, {"mask": "f", "threads": "not set"}, hosts=["n1", "n1", "n1", "n2"])
    (finding,) = rank_comparison.judge_cores(ranks.entries, rank_comparison.rows(ranks))
    assert level(finding, "ranks 0-2 on n1: 3 ranks of a host share 2 cores") == WARNING
    assert "3 threads" in finding.found
    assert finding.ranks == (0, 1, 2)


@pytest.mark.parametrize(
    ("size", "free", "expected"),
    [
        (64 * MIB, 64 * MIB, WARNING),  # the default of docker run
        (8 * GIB, 8 * GIB, OK),
        (8 * GIB, MIB, WARNING),
        (0, 0, WARNING),
        (None, None, WARNING),
    ],
)
def test_doctor_shared_memory(size, free, expected):
    finding = limits.judge_shared_memory(size, free)
    assert level(finding) == expected
    if size == 64 * MIB:
        assert finding.fixes == ("docker run --shm-size=8g …", "docker run --ipc=host …")


def test_doctor_clock_synchronised():
    assert limits.judge_clock(None) == []
    (finding,) = limits.judge_clock((0, 0x2001))
    assert level(finding) == OK
    for answer in ((5, 0x41), (0, 0x40), (5, 0)):
        (finding,) = limits.judge_clock(answer)
        assert level(finding) == WARNING


# storage


def place(kind="ext4", free=100 * GIB, inodes=10**6, error=""):
    return storage.Place(Path("/data/run"), kind, free, inodes, error)


@pytest.mark.parametrize(
    ("facts", "run", "cache"),
    [
        ({}, OK, OK),
        ({"inodes": None}, OK, OK),
        ({"inodes": 3}, WARNING, WARNING),
        ({"free": 5 * GIB}, WARNING, WARNING),
        ({"free": 1000}, PROBLEM, WARNING),
        ({"error": "Read-only file system"}, PROBLEM, WARNING),
        ({"kind": "tmpfs"}, WARNING, OK),
        ({"kind": ""}, OK, OK),
    ],
)
def test_doctor_judges_storage(facts, run, cache):
    assert level(storage.judge("run directory", place(**facts))) == run
    assert level(storage.judge("cache", place(**facts))) == cache


def test_doctor_storage_check_leaves_no_files(tmp_path):
    (good,) = storage.examine("run directory", tmp_path / "runs" / "new")
    assert "writable" in good.found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (bad,) = storage.examine("run directory", tmp_path / "file")
    assert level(bad, "not a directory") == PROBLEM
    (full,) = storage.examine("run directory", Path("/proc/self/runs"))
    assert level(full, "cannot be written") == PROBLEM


def test_doctor_reports_a_file_system_that_hangs(monkeypatch, tmp_path):
    import threading

    released = threading.Event()
    monkeypatch.setattr(storage, "_HANGS_SECONDS", 0.05)
    monkeypatch.setattr(storage, "_read", lambda path: released.wait(20))
    (finding,) = storage.examine("run directory", tmp_path)
    released.set()
    assert level(finding, "no answer") == PROBLEM


MOUNTS = """\
1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
2 1 0:40 / /home rw - nfs4 nas:/home rw
3 1 0:41 / /home/my\\040work rw shared:7 master:2 - lustre mds@tcp:/scratch rw
4 1 0:42 / /home rw - fuse.sshfs me@elsewhere:/ rw
cut off
"""


def test_doctor_file_system_of_a_path():
    assert storage.kind_of(Path("/home/my work/run"), MOUNTS) == "lustre"
    assert storage.kind_of(Path("/home/other"), MOUNTS) == "fuse.sshfs"  # on top of nfs4
    assert storage.kind_of(Path("/homes"), MOUNTS) == "ext4"
    assert storage.kind_of(Path("/anything"), "") == ""


QUOTA = """\
Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      nas:/home  990*  1000 1100 0  12 0 0 0
      nas:/scratch  10  0 2000 0  100 50 100 1700000000
"""
LFS = "/scratch 1200 1000 1100 6d23h59m 7 0 0 -\n"


def test_doctor_quota_nearly_used_up():
    rows = storage.read_quota(QUOTA.splitlines())
    assert rows == [
        ("nas:/home", "KiB", 990, 1000),
        ("nas:/scratch", "KiB", 10, 2000),
        ("nas:/scratch", "files", 100, 50),
    ]
    home, files = storage.judge_quota([QUOTA.splitlines()])
    assert level(home, "990 of 1000 KiB") == WARNING
    assert level(files, "100 of 50 files") == PROBLEM
    (lustre,) = storage.judge_quota([LFS.splitlines()])
    assert level(lustre, "/scratch: 1200 of 1000 KiB") == PROBLEM
    (well,) = storage.judge_quota([["/scratch 10 1000 1100 - 7 0 0 -"]])
    assert level(well, "10 of 1000") == OK


@given(st.lists(st.text(max_size=80), max_size=5))
def test_doctor_quota_output_may_be_anything(lines):
    storage.judge_quota([lines])


def test_doctor_quota_from_the_tools_on_the_path(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "lfs").write_text(f"#!/bin/sh\necho '{LFS.strip()}'\n")
    (tools / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    (finding,) = storage.quotas([tmp_path])
    assert "1200 of 1000" in finding.found
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert storage.quotas([tmp_path]) == []


# the network, the scheduler, other programs


def test_doctor_hostname_that_does_not_resolve():
    assert level(network.judge_name("node1", ["10.0.0.1"], ["10.0.0.1"]), "10.0.0.1") == OK
    assert level(network.judge_name("node1", ["127.0.1.1"], []), "loopback only") == OK
    missing = network.judge_name("node1", "Name or service not known", ["10.0.0.1"])
    assert level(missing, "does not resolve") == PROBLEM
    assert missing.fixes == ("as root: echo '10.0.0.1 node1' >> /etc/hosts",)
    assert "127.0.0.1 node1" in network.judge_name("node1", "unknown", []).fixes[0]
    assert level(network.judge_name("node1", None, []), "no answer") == WARNING


def test_doctor_network_interfaces():
    assert "no other host" in network.judge_interfaces({"lo": ["127.0.0.1", "::1"]}).found
    assert "no other host" in network.judge_interfaces({}).found
    assert network.judge_interfaces({"ib0": ["10.1.0.1"]}).found == "ib0 10.1.0.1"


def test_doctor_slurm_and_its_job():
    assert level(scheduler.judge_slurm(False, None), "not installed") == OK
    assert level(scheduler.judge_slurm(True, None), "no answer") == WARNING
    assert level(scheduler.judge_slurm(True, (1, "srun: error: no\nconfig"))) == WARNING
    nowhere = (1, "srun: error: a\nsrun: fatal: Could not establish a configuration source\n")
    assert level(scheduler.judge_slurm(True, nowhere), "no slurm.conf is found") == WARNING
    assert level(scheduler.judge_slurm(True, (0, "slurm-wlm 22.05.8\n")), "22.05.8") == OK
    assert scheduler.judge_job(None, {}, 0.0).found == "none"
    job = Allocation("slurm", "815", restart_count=1, end_time=7320, tasks=4, gpus=1)
    memory = {"SLURM_MEM_PER_NODE": "4096", "SLURM_MEM_PER_CPU": "all"}
    assert scheduler.judge_job(job, memory, 0.0).found == (
        "slurm 815, restart 1, 2 h 2 min left, 4 tasks, 1 GPU on this host, 4096 MiB for a node"
    )
    endless = Allocation("slurm", "815", tasks=1)
    found = scheduler.judge_job(endless, {}, 0.0, (0, "1-02:03:04")).found
    assert found == ("slurm 815, restart 0, 1-02:03:04 left, 1 task")
    assert "left" not in scheduler.judge_job(endless, {}, 0.0, (1, "slurm_load_jobs error")).found
    assert "0 h 0 min left" in scheduler.judge_job(job, {}, 1e6).found


def test_doctor_program_missing_slow_or_failing(tmp_path):
    assert subprocesses.ask([str(tmp_path / "absent")]) is None
    assert subprocesses.ask(["sleep", "30"], 0.05) is None
    assert subprocesses.ask([sys.executable, "-c", "print('yes')"]) == (0, "yes")
    assert subprocesses.ask(["sh", "-c", "echo no >&2; exit 3"]) == (3, "no")
    assert subprocesses.ask(["sh", "-c", "kill -9 $$"]) == (-9, "")


# the comparison of ranks


def roster(*own_facts, hosts=None):
    """Return a roster of ranks with facts that differ from the usual ones."""
    usual = dict.fromkeys(rank_comparison.COMPARED, "same") | {
        "gpu": None,
        "run": "/r",
        "token": "",
        "mask": "f",
    }
    hosts = hosts or [f"node{n + 1}" for n in range(len(own_facts))]
    names = tuple(dict.fromkeys(hosts))
    entries = tuple(
        {
            "host": host,
            "pid": 100 + rank,
            "world": {"local_rank": hosts[:rank].count(host)},
            "doctor": {**usual, **own},
        }
        for rank, (own, host) in enumerate(zip(own_facts, hosts, strict=True))
    )
    places = tuple(names.index(host) for host in hosts)
    return Roster(entries, tuple("10.0.0.1" for _ in own_facts), names, places, 0)


def test_doctor_table_marks_the_rank_that_differs():
    table = rank_comparison.rows(roster({}, {}, {}, {"torch": "2.14.0"}))
    assert [row.differs for row in table] == [[], [], [], ["torch"]]
    (finding,) = rank_comparison.differences(table)
    assert level(finding, "same at ranks 0-2; 2.14.0 at rank 3 on node4") == WARNING
    assert finding.ranks == (3,)
    text = formatting.table(table)
    assert "2.14.0 *" in text
    assert "differs from most ranks" in text
    assert max(map(len, text.splitlines())) <= 100


def test_doctor_table_of_two_ranks_compares_with_rank_0():
    table = rank_comparison.rows(roster({"cores": "8"}, {"cores": "4"}))
    assert [row.differs for row in table] == [[], ["cores"]]


def test_doctor_table_of_equal_ranks_has_no_marks():
    table = rank_comparison.rows(roster({}, {}, {}))
    assert rank_comparison.differences(table) == []
    assert "*" not in formatting.table(table)


def test_doctor_table_accepts_one_visible_gpu_per_rank():
    own = [{"visible": str(n % 2)} for n in range(4)]
    bound = rank_comparison.rows(roster(*own, hosts=["a", "a", "b", "b"]))
    assert rank_comparison.differences(bound) == []
    own[3] = {"visible": "7"}
    (finding,) = rank_comparison.differences(
        rank_comparison.rows(roster(*own, hosts=["a", "a", "b", "b"]))
    )
    assert finding.ranks == (3,)


def test_doctor_table_marks_a_rank_without_torch():
    table = rank_comparison.rows(roster({}, {"torch": rank_comparison.NONE}, {}))
    assert table[1].differs == ["torch"]
    assert rank_comparison.differences(table) == []


def test_doctor_long_table_shows_the_ranks_that_differ():
    many = [{}] * 200
    many[150] = {"python": "3.10"}
    text = formatting.table(rank_comparison.rows(roster(*many)))
    assert "\n  150   " in text
    assert "and 135 more" in text


def test_doctor_clocks_apart():
    table = rank_comparison.rows(roster({}, {}, {}))
    table[0].clock, table[1].clock, table[2].clock = 0.0, 0.4, -3.25
    (finding,) = rank_comparison.judge_clocks(table)
    assert level(finding, "node3 is 3.2 s behind node1") == WARNING
    table[2].clock = None
    assert rank_comparison.judge_clocks(table) == []


def test_doctor_judges_whether_the_run_directory_is_shared(tmp_path):
    with rank_comparison.token(0, tmp_path / "runs") as left:
        assert rank_comparison.finds(tmp_path / "runs", left)
        (tmp_path / "other").mkdir()
        assert not rank_comparison.finds(tmp_path / "other", left)
        (tmp_path / "link").symlink_to(tmp_path)
        assert rank_comparison.finds(tmp_path / "link" / "runs", left)
    assert not Path(left["token"]).exists()
    with rank_comparison.token(1, tmp_path) as other:
        assert other["token"] == ""
    ranks = roster({"token": "/r/t"}, {}, {})
    table = rank_comparison.rows(ranks)
    (well,) = rank_comparison.judge_shared(ranks.entries, table, [True] * 3)
    assert level(well, "3 hosts have the same /r") == OK
    (bad,) = rank_comparison.judge_shared(ranks.entries, table, [True, True, False])
    assert level(bad, "the file of rank 0 is not visible at rank 2 on node3") == PROBLEM
    elsewhere = roster({"token": "/r/t"}, {"run": "/home/x"})
    (bad,) = rank_comparison.judge_shared(
        elsewhere.entries, rank_comparison.rows(elsewhere), [True, False]
    )
    assert level(bad, "whose run directory is /home/x") == PROBLEM
    assert rank_comparison.judge_shared(roster({}, {}).entries, table, [True, False]) == []


def test_doctor_merges_findings_of_ranks():
    shared, own = Finding("clock", WARNING, "f", ("x", "z")), Finding("torch", PROBLEM, "g", ("y",))
    sent = [findings.to_send([own, shared]), [], findings.to_send([shared, Finding("a", OK, "")])]
    one, two = findings.merged(json.loads(json.dumps(sent)))
    assert (one.subject, one.fixes, one.ranks) == ("clock", ("x", "z"), (0, 2))
    assert (two.subject, two.fixes, two.ranks) == ("torch", ("y",), (0,))
    assert formatting.remarks([one], ["a", "b", "c"]).splitlines() == [
        "  warning           clock (ranks 0 and 2 on a and c): f",
        "    fix:      x",
        "    or:       z",
    ]
    assert "(every host)" in formatting.remarks([one], ["a", "a", "c"])
    assert "(" not in formatting.remarks([one], ["a", "b"])


# sums, and links between hosts


class WrongSums:
    """A backend of three ranks whose sums are right, or too large in the last element."""

    rank, world_size, transport = 1, 3, "stand-in"

    def __init__(self, extra):
        import torch

        self.device, self.extra = torch.device("cpu"), extra

    def sum(self, tensor):
        tensor.mul_(6 / (self.rank + 1))
        tensor[-1] += self.extra
        return tensor


def test_doctor_all_reduce_checked_against_the_exact_sum():
    assert communication.checked(WrongSums(0.0), 1000)
    assert not communication.checked(WrongSums(1.0), 1000)
    sums = communication.Sums("nccl", [2, 3], {10**6: 0.5}, 10.0)
    assert level(communication.judge_sums(sums), "wrong sum over nccl at ranks 2 and 3") == PROBLEM
    assert level(communication.judge_sums(communication.Sums("nccl", [], {}, 1.0))) == OK


@pytest.mark.parametrize("count", range(1, 20))
def test_doctor_host_pairs_meet_once(count):
    games = communication.rounds(count)
    for game in games:
        players = [player for pair in game for player in pair]
        assert len(players) == len(set(players))
    pairs = sorted(pair for game in games for pair in game)
    assert pairs == [(a, b) for a in range(count) for b in range(a + 1, count)]


def test_doctor_host_pairs_of_many_hosts_end_after_63_rounds():
    games = communication.rounds(101)
    assert len(games) == 63
    assert len({pair for game in games for pair in game}) == 63 * 50


def ways(hosts, slow):
    """Return links of 10 GB/s between all hosts, except slow ones."""
    return [Pair(x, y, 1.5 if slow(x, y) else 10.0) for x in hosts for y in hosts if x != y]


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefgh"])
def test_doctor_names_a_slow_host_or_link(hosts):
    assert communication.judge_pairs(ways(hosts, lambda x, y: False)) == []
    (sends,) = communication.judge_pairs(ways(hosts, lambda x, y: x == "b"))
    assert level(sends, "b sends at most 1.5 GB/s") == WARNING
    assert "--exclude=b" in sends.fixes[0]
    both = communication.judge_pairs(ways(hosts, lambda x, y: "b" in (x, y)))
    assert ["b sends" in both[0].found, "b receives" in both[1].found] == [True, True]
    assert len(both) == 2
    (way,) = communication.judge_pairs(ways(hosts, lambda x, y: (x, y) == ("b", "c")))
    assert level(way, "b to c: 1.5 GB/s") == WARNING


def test_doctor_names_no_slow_host_of_two():
    assert communication.judge_pairs(ways("ab", lambda x, y: x == "b")) == []
    assert communication.judge_pairs([]) == []


# the output

SECRETS = {
    "WANDB_API_KEY": "wandb-8d1f",
    "AWS_SECRET_ACCESS_KEY": "aws-77aa",
    "HF_TOKEN": "hf-0b0b",
    "HPCTRAIN_SECRET": "ours-4e4e",
    "SLURM_JWT": "jwt-a1a1",
    "NCCL_PLUGIN_TOKEN": "plug-c3c3",
    "HPCTRAIN_UNKNOWN": "what-99ee",
    "DATABASE_URL": "postgres://me:pw-55cc@db",
}


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20)))
def test_doctor_shows_listed_environment_variables_only(env):
    known = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "HPCTRAIN_RUN_DIR": "/r"}
    variables = shown_variables.shown({**env, **SECRETS, **known})
    allowed = {"NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_NCCL_"}
    assert known.items() <= variables.items()
    assert not SECRETS.keys() & variables.keys()
    for name in variables.keys() - known.keys():
        assert name.startswith(tuple(allowed)) or name in shown_variables._NAMES
    assert all("\n" not in value and "\x1b" not in value for value in variables.values())


@pytest.fixture
def run_doctor(monkeypatch, capsys):
    """Return a function that runs the doctor in this process: exit code, output, errors.

    Horovod counts as not installed, because its check imports torch in another interpreter.
    """
    monkeypatch.setattr(software, "horovod", lambda: software.judge_horovod(False, None))

    def examine(*options):
        code = main(["doctor", *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return examine


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_doctor_output_has_no_secret(run_doctor, monkeypatch, tmp_path, options):
    for name, value in {**SECRETS, "NCCL_DEBUG": "WARN"}.items():
        monkeypatch.setenv(name, value)
    _, out, err = run_doctor("--run-dir", str(tmp_path), *options)
    assert "NCCL_DEBUG" in out
    for value in SECRETS.values():
        assert value not in out + err


def test_doctor_of_this_machine_in_json_and_text(run_doctor, tmp_path):
    code, out, _ = run_doctor("--json", "--run-dir", str(tmp_path / "runs"))
    output = json.loads(out)
    assert output.keys() == {"machine", "findings", "ranks", "all_reduce", "pairs"}
    assert (output["ranks"], output["all_reduce"], output["pairs"]) == ([], None, [])
    for finding in output["findings"]:
        assert finding.keys() == {"subject", "level", "found", "fixes", "ranks"}
        assert finding["ranks"] == [0]
        assert isinstance(finding["fixes"], list)
        assert bool(finding["fixes"]) == (finding["level"] != OK)
    by_subject = {finding["subject"]: finding for finding in output["findings"]}
    assert by_subject.keys() >= {
        *("python", "torch", "GPUs", "horovod", "submitit", "Slurm", "job", "open files"),
        *("locked memory", "processes", "cores", "/dev/shm", "run directory", "cache"),
        *("interfaces", "host name"),
    }
    assert by_subject["torch"]["level"] == OK
    assert str(tmp_path / "runs") in by_subject["run directory"]["found"]
    wrong = any(finding["level"] == PROBLEM for finding in output["findings"])
    assert code == int(wrong)
    assert list(tmp_path.iterdir()) == []

    code, out, _ = run_doctor("--run-dir", str(tmp_path / "runs"))
    assert code == int(wrong)
    for subject in by_subject:
        assert subject in out
    copied = ("    fix:      ", "    or:       ")
    assert all(len(line) <= 100 or line.startswith(copied) for line in out.splitlines())


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "not installed"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("", "AttributeError"),
    ],
)
def test_doctor_without_a_working_torch(tmp_path, module, word):
    (tmp_path / "torch.py").write_text(module)
    done = doctor("--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    by_subject = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert by_subject["torch"]["level"] == PROBLEM
    assert word in by_subject["torch"]["found"]
    assert "pip install" in by_subject["torch"]["fixes"][0]
    assert by_subject["cores"]["level"] in (OK, WARNING)


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("raise ImportError('undefined symbol: _ZN5torch')", "undefined symbol"),
        ("gloo_built = mpi_built = lambda: True\nnccl_built = lambda: 0", "0.99.9, built with"),
    ],
)
def test_doctor_imports_horovod_in_its_own_process(tmp_path, monkeypatch, module, word):
    folder = tmp_path / "horovod"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '0.99.9'")
    (folder / "torch.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert word in software.horovod().found


def test_doctor_refuses_a_contradictory_environment():
    done = doctor(RANK="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no WORLD_SIZE" in done.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_doctor_start_timeout_is_positive(seconds, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--start-timeout", seconds])
    assert caught.value.code == 2
    assert "--start-timeout" in capsys.readouterr().err


def test_doctor_help_needs_no_torch():
    code = (
        "import sys\nfrom hpctrain.cli import main\n"
        "try: main(['doctor', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
