"""What the operating system knows: from Linux's /proc, and from ps(1) where there is none."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpctrain
from hpctrain.cluster import system

ABSENT = 2**22 + 1  # above the largest process id of Linux
PACKAGE = Path(hpctrain.__file__).parent


@pytest.fixture
def child():
    """A program with an odd name and environment."""
    code = (
        "import pathlib, time; "
        "pathlib.Path('/proc/self/comm').write_text('a) R 1 (b'); print(flush=True); time.sleep(60)"
    )
    env = {b"NAME": b"a=\xff", b"EMPTY": b""}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def without_proc(monkeypatch):
    """A system on which ps(1) answers, as on macOS."""
    monkeypatch.setattr(system, "COMPLETE", False)
    monkeypatch.setattr(system, "_LISTS_CHILDREN", False)


@pytest.fixture(params=["proc", "ps"])
def source(request):
    if request.param == "ps":
        request.getfixturevalue("without_proc")


def test_stat_of_a_process_with_parentheses_in_its_name(child):
    found = system.stat(child.pid)
    assert (found.state in "RS", found.parent) == (True, os.getpid())
    assert found.started == system.started(child.pid) >= system.stat(os.getpid()).started
    assert system.name(child.pid) == "a) R 1 (b"
    assert system.arguments(child.pid)[1] == "-c"


def test_ps_tells_what_proc_tells(child, monkeypatch):
    exact, start, age = (one(child.pid) for one in (system.stat, system.start_time, system.age))
    monkeypatch.setattr(system, "COMPLETE", False)
    found = system.stat(child.pid)
    assert found.state in "RS"
    assert found.parent == exact.parent
    assert abs(found.seconds - exact.seconds) < 2
    assert abs(found.started - start) <= 1
    assert system.start_time(child.pid) == system.started(child.pid) == found.started
    assert abs(system.age(child.pid) - age) < 10
    assert system.arguments(child.pid)[:2] == [sys.executable, "-c"]
    assert system.main_thread(child.pid).parent == os.getpid()
    assert system.private_memory(child.pid) > 1 << 20


def test_processor_time_of_ps_is_in_seconds(without_proc):
    end = time.process_time() + 2.5
    while time.process_time() < end:
        pass
    assert system.stat(os.getpid()).seconds == pytest.approx(time.process_time(), abs=2)


def test_environment_of_a_process(child):
    environment = system.environment(child.pid)
    assert (environment["NAME"], environment["EMPTY"]) == ("a=\udcff", "")


def test_ended_process_has_no_state(child, source):
    child.kill()
    end = time.monotonic() + 10
    while system.stat(child.pid).state and time.monotonic() < end:  # its parent has not waited
        time.sleep(0.01)
    assert system.stat(child.pid).state == ""
    assert system.started(child.pid) == 0


def test_family_has_the_children_of_children(child, source):
    family = system.family(os.getpid())
    assert family[0] == os.getpid()
    assert child.pid in family
    assert child.pid in system.children(os.getpid())
    assert system.family(child.pid) == [child.pid]


def test_children_without_a_list_of_the_kernel(child, monkeypatch):
    monkeypatch.setattr(system, "_LISTS_CHILDREN", False)
    assert child.pid in system.family(os.getpid())


def test_threads_of_a_process(child):
    (thread,) = system.threads(child.pid)
    assert (thread.started, thread.seconds >= 0) == (system.started(child.pid), True)
    assert len(system.stats([child.pid, ABSENT])) == 1


def test_absent_process(source):
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        system.stat(ABSENT)
    assert system.started(ABSENT) is None
    assert system.environment(ABSENT) is None
    assert system.name(ABSENT) == ""
    assert system.private_memory(ABSENT) == 0


@pytest.mark.parametrize("keeps", [True, False], ids=["waitid", "waitpid"])
@pytest.mark.parametrize("end", [(True, 3), (False, 9)], ids=["exit", "signal"])
def test_end_of_a_child_is_told_once_it_has_ended(end, keeps, monkeypatch):
    if not keeps:
        monkeypatch.delattr(os, "waitid")
    code = f"import os; input(); os.{'_exit(3)' if end[0] else 'kill(os.getpid(), 9)'}"
    reader, writer = os.pipe()
    files = [(os.POSIX_SPAWN_DUP2, reader, 0), (os.POSIX_SPAWN_CLOSE, writer)]
    pid = os.posix_spawn(sys.executable, ["python", "-c", code], os.environ, file_actions=files)
    os.close(reader)
    before = system.ended(pid)
    os.write(writer, b"\n")
    os.close(writer)
    deadline, found = time.monotonic() + 60, None
    while found is None and time.monotonic() < deadline:
        found = system.ended(pid)
        time.sleep(0.01)
    if keeps:
        assert system.ended(pid) == found
        os.waitpid(pid, 0)
    assert (before, found) == (None, end)


def test_namespace_is_that_of_the_link():
    assert os.readlink("/proc/self/ns/pid") == f"pid:[{system.namespace()}]"


def test_all_memory_is_known_without_proc(without_proc, tmp_path):
    exact = system.meminfo("MemTotal")
    assert system.meminfo("MemTotal", tmp_path) == pytest.approx(exact, rel=0.1)
    assert system.meminfo("MemAvailable", tmp_path) is None


def _names(file):
    """Return what a module says in code that only the module of the system may say."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        text = node.value if isinstance(node, ast.Constant) else ""
        text = node.attr if isinstance(node, ast.Attribute) else text
        text = node.id if isinstance(node, ast.Name) else text
        if not isinstance(text, str) or text.count("\n") or " " in text:
            continue  # a docstring, or a text for people
        if text.startswith(("/proc", "/dev/shm", "sched_")) or "prctl" in text:
            found.add(text)
    return found


def test_one_module_asks_linux():
    found = {
        str(file.relative_to(PACKAGE)): names
        for file in sorted(PACKAGE.rglob("*.py"))
        if (names := _names(file))
    }
    assert found.keys() == {"cluster/system.py"}
