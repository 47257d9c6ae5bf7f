"""`hpctrain run` names the rank that failed first, and shows one traceback."""

import os
from pathlib import Path

import blame
import launches
import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("kind", "victim", "moment"),
    [
        ("kill", 1, "after 3"),
        *(
            pytest.param(kind, victim, moment, marks=pytest.mark.slow)
            for kind, victim, moment in [
                ("mismatch", 2, "open"),
                ("mismatch", 1, "step 1"),
                ("exception", 0, "step 2"),
                ("exception", 2, "sum"),
                ("abort", 1, "step 1"),
                ("segfault", 2, "after 1"),
                ("exit", 1, "step 0"),
                ("missing", 2, "before"),
                ("mismatch", 1, "step 3"),
                ("abort", 0, "open"),
                ("mismatch", 0, "run"),
                ("mismatch", 2, "end"),
                ("kill", 0, "end"),
            ]
        ),
    ],
)
@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=pytest.mark.slow)])
def test_rank_that_failed_first_is_named(kind, victim, moment, backend):
    named, output = blame.start(kind, victim, moment, backend)
    assert named == victim, output
    assert output.count("Traceback (most recent call last)") <= 1, output


@pytest.mark.slow
@pytest.mark.parametrize("place", blame.PLACES)
@pytest.mark.parametrize("fault", blame.FAULTS)
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_rank_that_gets_a_fault_is_named_within_the_learnt_timeout(fault, place, backend):
    """Make a fault of NVIDIA's resiliency extension in one rank."""
    victim = (blame.FAULTS.index(fault) + blame.PLACES.index(place)) % blame.RANKS
    named, seconds, output = blame.start_faulty(fault, victim, place, backend)
    assert named == victim, output
    assert seconds < 60, output


LINGERS = """
import atexit, signal
import torch
import hpctrain

rank = hpctrain.detect().rank
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit.register(signal.pause)
with hpctrain.Session(batch_size=4) as session:
    if rank == 1:
        raise ValueError("the cause")
    session.sum(1)
"""


@pytest.mark.slow  # `hpctrain run` waits five seconds for the end of the rank
def test_rank_that_failed_first_is_named_although_it_does_not_end_by_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LINGERS)
    command = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node", "3", script]
    done = launches.start(command, tmp_path)
    assert "rank 1 failed first, with exit code 1: ValueError: the cause" in done.stderr
    assert done.returncode == 1


def test_traceback_that_all_ranks_have_is_shown_once(tmp_path):
    output = run_failing_ranks(tmp_path)
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.count("ZeroDivisionError: division by zero") == 2, output
    assert "failed first, with exit code 1: ZeroDivisionError: division by zero" in output


# Rank 1 fails first, but another rank is the first to print.
OVERTAKEN = """
import os, time, traceback
from pathlib import Path
from hpctrain.process import failure_record

rank, folder = int(os.environ["RANK"]), Path(os.environ["HPCTRAIN_EVIDENCE"])

def wait_until(condition):
    while not condition():
        time.sleep(0.01)

try:
    1 / 0
except ZeroDivisionError as error:
    if rank != 1:
        wait_until(lambda: 1 in failure_record.failures(folder))
    failure_record.note_failure(rank, error, os.environ)
    if rank == 1:
        wait_until(lambda: list(folder.glob("shown-*")))
    if failure_record.shows(os.environ):
        traceback.print_exc()
    os._exit(1)
"""


def test_traceback_of_another_rank_is_not_shown_again(tmp_path):
    output = run_failing_ranks(tmp_path, OVERTAKEN)
    assert output.count("Traceback (most recent call last)") == 1, output
    assert "rank 1 failed first, with exit code 1: ZeroDivisionError: division by zero" in output


LEAVES = """
import os, hpctrain

with hpctrain.Session(batch_size=1) as session:
    if session.world.rank == 1:
        os._exit(0)
    session.sum(1)
"""


def test_rank_that_leaves_with_exit_code_0_is_named(tmp_path):
    output = run_failing_ranks(tmp_path, LEAVES)
    assert "with exit code 1, after the end of rank 1 with exit code 0: rank " in output


ZERO = "import hpctrain\nwith hpctrain.Session(batch_size=1):\n    1 / 0\n"


def run_failing_ranks(folder, text=ZERO):
    script = folder / "train.py"
    script.write_text(text)
    command = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node", "3", script]
    return launches.start(command, folder).stderr


def test_ranks_without_a_session_are_named_at_the_end(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    command = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node", "2", script]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0
    assert "none of the 2 ranks has opened a Session" in done.stderr
    module = [*command[:-1], "-m", "hpctrain", "explain"]
    done = launches.start(module, tmp_path)
    assert done.returncode == 0
    assert "Session" not in done.stderr


GREEDY = """
import hpctrain

world = hpctrain.detect()
if world.rank == 1:
    kept = [bytearray(b"x") * 2**20 for _ in range(10_000)]
"""


@pytest.fixture
def memory_of_300_mb(lacking):
    """Make a cgroup with a limit, as Slurm does for a job; return the file to enter it."""
    top = Path("/sys/fs/cgroup/memory")
    name, group = "memory.limit_in_bytes", top / f"hpctrain-tests-{os.getpid()}"
    if not top.is_dir():
        name, group = "memory.max", Path("/sys/fs/cgroup") / group.name
    try:
        group.mkdir()
    except OSError as error:
        lacking("mount", f"a cgroup: {error}")
    try:
        (group / name).write_text(str(300 * 2**20))
        yield group / "cgroup.procs"
    except OSError as error:
        lacking("mount", f"a cgroup with a limit: {error}")
    finally:
        group.rmdir()


def test_rank_that_uses_up_the_memory_of_the_job_is_named_with_the_limit(
    memory_of_300_mb, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(GREEDY)
    run = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node", "3", script]
    done = launches.start(
        ["sh", "-c", 'echo $$ >"$0"; exec "$@"', memory_of_300_mb, *run], tmp_path
    )
    assert (
        "rank 1 failed first, with signal SIGKILL, after the kernel had killed a process on its "
        "host for lack of memory (limit there: 0.3 GiB)"
    ) in done.stderr
    assert done.returncode == 128 + 9
