"""`hpctrain doctor`: its findings, its output, and its work without torch."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.cli import main
from hpctrain.cluster import env_vars, visible_gpus
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from hpctrain.rendezvous import Roster
from hpctrain.tools.doctor import machine, ranks, report, storage
from hpctrain.tools.doctor.report import Finding, finding
from hpctrain.tools.horovod_build import wheel

MIB, GIB = 2**20, 2**30
OK, WARNING, PROBLEM = "ok", "warning", "problem"
FINDING = re.compile(r'finding\(\s*"([^"]+)"')


def doctor(*arguments, **env):
    """Run the command as a user does, with more variables."""
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", "doctor", *arguments],
        env={**env_vars.scrubbed(os.environ), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def level(result, word=""):
    """Return the level of a result; check that a finding says what is expected, with a fix."""
    if isinstance(result, str):
        assert word in result
        return OK
    assert result.expected
    assert result.fixes
    assert isinstance(result.fixes, tuple)
    assert all(fix and "    " not in fix for fix in result.fixes)
    assert word in result.found
    return result.level


# torch, Horovod and the GPUs


@pytest.mark.parametrize(
    ("module", "patched", "expected", "word"),
    [
        ("import os; os.abort()", True, WARNING, "Aborted"),
        ("import os; os._exit(1)", True, WARNING, "import horovod.torch fails"),
        ("raise ImportError('undefined symbol: _ZN5torch')", True, WARNING, "undefined symbol"),
        ("import time; time.sleep(60)", True, WARNING, "no answer within 2 s"),
        (
            "gloo_built = mpi_built = lambda: True\nnccl_built = lambda: 0",
            False,
            WARNING,
            "0.9, built with gloo, mpi, not by hpctrain horovod build: a rank may hang",
        ),
        (
            "gloo_built = mpi_built = nccl_built = lambda: 0",
            True,
            WARNING,
            "0.9, built with no transport",
        ),
        (
            "print('hello')\nmpi_built = nccl_built = lambda: True\ngloo_built = lambda: 0",
            True,
            OK,
            "0.9, built with mpi, nccl",
        ),
    ],
)
def test_doctor_imports_horovod_in_its_own_process(
    tmp_path, monkeypatch, module, patched, expected, word
):
    folder = tmp_path / "horovod"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        f"__version__ = '0.9'\nmended_by_hpctrain = {wheel.RECIPE if patched else 0}"
    )
    (folder / "torch.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "sleep" in module:
        monkeypatch.setattr(machine, "_HOROVOD_SECONDS", 2.0)
    result = machine.check_horovod()
    assert level(result, word) == expected
    if expected == WARNING:
        assert result.fixes == ("hpctrain horovod build",)


def test_doctor_runs_no_horovod_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    machine.check_horovod()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("on_host", "listed", "seen", "job", "expected"),
    [
        (0, None, 0, None, OK),
        (4, None, 4, None, OK),
        (4, None, 0, None, PROBLEM),
        (4, (), 0, None, OK),
        (4, (), 0, 4, OK),
        (4, ("0",), 1, None, OK),
        (4, None, 1, 1, OK),  # the others belong to another job
        (4, None, 3, None, WARNING),
        (4, None, 1, 2, WARNING),
        (4, ("0", "1"), 1, None, WARNING),
        (1, ("MIG-a", "MIG-b"), 1, None, OK),
    ],
)
def test_doctor_compares_gpus_seen_by_torch_with_those_visible(
    on_host, listed, seen, job, expected
):
    visible = None if listed is None else visible_gpus.Visible(listed, "CUDA_VISIBLE_DEVICES")
    why = ("the driver is too old", ("install a newer driver",))
    assert level(machine.check_count(on_host, visible, seen, job, why)) == expected


def stand_in_torch(broken):
    """Return a torch with two GPUs, whose kernels fail on those of a set of indices."""

    class Result:
        def __init__(self, device):
            self.index = int(device.removeprefix("cuda:"))

        def add(self, _):
            if self.index in broken:
                raise RuntimeError("no kernel image is available\nfor execution on the device")
            return self

        def item(self):
            return 2.0

    named = {0: ("H100", 9, 0), 1: ("V100", 7, 0)}

    def properties(index):
        name, major, minor = named[index]
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 * GIB)

    cuda = SimpleNamespace(
        device_count=lambda: 2,
        get_arch_list=lambda: ["sm_80", "sm_90"],
        get_device_properties=properties,
    )
    version = SimpleNamespace(cuda="12.8", hip=None)
    return SimpleNamespace(
        cuda=cuda, version=version, ones=lambda _, device: Result(device), device=SimpleNamespace
    )


@pytest.fixture
def two_gpus(monkeypatch):
    """Give this machine two GPUs."""
    monkeypatch.setattr(visible_gpus, "here", lambda: ["0", "1"])
    world = SimpleNamespace(local_rank=0, world_size=1)
    return SimpleNamespace(world=world, allocation=None)


def examine_gpus(start, monkeypatch, choose):
    """Return the device and what was found of GPUs, with a torch that fails on the second one."""
    from hpctrain.process import device

    monkeypatch.setattr(device, "choose", choose)
    return machine.check_gpus(stand_in_torch({1}), start, {}, ExitStack())


def test_doctor_names_a_gpu_without_code_in_the_torch_build(two_gpus, monkeypatch):
    chosen = SimpleNamespace(type="cuda", index=0)
    device, found = examine_gpus(two_gpus, monkeypatch, lambda *_: chosen)
    assert device is chosen
    assert level(found["GPUs"], "2 here, torch finds 2") == OK
    assert level(found["GPU 0"], "H100, 80 GiB, sm_90") == OK
    old = found["GPU 1"]
    assert (old.subject, level(old, "no kernel image is available; ")) == ("GPU 1", PROBLEM)
    assert "torch has code for sm_80 sm_90" in old.found
    assert old.fixes[0] == "install a torch built for sm_70"
    # A rank among others tries its own GPU alone.
    two_gpus.world.world_size = 2
    _, found = examine_gpus(two_gpus, monkeypatch, lambda *_: chosen)
    assert list(found) == ["GPUs", "GPU 0"]


def test_doctor_reports_a_gpu_that_a_session_refuses(two_gpus, monkeypatch):
    def refused(*_):
        raise UsageError.of_text("HT113", "2 ranks, 1 GPU", "a GPU for each", "start one rank")

    def broken(*_):
        raise RuntimeError("CUDA error: devices unavailable\nmore")

    device, found = examine_gpus(two_gpus, monkeypatch, refused)
    assert device is None
    assert found["GPUs"] == Finding(
        "GPUs", PROBLEM, "2 ranks, 1 GPU", "a GPU for each", ("start one rank",), "HT113"
    )
    device, found = examine_gpus(two_gpus, monkeypatch, broken)
    assert device is None
    assert level(found["GPUs"], "devices unavailable") == PROBLEM


def test_doctor_names_accelerators_that_no_rank_uses(two_gpus, monkeypatch):
    from hpctrain.process import device

    warning = UsageError("HT120.unsupported", kind="xpu", count=12)
    monkeypatch.setattr(device, "passed_over", lambda _: warning)
    chosen = SimpleNamespace(type="cpu", index=None)
    used, found = examine_gpus(two_gpus, monkeypatch, lambda *_: chosen)
    assert used is chosen
    assert level(found["GPUs"], "12 devices of type xpu") == WARNING


def test_doctor_names_a_torch_that_is_too_old(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    module, found = machine.import_torch()
    assert module is torch, "the other checks need it"
    assert (level(found, "torch 2.7.1+cu126 in "), found.code) == (PROBLEM, "HT121")


# limits of the system


def test_doctor_open_files_limit(monkeypatch):
    with ExitStack() as undo:
        assert machine.check_open_files(1, undo) == ""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    finding = machine.check_open_files(2000, ExitStack())
    assert (level(finding, "1024 open files"), finding.code) == (PROBLEM, "HT117")


def test_doctor_locked_memory_limit_matters_to_infiniband(monkeypatch, tmp_path):
    limits = [64 * 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[0], limits[0]))
    monkeypatch.setattr(machine, "_INFINIBAND", tmp_path)
    assert machine.check_locked_memory() == ""
    (tmp_path / "mlx5_0").mkdir()
    assert level(machine.check_locked_memory(), "64 KiB") == WARNING
    limits[0] = resource.RLIM_INFINITY
    assert machine.check_locked_memory() == ""


@pytest.mark.parametrize(
    ("cores", "on_host", "local_ranks", "env", "expected", "word"),
    [
        (8, 8, 1, {}, OK, "8 of 8"),
        (8, 64, 1, {"OMP_NUM_THREADS": "8"}, OK, "OMP_NUM_THREADS=8"),
        (8, 64, 1, {"OMP_NUM_THREADS": "4,2"}, OK, "OMP_NUM_THREADS=4"),
        (2, 64, 1, {"OMP_NUM_THREADS": "8"}, WARNING, "OMP_NUM_THREADS=8"),
        (2, 64, 1, {"MKL_NUM_THREADS": "8"}, WARNING, "MKL_NUM_THREADS=8"),
        (64, 64, 4, {"OMP_NUM_THREADS": "16"}, OK, "64 of 64"),
        (64, 64, 4, {"OMP_NUM_THREADS": "32"}, WARNING, "4 ranks on this host"),
        (2, 2, 4, {"OMP_NUM_THREADS": "1"}, OK, "2 of 2"),
        (8, 8, 1, {"OMP_NUM_THREADS": "²"}, OK, "8 of 8"),
        (8, 8, 1, {"OMP_NUM_THREADS": "9" * 5000}, WARNING, "999999999"),
        (1, 64, 1, {}, WARNING, "1 of 64"),
        (1, 1, 1, {}, OK, "1 of 1"),
    ],
)
def test_doctor_threads_and_cores(cores, on_host, local_ranks, env, expected, word):
    assert level(machine.check_cores(cores, on_host, local_ranks, env), word) == expected


@pytest.mark.parametrize(
    ("size", "free", "expected"),
    [
        (64 * MIB, 64 * MIB, WARNING),  # the default of docker run
        (8 * GIB, 8 * GIB, OK),
        (8 * GIB, MIB, WARNING),
        (0, 0, WARNING),
    ],
)
def test_doctor_shared_memory(monkeypatch, tmp_path, size, free, expected):
    folder = "/tmp" if size == 0 else "/dev/shm"
    monkeypatch.setattr(machine.system, "shared_folder", lambda: folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (size, size - free, free))
    result = machine.check_shared_memory()
    assert level(result) == expected
    if expected == WARNING:
        assert "docker run --shm-size=8g …" in result.fixes


# the run directory, the network, other programs


@pytest.mark.parametrize(
    ("kind", "free", "error", "expected", "word"),
    [
        ("lustre", 100 * GIB, "", OK, "/data/run (lustre): writable, 100.0 GiB free"),
        ("", 100 * GIB, "", OK, "unknown file system"),
        ("nfs", 5 * GIB, "", WARNING, "5.0 GiB free"),
        ("tmpfs", 100 * GIB, "", WARNING, "tmpfs"),
        ("nfs", 100 * GIB, "Read-only file system", PROBLEM, "Read-only"),
    ],
)
def test_doctor_judges_the_run_directory(kind, free, error, expected, word):
    result = storage.about_directory(Path("/data/run"), kind, free, error)
    assert level(result, word) == expected
    if expected != OK:
        assert all("--run-dir" in fix for fix in result.fixes)


def test_doctor_storage_check_leaves_no_files(tmp_path):
    good = str(storage.check_directory(tmp_path / "runs" / "new"))  # or the disk is nearly full
    assert "writable" in good
    assert "unknown" not in good
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert level(storage.check_directory(tmp_path / "file"), "Not a directory") == PROBLEM
    below = storage.check_directory(tmp_path / "file" / "runs")
    assert level(below, "Not a directory") == PROBLEM
    assert level(storage.check_directory(Path("/proc/self/runs")), "cannot be written") == PROBLEM


def test_doctor_reports_a_file_system_that_hangs(monkeypatch, tmp_path):
    import threading

    released = threading.Event()
    monkeypatch.setattr(storage, "_DIRECTORY_SECONDS", 0.05)
    monkeypatch.setattr(storage, "_try", lambda path: released.wait(20))
    finding = storage.check_directory(tmp_path)
    released.set()
    assert level(finding, "no answer") == PROBLEM


def test_doctor_reports_an_interface_that_does_not_exist(run_doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("HPCTRAIN_INTERFACE", "eth7")
    code, out, _ = run_doctor("--json", "--run-dir", str(tmp_path))
    by_subject = {one["subject"]: one for one in json.loads(out)["findings"]}
    assert (code, by_subject["start"]["level"], by_subject["start"]["code"]) == (
        1,
        PROBLEM,
        "HT207",
    )
    assert "eth7" in by_subject["start"]["found"]
    assert "export HPCTRAIN_INTERFACE=NAME" in by_subject["start"]["fixes"]


# the ranks


def roster(*own_facts, hosts=None):
    """Return a roster of ranks with facts that differ from the usual ones."""
    usual = {"kind": "cpu", "run": "/r", "marker": ""}
    hosts = hosts or [f"node{n + 1}" for n in range(len(own_facts))]
    names = tuple(dict.fromkeys(hosts))
    entries = tuple(
        {
            "host": host,
            "pid": 100 + rank,
            "world": {"local_rank": hosts[:rank].count(host)},
            "gpu": own.get("gpu"),
            "gpu_name": own.get("gpu_name"),
            "doctor": {**usual, **own},
        }
        for rank, (own, host) in enumerate(zip(own_facts, hosts, strict=True))
    )
    places = tuple(names.index(host) for host in hosts)
    return Roster(entries, tuple("10.0.0.1" for _ in own_facts), names, places, 0)


def printed(capsys, entries):
    """Return the lines that rank 0 prints about the ranks."""
    world = World(0, len(entries.entries), 0, launcher="slurm")
    report.Report({"host": "node1"}, world, False).machines([], ranks.rows(entries))
    return capsys.readouterr().out.splitlines()[1:]


def test_doctor_shows_ranks_and_devices_of_each_host(capsys):
    card = {"gpu": "GPU-1", "gpu_name": "H100"}
    assert printed(capsys, roster(card, card, {"kind": "none"}, hosts=["a", "a", "b"])) == [
        "  ranks             3 (hosts: 2)",
        "    a               ranks 0 and 1: H100",
        "    b               rank 2: none",
    ]


def test_doctor_shows_the_first_of_many_hosts(capsys):
    lines = printed(capsys, roster(*[{}] * 200))
    assert len(lines) == 65
    assert lines[-1].split() == ["node64", "rank", "63:", "cpu"]


def test_doctor_judges_whether_the_run_directory_is_shared(tmp_path):
    with ExitStack() as undo:
        name = storage.marker(tmp_path / "runs", undo)
        assert storage.finds(tmp_path / "runs", name)
        (tmp_path / "other").mkdir()
        assert not storage.finds(tmp_path / "other", name)
        (tmp_path / "link").symlink_to(tmp_path)
        assert storage.finds(tmp_path / "link" / "runs", name)
    assert not storage.finds(tmp_path, name)
    assert storage.marker(Path("/proc/self/runs"), ExitStack()) == ""
    three = roster({"marker": "t"}, {}, {})
    assert ranks.shared_findings(three, [True] * 3) == []
    (bad,) = ranks.shared_findings(three, [True, True, False])
    assert (level(bad, "in /r is missing in /r"), bad.ranks) == (PROBLEM, (2,))
    (bad,) = ranks.shared_findings(roster({"marker": "t"}, {"run": "/s"}), [True, False])
    assert level(bad, "in /r is missing in /s") == PROBLEM
    assert ranks.shared_findings(roster({}, {}), [True, False]) == []


def test_doctor_merges_findings_of_ranks(capsys):
    shared = Finding("cores", WARNING, "f", "e", ("x", "z"), "HT113")
    own = Finding("torch", PROBLEM, "g", "e", ("y",))
    sent = [[asdict(shared), asdict(own)], [], [asdict(shared)]]
    one, two = report.merged(json.loads(json.dumps(sent)))
    assert (one.subject, one.fixes, one.ranks) == ("cores", ("x", "z"), (0, 2))
    assert (two.subject, two.fixes, two.ranks) == ("torch", ("y",), (0,))
    whole = report.Report({"host": "a"}, World(0, 3, 0, launcher="slurm"), False)
    whole.machines([one], ranks.rows(roster({}, {}, {}, hosts=["a", "b", "c"])))
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "  WARNING           cores (ranks 0 and 2 on a and c): f",
        "    expected: e",
        "    fix:      x",
        "    or:       z",
        "    more:     hpctrain explain HT113",
    ]
    whole.add([replace(one, ranks=(0, 1, 2))])
    assert capsys.readouterr().out.startswith("  WARNING           cores: f")


def test_doctor_clocks_of_ranks():
    assert ranks.clock_findings([1e9, 1e9 + 1.5, 1e9 - 1.5]) == []
    (finding,) = ranks.clock_findings([1e9, 1e9 + 3, 1e9 - 40])
    assert (level(finding, "up to -40 s from rank 0's"), finding.ranks) == (WARNING, (1, 2))


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
    assert ranks.checked(WrongSums(0.0), 1000)
    assert not ranks.checked(WrongSums(1.0), 1000)


def test_doctor_report_shows_problems_last_and_counts_them(capsys):
    whole = report.Report({"host": "node1"}, World(0, 4, 0, launcher="slurm"), False)
    rows = ranks.rows(roster({}, {}, {}, {}))
    torch = finding("torch.broken", python="python3", error="p")
    whole.machines([torch, finding("cores.one", usable="w")], rows)
    whole.sums("nccl", [2, 3])
    assert whole.end() == 1
    out = capsys.readouterr().out
    assert out.index("cores: w") < out.index("torch: import torch fails: p")
    assert "all-reduce (ranks 2 and 3 on node3 and node4): a wrong sum over nccl" in out
    assert out.endswith("\nproblems: 2, warnings: 1\n")


def test_doctor_has_a_finding_for_each_text_and_a_text_for_each_finding():
    code = "".join(source.read_text() for source in report.TEXTS.parent.glob("*.py"))
    used = set(FINDING.findall(code))
    texts = tomllib.loads(report.TEXTS.read_text())
    assert used == {f"{subject}.{key}" for subject, keys in texts.items() for key in keys}
    for one in (text for keys in texts.values() for text in keys.values()):
        assert one["level"] in (WARNING, PROBLEM)
        assert one["found"]
        assert one["expected"]
        assert one["fixes"]


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


@pytest.fixture
def run_doctor(monkeypatch, capsys):
    """Return a function that runs the doctor in this process: exit code, output, errors.

    Horovod counts as not installed, because its check imports torch in another interpreter.
    """
    monkeypatch.setattr(machine, "check_horovod", lambda: "not installed")

    def examine(*options):
        code = main(["doctor", *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return examine


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_doctor_output_has_no_secret(run_doctor, monkeypatch, tmp_path, options):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    _, out, err = run_doctor("--run-dir", str(tmp_path), *options)
    assert "python" in out
    for value in SECRETS.values():
        assert value not in out + err


def test_doctor_of_this_machine_in_json_and_text(run_doctor, tmp_path):
    code, out, _ = run_doctor("--json", "--run-dir", str(tmp_path / "runs"))
    output = json.loads(out)
    assert output.keys() == {"machine", "findings", "ranks", "all_reduce"}
    assert [row["rank"] for row in output["ranks"]] == [0]
    assert output["all_reduce"] is None
    for one in output["findings"]:
        assert one["ranks"] == [0]
        assert one["fixes"]
        assert one["expected"]
    by_subject = {one["subject"]: one["found"] for one in output["findings"]}
    by_subject |= output["machine"].pop("checks") | output["machine"]
    assert by_subject.keys() >= {
        *("host", "system", "launcher", "python", "torch", "GPUs", "horovod"),
        *("cores", "run directory", "network"),
    }
    assert str(tmp_path / "runs") in by_subject["run directory"]
    wrong = any(one["level"] == PROBLEM for one in output["findings"])
    assert code == int(wrong)
    assert list(tmp_path.iterdir()) == []

    code, out, _ = run_doctor("--run-dir", str(tmp_path / "runs"))
    assert code == int(wrong)
    for subject in by_subject:
        assert subject in out


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "not installed"),
        (
            "raise OSError('libcudart.so.13: cannot open\\nmore')",
            "OSError: libcudart.so.13: cannot",
        ),
        ("", "AttributeError"),
    ],
)
def test_doctor_without_a_working_torch(tmp_path, module, word):
    (tmp_path / "torch.py").write_text(module)
    done = doctor("--json", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 1, done.stderr
    output = json.loads(done.stdout)
    by_subject = {one["subject"]: one for one in output["findings"]}
    assert by_subject["torch"]["level"] == PROBLEM
    assert word in by_subject["torch"]["found"]
    assert "pip install" in by_subject["torch"]["fixes"][0]
    assert "cores" in {**by_subject, **output["machine"]["checks"]}
    assert "horovod" not in {**by_subject, **output["machine"]["checks"]}


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
