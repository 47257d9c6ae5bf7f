"""What every test gets: an environment without launchers, and a check that it leaves nothing."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import settings

from hpctrain import variables

sys.path.insert(0, str(Path(__file__).parent))

TOP = Path(__file__).resolve().parent.parent
# What a run of the tests may own; where it does, a skipped test of that part is an error.
PARTS = (
    *("slurm", "fashion-mnist", "shellcheck", "openmpi", "mpich", "pmix", "submitit"),
    *("horovod", "ssh", "openmpi5", "intelmpi", "ipv6", "two-cores", "no-driver"),
    "gpu",
    *("strace", "mount", "modules", "browser", "photographs"),
)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also the tests that take minutes")
    parser.addoption(
        "--require",
        action="append",
        default=[],
        choices=PARTS,
        help="a part that has to be there: its tests may not be skipped",
    )


def pytest_configure(config):
    # Slow machines are no failure, and a test that passed passes again.
    many = 100 if config.getoption("--long") else 30
    settings.register_profile(
        "tests", deadline=None, max_examples=many, derandomize=True, database=None
    )
    settings.load_profile("tests")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def lacking(request):
    """Skip for want of a part, or fail where this run owns it."""

    def lack(part: str, why: str):
        if part in request.config.getoption("--require"):
            pytest.fail(f"{part} was required: {why}")
        pytest.skip(f"{part}: {why}")

    return lack


@pytest.fixture(scope="session")
def fashion_mnist(lacking):
    folder = Path("/usr/share/datasets/fashion-mnist")
    if not folder.is_dir():
        lacking("fashion-mnist", "apt-get install dataset-fashion-mnist")
    return folder


def _scrubbed():
    names = (name for name in os.environ if not name.startswith("HPCTRAIN_"))
    kept = variables.scrubbed({name: os.environ[name] for name in names})
    if "HPCTRAIN_CACHE" in os.environ:
        kept["HPCTRAIN_CACHE"] = os.environ["HPCTRAIN_CACHE"]
    return kept


def _children():
    """The processes that this one started and has not reaped, but for multiprocessing's own."""
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


def _sockets():
    """The inodes of this process's sockets."""
    sockets = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # the folder's own, closed by now
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    return sockets


def _listening(sockets):
    """Those on which a process listens."""
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return sockets & {fields[9] for fields in lines if fields[3] == "0A"}


@pytest.fixture(autouse=True)
def _leaves_nothing(request, tmp_path, monkeypatch):
    """No launcher's variables at the start; no variable, process, thread or port at the end."""
    clean = _scrubbed()
    for name in set(os.environ) - set(clean):
        monkeypatch.delenv(name)
    if Path("/dev/nvidiactl").exists() and not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # these tests are of ranks on CPUs
    monkeypatch.chdir(tmp_path)
    hook = sys.excepthook
    before = dict(os.environ), _children(), _sockets(), set(threading.enumerate())
    yield
    sys.excepthook = hook
    environ, children, sockets, threads = before
    after = dict(os.environ)
    after.pop("PYTEST_CURRENT_TEST", None)
    environ.pop("PYTEST_CURRENT_TEST", None)
    new = {pid: cmd for pid, cmd in _children().items() if pid not in children}
    assert not new, f"processes left: {new}"
    fresh = _sockets() - sockets
    assert not fresh or not _listening(fresh), "a listening socket is left"
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    assert not left, f"threads left: {left}"
    changed = {k for k in environ.keys() | after.keys() if environ.get(k) != after.get(k)}
    patched = {entry[1] for entry in monkeypatch._setitem}
    assert changed <= patched, f"variables changed: {changed - patched}"


@pytest.fixture(scope="session")
def sameness_reference(fashion_mnist, tmp_path_factory):
    """One process, which accumulates: the losses that every other start has to show."""
    import launches

    folder = tmp_path_factory.mktemp("one-process")
    command = [*launches.LOCAL["python"], str(launches.TWICE), *launches.SAMENESS]
    done = launches.start(command, folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "fp64" / "run.json").read_text())["world"]["world_size"] == 1
    return folder
