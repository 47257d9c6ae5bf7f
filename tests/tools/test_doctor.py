"""`hpctrain doctor`: its findings, its output, and its work without torch."""

import json
import os
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.cluster import env_vars, visible_gpus
from hpctrain.errors import UsageError
from hpctrain.rendezvous import Roster, interfaces
from hpctrain.tools.doctor import (
    communication,
    devices,
    findings,
    limits,
    machine,
    ranks,
    report,
    software,
    storage,
    subprocesses,
)
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
    """Return the level of a finding; check that all but OK say what is expected, with a fix."""
    assert bool(finding.fixes) == bool(finding.expected) == (finding.level != OK)
    assert isinstance(finding.fixes, tuple)
    assert all(fix and "    " not in fix for fix in finding.fixes)
    assert word in finding.found
    return finding.level


# torch, Horovod and the GPUs


@pytest.mark.parametrize(
    ("answer", "expected", "word"),
    [
        ((0, "a warning\n0.28.1, built with mpi, nccl"), OK, "0.28.1, built with mpi, nccl"),
        ((1, "0.28.1, built with no transport"), WARNING, "no transport"),
        ((3, "0.28.1, built with gloo"), WARNING, "a rank may hang when another one dies"),
        ((1, "Traceback\nImportError: undefined symbol"), WARNING, "undefined symbol"),
        ((1, ""), WARNING, "fails"),
        ((-11, ""), WARNING, "Segmentation fault"),
        (None, WARNING, "takes more than"),
    ],
)
def test_doctor_judges_horovod_by_its_import(answer, expected, word):
    finding = software.judge_horovod(answer)
    assert level(finding, word) == expected
    assert finding.fixes == (() if expected == OK else ("hpctrain horovod build",))


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("import os; os.abort()", "Aborted"),
        ("raise ImportError('undefined symbol: _ZN5torch')", "undefined symbol"),
        ("gloo_built = mpi_built = lambda: True\nnccl_built = lambda: 0", "a rank may hang"),
        ("gloo_built = mpi_built = nccl_built = lambda: 0", "0.9, built with no transport"),
    ],
)
def test_doctor_imports_horovod_in_its_own_process(tmp_path, monkeypatch, module, word):
    folder = tmp_path / "horovod"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '0.9'")
    (folder / "torch.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert level(software.horovod(), word) == WARNING


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
    assert level(devices.judge_count(on_host, visible, seen, job, why)) == expected


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
def two_gpus(tmp_path, monkeypatch):
    """Give this machine two GPUs and NVIDIA's driver."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 550.54.15; echo 550.54.15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(visible_gpus, "here", lambda: ["0", "1"])
    world = SimpleNamespace(local_rank=0, world_size=1)
    return SimpleNamespace(world=world, allocation=None)


def examine_gpus(start, monkeypatch, choose):
    """Return the device and the findings about GPUs, with a torch that fails on the second one."""
    from hpctrain.process import device

    monkeypatch.setattr(device, "choose", choose)
    return devices.examine(stand_in_torch({1}), start, {}, ExitStack())


def test_doctor_names_a_gpu_without_code_in_the_torch_build(two_gpus, monkeypatch):
    chosen = SimpleNamespace(type="cuda", index=0)
    device, found = examine_gpus(two_gpus, monkeypatch, lambda *_: chosen)
    driver, both, new, old = found
    assert device is chosen
    assert (driver.subject, driver.found) == ("driver", "NVIDIA 550.54.15")
    assert level(both, "2 here, torch finds 2") == OK
    assert (new.subject, level(new, "H100, 80 GiB, sm_90")) == ("GPU 0", OK)
    assert (old.subject, level(old, "no kernel image is available; ")) == ("GPU 1", PROBLEM)
    assert "torch has code for sm_80 sm_90" in old.found
    assert old.fixes[0] == "install a torch that was built for sm_70"
    # A rank among others tries its own GPU alone.
    two_gpus.world.world_size = 2
    _, found = examine_gpus(two_gpus, monkeypatch, lambda *_: chosen)
    assert [one.subject for one in found] == ["driver", "GPUs", "GPU 0"]


def test_doctor_reports_a_gpu_that_a_session_refuses(two_gpus, monkeypatch):
    def refused(*_):
        raise UsageError.of_text("HT113", "2 ranks, 1 GPU", "a GPU for each", "start one rank")

    def broken(*_):
        raise RuntimeError("CUDA error: devices unavailable\nmore")

    device, found = examine_gpus(two_gpus, monkeypatch, refused)
    assert device is None
    assert found[-1] == Finding(
        "GPUs", PROBLEM, "2 ranks, 1 GPU", "a GPU for each", ("start one rank",), "HT113"
    )
    device, found = examine_gpus(two_gpus, monkeypatch, broken)
    assert device is None
    assert level(found[-1], "devices unavailable") == PROBLEM


# limits of the system


def test_doctor_open_files_limit(monkeypatch):
    with ExitStack() as undo:
        assert level(limits.open_files(1, undo)) == OK
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    finding = limits.open_files(2000, ExitStack())
    assert (level(finding, "1024 open files"), finding.code) == (PROBLEM, "HT117")


def test_doctor_locked_memory_limit_matters_to_infiniband():
    assert level(limits.judge_locked_memory(64 * 1024, False)) == OK
    assert level(limits.judge_locked_memory(64 * 1024, True), "64 KiB") == WARNING
    assert level(limits.judge_locked_memory(resource.RLIM_INFINITY, True), "unlimited") == OK


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
    assert level(limits.judge_cores(cores, on_host, local_ranks, env), word) == expected


@pytest.mark.parametrize(
    ("size", "free", "expected"),
    [
        (64 * MIB, 64 * MIB, WARNING),  # the default of docker run
        (8 * GIB, 8 * GIB, OK),
        (8 * GIB, MIB, WARNING),
        (0, 0, WARNING),
    ],
)
def test_doctor_shared_memory(size, free, expected):
    finding = limits.judge_shared_memory(size, free)
    assert level(finding) == expected
    assert ("docker run --shm-size=8g …" in finding.fixes) == (expected == WARNING)


# the run directory, the network, other programs


@pytest.mark.parametrize(
    ("kind", "free", "error", "expected", "word"),
    [
        ("lustre", 100 * GIB, "", OK, "/data/run (lustre): writable, 100.0 GiB free"),
        ("", 100 * GIB, "", OK, "unknown file system"),
        ("nfs", 5 * GIB, "", WARNING, "5.0 GiB"),
        ("tmpfs", 100 * GIB, "", WARNING, "tmpfs"),
        ("nfs", 100 * GIB, "Read-only file system", PROBLEM, "Read-only"),
    ],
)
def test_doctor_judges_the_run_directory(kind, free, error, expected, word):
    finding = storage.judge(Path("/data/run"), kind, free, error)
    assert level(finding, word) == expected
    assert all("--run-dir" in fix for fix in finding.fixes)


def test_doctor_storage_check_leaves_no_files(tmp_path):
    good = storage.examine(tmp_path / "runs" / "new")
    assert "writable" in good.found
    assert "unknown" not in good.found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert level(storage.examine(tmp_path / "file"), "not a directory") == PROBLEM
    assert level(storage.examine(Path("/proc/self/runs")), "cannot be written") == PROBLEM


def test_doctor_reports_a_file_system_that_hangs(monkeypatch, tmp_path):
    import threading

    released = threading.Event()
    monkeypatch.setattr(storage, "_HANGS_SECONDS", 0.05)
    monkeypatch.setattr(storage, "_read", lambda path: released.wait(20))
    finding = storage.examine(tmp_path)
    released.set()
    assert level(finding, "no answer") == PROBLEM


def test_doctor_network_interface(monkeypatch):
    monkeypatch.setattr(interfaces, "addresses", lambda: {"lo": ["127.0.0.1"], "ib0": ["10.1.0.1"]})
    assert machine.network(None).found == "ib0 10.1.0.1"
    assert machine.network("lo").found == "lo 127.0.0.1, as set"
    missing = machine.network("eth7")
    assert (level(missing, "eth7"), missing.code) == (PROBLEM, "HT207")
    assert "export HPCTRAIN_INTERFACE=NAME" in missing.fixes
    monkeypatch.setattr(interfaces, "addresses", lambda: {"lo": ["127.0.0.1"]})
    assert level(machine.network(None), "no other host can be reached") == OK


def test_doctor_version_of_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.slurm().found == "not installed"
    srun = tmp_path / "srun"
    for script, found in (
        ("echo slurm 23.11.4", "slurm 23.11.4"),
        ("echo no config >&2; exit 1", "srun --version fails: no config"),
    ):
        srun.write_text(f"#!/bin/sh\n{script}\n")
        srun.chmod(0o755)
        assert software.slurm().found == found


def test_doctor_program_missing_slow_or_failing(tmp_path):
    assert subprocesses.ask([str(tmp_path / "absent")]) is None
    assert subprocesses.ask(["sleep", "30"], 0.05) is None
    assert subprocesses.ask([sys.executable, "-c", "print('yes')"]) == (0, "yes")
    assert subprocesses.ask(["sh", "-c", "echo no >&2; exit 3"]) == (3, "no")
    assert subprocesses.ask(["sh", "-c", "kill -9 $$"]) == (-9, "")


# the ranks


def roster(*own_facts, hosts=None):
    """Return a roster of ranks with facts that differ from the usual ones."""
    usual = dict.fromkeys(ranks.VALUES, "same") | {
        "gpu": None,
        "run": "/r",
        "marker": "",
        "interfaces": {"lo": ["127.0.0.1"], "ib0": ["10.0.0.1"]},
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


def test_doctor_table_has_columns_for_the_values_that_differ():
    table = ranks.rows(roster({}, {"torch": "2.14.0"}, {"interfaces": {}}))
    assert [row["interface"] for row in table] == ["ib0", "ib0", None]
    count, *same, head, first, second, third = report.table_text(table).splitlines()
    assert count == "3 ranks on 3 hosts"
    assert "gpu none, device same" in " ".join(" ".join(same).split())
    assert head.split() == ["rank", "host", "pid", "interface", "torch"]
    assert [line.split() for line in (first, second, third)] == [
        ["0", "node1", "100", "ib0", "same"],
        ["1", "node2", "101", "ib0", "2.14.0"],
        ["2", "node3", "102", "none", "same"],
    ]


def test_doctor_table_of_many_ranks_is_cut():
    text = report.table_text(ranks.rows(roster(*[{}] * 200)))
    assert "\n  63    node64" in text
    assert "node65" not in text
    assert "and 136 more" in text


def test_doctor_judges_whether_the_run_directory_is_shared(tmp_path):
    with storage.marker(tmp_path / "runs") as name:
        assert storage.finds(tmp_path / "runs", name)
        (tmp_path / "other").mkdir()
        assert not storage.finds(tmp_path / "other", name)
        (tmp_path / "link").symlink_to(tmp_path)
        assert storage.finds(tmp_path / "link" / "runs", name)
    assert not storage.finds(tmp_path, name)
    with storage.marker(Path("/proc/self/runs")) as name:
        assert name == ""
    three = roster({"marker": "t"}, {}, {})
    (well,) = ranks.judge_shared(three, [1.0] * 3)
    assert level(well, "3 hosts have the same /r") == OK
    (bad,) = ranks.judge_shared(three, [1.0, 1.0, 0.0])
    assert level(bad, "a file that rank 0 created in /r is missing") == PROBLEM
    assert bad.ranks == (2,)
    (bad,) = ranks.judge_shared(roster({"marker": "t"}, {"run": "/home/x"}), [1.0, 0.0])
    assert level(bad, "the run directory there is /home/x") == PROBLEM
    assert ranks.judge_shared(roster({}, {}), [1.0, 0.0]) == []


def test_doctor_merges_findings_of_ranks():
    shared = Finding("cores", WARNING, "f", "e", ("x", "z"), "HT113")
    own = Finding("torch", PROBLEM, "g", "e", ("y",))
    sent = [findings.to_send([own, shared]), [], findings.to_send([shared, Finding("a", OK, "")])]
    one, two = findings.merged(json.loads(json.dumps(sent)))
    assert (one.subject, one.fixes, one.ranks) == ("cores", ("x", "z"), (0, 2))
    assert (two.subject, two.fixes, two.ranks) == ("torch", ("y",), (0,))
    assert report.text(one, ["a", "b", "c"]).splitlines() == [
        "  warning           cores (ranks 0 and 2 on a and c): f",
        "    expected: e",
        "    fix:      x",
        "    or:       z",
        "    more:     hpctrain explain HT113",
    ]
    assert "(" not in report.text(one, ["a", "b"])


def test_doctor_clocks_of_ranks():
    assert ranks.judge_clocks([1e9, 1e9 + 1.5, 1e9 - 1.5]) == []
    (finding,) = ranks.judge_clocks([1e9, 1e9 + 3, 1e9 - 40])
    assert (level(finding, "up to 40 s behind rank 0's"), finding.ranks) == (WARNING, (1, 2))


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
    wrong = ranks.judge_sums("nccl", [2, 3])
    assert (level(wrong, "wrong sum over nccl"), wrong.ranks) == (PROBLEM, (2, 3))
    assert level(ranks.judge_sums("nccl", [])) == OK


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
    variables = machine.shown_variables({**env, **SECRETS, **known})
    allowed = {"NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_NCCL_"}
    assert known.items() <= variables.items()
    assert not SECRETS.keys() & variables.keys()
    for name in variables.keys() - known.keys():
        assert name.startswith(tuple(allowed)) or name in machine._SHOWN
    assert all("\n" not in value and "\x1b" not in value for value in variables.values())


@pytest.fixture
def run_doctor(monkeypatch, capsys):
    """Return a function that runs the doctor in this process: exit code, output, errors.

    Horovod counts as not installed, because its check imports torch in another interpreter.
    """
    monkeypatch.setattr(software, "horovod", lambda: Finding("horovod", OK, "not installed"))

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
    assert output.keys() == {"machine", "findings", "ranks", "all_reduce"}
    assert (output["ranks"], output["all_reduce"]) == ([], None)
    for finding in output["findings"]:
        assert finding["ranks"] == [0]
        assert bool(finding["fixes"]) == bool(finding["expected"]) == (finding["level"] != OK)
    by_subject = {finding["subject"]: finding for finding in output["findings"]}
    assert by_subject.keys() >= {
        *("python", "torch", "GPUs", "horovod", "Slurm", "open files", "locked memory"),
        *("cores", "/dev/shm", "run directory", "network"),
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
    copied = ("    expected: ", "    fix:      ", "    or:       ")
    assert all(len(line) <= 100 or line.startswith(copied) for line in out.splitlines())


@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "not installed"),
        ("raise OSError('libcudart.so.13: cannot open\\nshared object')", "open shared object"),
        ("", "AttributeError"),
    ],
)
def test_doctor_without_a_working_torch(tmp_path, module, word):
    (tmp_path / "torch.py").write_text(module)
    done = doctor("--json", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 1, done.stderr
    by_subject = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert by_subject["torch"]["level"] == PROBLEM
    assert word in by_subject["torch"]["found"]
    assert "pip install" in by_subject["torch"]["fixes"][0]
    assert by_subject["cores"]["level"] in (OK, WARNING)
    assert "horovod" not in by_subject


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
