"""Facts about a process from /proc."""

import os
import subprocess
import sys
import time

import pytest

from hpctrain.cluster import proc

ABSENT = 2**22 + 1  # above the largest process id of Linux


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


def test_stat_of_a_process_with_parentheses_in_its_name(child):
    found = proc.stat(child.pid)
    assert (found.state in "RS", found.parent) == (True, os.getpid())
    assert found.started == proc.started(child.pid) >= proc.stat(os.getpid()).started
    assert proc.text(f"{child.pid}/comm") == "a) R 1 (b"
    assert proc.text(f"{child.pid}/cmdline").split("\0")[1] == "-c"


def test_environment_of_a_process(child):
    environment = proc.environment(child.pid)
    assert (environment["NAME"], environment["EMPTY"]) == ("a=\udcff", "")


def test_ended_process_has_no_state(child):
    child.kill()
    end = time.monotonic() + 10
    while proc.stat(child.pid).state and time.monotonic() < end:  # its parent has not waited for it
        time.sleep(0.01)
    assert proc.stat(child.pid).state == ""
    assert proc.started(child.pid) == 0


def test_family_and_threads_of_a_process(child):
    assert child.pid in proc.family(os.getpid())
    assert proc.family(child.pid) == [child.pid]
    assert proc.threads(child.pid) == [f"{child.pid}/task/{child.pid}"]
    (thread,) = proc.stats([*proc.threads(child.pid), ABSENT])
    assert (thread.started, thread.seconds >= 0) == (proc.started(child.pid), True)


def test_absent_process():
    with pytest.raises(FileNotFoundError):
        proc.stat(ABSENT)
    assert proc.started(ABSENT) is None
    assert proc.environment(ABSENT) is None
    assert proc.text(f"{ABSENT}/comm") == ""


def test_namespace_is_that_of_the_link():
    assert os.readlink("/proc/self/ns/pid") == f"pid:[{proc.namespace()}]"
