"""Fixtures and markers for all tests: tiers, required parts, and checks for leaks.

This file sets markers by what a test uses: `slurm` (the fixture `cluster`), `gpu`
(`gpu`, `nccl`), `browser`, `horovod` (a parameter or fixture of that name), `ranks` (the module
starts forked ranks) and `slow` (in slow_cases.txt). Tests set `slow` and `e2e` themselves.
"""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from hpctrain.cluster import env_vars

TESTS = Path(__file__).resolve().parent
TOP = TESTS.parent
sys.path.insert(0, str(TESTS / "support"))
# Tests on a GPU run the batteries of other folders again.
sys.path += [str(folder) for folder in TESTS.iterdir() if folder.is_dir()]

# Parts that a test may need, and how to get them. Without one, a test is skipped, or fails with
# --strict-parts.
PARTS = {
    "accelerate": "pip install accelerate",
    "browser": "apt-get install chromium-headless-shell",
    "datasets": "pip install datasets",
    "gpu": "a machine with an NVIDIA GPU and its driver",
    "horovod": ".venv/bin/hpctrain horovod build --cpu --mpi",
    "lightning_fabric": "pip install lightning-fabric",
    "mkdocs": "pip install mkdocs-material 'mkdocstrings[python]'",
    "modules": "apt-get install environment-modules",
    "mount": "root, with the right to mount",
    "mpich": "apt-get install mpich",
    "nccl": "an NCCL that lets ranks share a GPU: NCCL_MULTI_RANK_GPU_ENABLE=1, since 2.30",
    "openmpi": "apt-get install openmpi-bin",
    "photographs": "apt-get install mate-backgrounds",
    "pmix": "apt-get install libpmix-dev",
    "shellcheck": "apt-get install shellcheck",
    "shtab": "pip install shtab",
    "slurm": "root, and apt-get install slurm-wlm munge iproute2",
    "ssh": "apt-get install openssh-server",
    "strace": "apt-get install strace",
    "streaming": "pip install --no-deps mosaicml-streaming",
    "submitit": "pip install submitit",
    "timm": "pip install timm",
    "torchao": "pip install torchao",
    "torchdata": "pip install torchdata",
    "webdataset": "pip install webdataset",
}
# Properties of a machine, programs without a Debian package, and packages whose programs are tried:
# --strict-parts does not need them.
OPTIONAL_PARTS = {
    "apptainer": "bash tests/run.sh --slurm newest",
    "fish": "apt-get install fish",
    "flux": "Flux; $HPCTRAIN_TEST_FLUX names its folder",
    "fp8": "a GPU of compute capability 8.9 or later",
    "intelmpi": "Intel MPI; $HPCTRAIN_TEST_INTELMPI names its folder",
    "ipv6": "a kernel with IPv6",
    "lightning": "pip install lightning",
    "no-driver": "a machine without an NVIDIA driver",
    "own-slurm": "bash tests/run.sh without --slurm",
    "openmpi5": "Open MPI 5; $HPCTRAIN_TEST_OPENMPI5 names its folder",
    "transformers": "pip install transformers accelerate",
    "two-cores": "two cores",
    "two-gpus": "two GPUs",
    "zsh": "apt-get install zsh",
}
SLOW = frozenset((TESTS / "slow_cases.txt").read_text().splitlines())
# Costly session fixtures: tests that share one run in one worker.
GROUPS = {"cluster": "slurm", "references": "references", "reproducibility_reference": "references"}


def pytest_addoption(parser):
    group = parser.getgroup("hpctrain")
    group.addoption("--all", action="store_true", help="also the tests that are marked slow")
    group.addoption("--gpu", action="store_true", help="the tests that need a GPU, and only those")
    group.addoption(
        "--strict-parts",
        action="store_true",
        help="a test that lacks a part of the machine fails; without, it is skipped",
    )


def pytest_configure(config):
    # No deadline, for slow machines; and the same examples in each run.
    many = 100 if config.getoption("--all") else 10
    settings.register_profile(
        "tests", deadline=None, max_examples=many, derandomize=True, database=None
    )
    settings.load_profile("tests")


# First, because xdist reads the groups in its hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        mark(item)
    on_gpu, everything = config.getoption("--gpu"), config.getoption("--all")
    selected = [
        item
        for item in items
        if bool(item.get_closest_marker("gpu")) == on_gpu
        and (everything or on_gpu or not item.get_closest_marker("slow"))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
    # Tests with Slurm or ranks begin first, so that no worker ends long after the others.
    items[:] = sorted(selected, key=order)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Escape text that is not UTF-8, which a worker could not send."""
    return escaped((yield))


def escaped(value):
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(key): escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(escaped, value))
    return value


def mark(item):
    fixtures = set(item.fixturenames)
    parameters = getattr(item, "callspec", None)
    words = {str(value) for value in parameters.params.values()} if parameters else set()
    found = {
        "slurm": "cluster" in fixtures,
        "gpu": bool(fixtures & {"gpu", "nccl"}),
        "browser": "browser" in fixtures,
        "horovod": "horovod" in fixtures | words,
        "ranks": hasattr(item.module, "ranks"),
        "slow": bool(SLOW & {item.nodeid, item.nodeid.partition("[")[0]}),
    }
    for name in (name for name, applies in found.items() if applies):
        item.add_marker(name)
    if item.get_closest_marker("xdist_group"):
        return
    group = next((GROUPS[name] for name in GROUPS if name in fixtures), None)
    if group == "slurm" and item.config.getoption("--all"):
        # They take more than an hour on one Slurm, and half of it on each of two.
        group += "-first" if item.path.parent.name < "launch" else "-second"
    if group is None and any(
        definitions[-1].scope == "module"
        for definitions in item._fixtureinfo.name2fixturedefs.values()
    ):
        group = item.module.__name__
    if group:
        item.add_marker(pytest.mark.xdist_group(group))


def order(item):
    costs = ("slurm", "horovod", "ranks", "e2e")
    return next((n for n, name in enumerate(costs) if item.get_closest_marker(name)), len(costs))


@pytest.fixture(scope="session")
def lacking(request):
    """Return a function that skips a test without a part, or fails it with --strict-parts."""

    def lack(part: str, why: str):
        known = PARTS | OPTIONAL_PARTS
        assert part in known, f"{part!r} is in neither table of parts in {__file__}"
        reason = f"{part}: {why} (needs {known[part]})"
        if request.config.getoption("--strict-parts") and part in PARTS:
            pytest.fail(f"left out with --strict: {reason}")
        pytest.skip(reason)

    return lack


@pytest.fixture
def small_disk(lacking, tmp_path):
    """Mount a file system of 2 MB; return its path."""
    path = tmp_path / "small-disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "hpctrain-test", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        lacking("mount", done.stderr.strip())
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="session")
def cluster(lacking):
    """Start a real Slurm of four hosts for this worker."""
    import cluster as slurm

    missing = slurm.available()
    if missing:
        lacking("slurm", missing)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    started = slurm.Cluster(f"{slurm.NAME}-{worker}" if worker else slurm.NAME)
    started.start()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def ssh(cluster, lacking):
    """Return the environment in which ssh reaches the hosts."""
    import launches

    if not (cluster.ssh_folder / "ssh").exists():
        lacking("ssh", "apt-get install openssh-server")
    env = cluster.environ()
    path = f"{cluster.ssh_folder}:{launches.BIN}:{env['PATH']}"
    return {**env, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(params=("auto", "horovod"))  # auto: single for one rank, ddp for more
def run(request, lacking):
    """Return `ranks.run` over each backend: the battery that every backend must pass."""
    import ranks

    if request.param == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    return partial(ranks.run, env={"TEST_BACKEND": request.param})


@pytest.fixture
def gpu(lacking):
    """Return `on_gpu.run`: ranks on the GPUs that this process sees."""
    import on_gpu
    import torch

    if not torch.cuda.is_available():
        lacking("gpu", "torch sees none; nvidia-smi and hpctrain doctor may say why")
    return on_gpu.run


@pytest.fixture
def nccl(gpu, lacking):
    """Return `on_gpu.run` with ranks that share one GPU over NCCL."""
    del gpu
    if refusal := nccl_refusal():
        lacking("nccl", f"NCCL does not let ranks share one GPU: {refusal}")
    return run_on_one_gpu()


def run_on_one_gpu():
    import on_gpu

    from hpctrain.cluster.visible_gpus import CUDA

    env = {CUDA: on_gpu.visible()[0], "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return partial(on_gpu.run, env=env)


@functools.cache
def nccl_refusal() -> str:
    """Return the refusal of an NCCL that does not know the variable, else an empty text."""
    import ranks
    from battery import identity

    from hpctrain.errors import StartError

    results = run_on_one_gpu()(2, identity)
    for result in results:
        # The error of NCCL for torch's "Duplicate GPU detected".
        if isinstance(result, StartError) and "invalid usage" in str(result):
            return result.found
    ranks.values(results)
    return ""


@pytest.fixture(scope="module")
def browser(lacking):
    import browser as real

    if reason := real.why_not():
        lacking("browser", reason)
    with real.browser() as one:
        yield one


def scrubbed_environ():
    names = (name for name in os.environ if not name.startswith("HPCTRAIN_"))
    environ = env_vars.scrubbed({name: os.environ[name] for name in names})
    # The user's folders for files and for the test cluster.
    kept = ("HPCTRAIN_CACHE", "HPCTRAIN_TEST_CLUSTER")
    return environ | {name: os.environ[name] for name in kept if name in os.environ}


def child_processes():
    """Return child processes by id, without those of multiprocessing."""
    children = {}
    for table in Path("/proc/self/task").glob("*/children"):
        try:
            pids = table.read_text().split()
        except FileNotFoundError:  # a thread that has just ended
            continue
        for pid in pids:
            command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "multiprocessing." not in command:
                children[int(pid)] = command
    return children


def socket_inodes():
    """Return the inodes of this process's sockets."""
    sockets = set()
    if not Path("/proc/self/fd").exists():  # on a Mac
        return sockets
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # that of the folder, closed by now
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    return sockets


def listening_sockets(sockets):
    """Return the inodes of sockets on which a process listens."""
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return sockets & {fields[9] for fields in lines if fields[3] == "0A"}


@pytest.fixture(scope="session", autouse=True)
def folder_of_wide_fixtures(tmp_path_factory):
    """Keep what the ranks of a module's fixture write out of the folder in which pytest started."""
    with contextlib.chdir(tmp_path_factory.mktemp("fixtures")):
        yield


@pytest.fixture(autouse=True)
def no_leaks(request, tmp_path, monkeypatch):
    """Unset launchers' variables, hide a Slurm; check that a test leaves no process or thread."""
    clean = scrubbed_environ()
    for name in set(os.environ) - set(clean):
        monkeypatch.delenv(name)
    if Path("/dev/nvidiactl").exists() and not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # these tests use ranks on CPUs
    # Only the tests with the fixture `cluster` use a Slurm: not one that this machine may have.
    slurm = pytest.MonkeyPatch()  # which a test's `monkeypatch.undo()` leaves alone
    slurm.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    monkeypatch.chdir(tmp_path)
    hook = sys.excepthook
    before = dict(os.environ), child_processes(), socket_inodes(), set(threading.enumerate())
    yield
    sys.excepthook = hook
    environ, children, sockets, threads = before
    after = dict(os.environ)
    slurm.undo()
    after.pop("PYTEST_CURRENT_TEST", None)
    # torch's compiler sets it, when the first step or checkpoint imports it.
    if after.pop("TORCHINDUCTOR_CACHE_DIR", None) and "TORCHINDUCTOR_CACHE_DIR" not in environ:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    environ.pop("PYTEST_CURRENT_TEST", None)
    new = {pid: cmd for pid, cmd in child_processes().items() if pid not in children}
    assert not new, f"processes left: {new}"
    fresh = socket_inodes() - sockets
    assert not fresh or not listening_sockets(fresh), "a listening socket is left"
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    assert not left, f"threads left: {left}"
    changed = {k for k in environ.keys() | after.keys() if environ.get(k) != after.get(k)}
    patched = {entry[1] for entry in monkeypatch._setitem}
    assert changed <= patched, f"variables changed: {changed - patched}"


@pytest.fixture(scope="session")
def reproducibility_reference(tmp_path_factory):
    """Train in one process, which accumulates; return the folder with the reference losses."""
    import launches

    folder = tmp_path_factory.mktemp("one-process")
    command = [*launches.LOCAL["python"], str(launches.TWICE), *launches.PARITY]
    done = launches.start(command, folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "fp64" / "run.json").read_text())["world"]["world_size"] == 1
    return folder
