"""The lock of a run directory: refused starts, takeover, and fencing of replaced starts.

The content of the lock file simulates other hosts, boots and jobs. scontrol is a fake: a script on
the PATH with the output of the real one. Processes and their ends are real.
"""

import errno
import fcntl
import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import fake_slurm
import pytest
from processes import until

from hpctrain.cluster.job import Allocation
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.lock import Lock, liveness, record

SHOWN = (
    "JobId=70 JobName=train Priority=1 JobState={word} Reason=None Requeue=1 Restarts={restarts} "
    "BatchFlag=1"
)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def env(tmp_path):
    """Return an environment without Slurm."""
    return {"PATH": str(tmp_path)}


@pytest.fixture
def scontrol(tmp_path):
    """Return a function that makes a fake scontrol, and returns the environment with it."""

    fake = fake_slurm.FakeSlurm(tmp_path)
    fake.jobs(None)

    def make(output="", error="", code=0):
        fake.command("scontrol", output, error, code)
        return {**fake.env, "SLURM_CLUSTER_NAME": "alpha"}

    return make


@pytest.fixture
def info(caplog):
    """Capture the log from INFO on."""
    logger = logging.getLogger("hpctrain")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)  # this also clears the cache of logger levels
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


def job(number="70", restart=0, task=None):
    array = number if task is not None else None
    return Allocation("slurm", number, array, task, restart)


def write_lock(directory, age=0.0, **values_of_start):
    """Write a lock file of another start, with its values; `age` is that of its heartbeat."""
    lock = Lock.take(directory, None, {})
    values = json.loads(lock_path(directory).read_text())
    lock.release()
    values |= {"token": "0" * 32, "user": "ada", **values_of_start}
    lock_path(directory).write_text(json.dumps(values))
    set_age(lock_path(directory), age)


def set_age(file, age):
    os.utime(file, (time.time() - age,) * 2, follow_symlinks=False)


def lock_path(directory):
    return directory.path / ".lock"


def lock_token(directory):
    return json.loads(lock_path(directory).read_text())["token"]


def refusal(directory, allocation, env):
    """Return the message of a refused start; check that the lock is unchanged."""
    before = lock_token(directory)
    with pytest.raises(UsageError) as caught:
        Lock.take(directory, allocation, env)
    assert caught.value.exit_code == 2
    assert caught.value.code == "HT703"
    assert lock_token(directory) == before
    return str(caught.value)


def check_takeover(directory, allocation, env):
    """Take the lock over, commit and release; check that only the flock file remains."""
    before = lock_token(directory)
    lock = Lock.take(directory, allocation, env)
    assert lock_token(directory) != before
    with lock.commit():
        pass
    lock.release()
    assert os.listdir(directory.path) == [".lock.turn"]


# --- one start


def test_lock_is_taken_and_released(directory, env):
    lock = Lock.take(directory, job(restart=2), {**env, "SLURM_CLUSTER_NAME": "alpha"})
    values = json.loads(lock_path(directory).read_text())
    assert (values["job"], values["restart"], values["cluster"]) == ("70", 2, "alpha")
    assert (values["pid"], values["host"]) == (os.getpid(), os.uname().nodename)
    with lock.commit():
        assert lock_path(directory).exists()
    with pytest.raises(ZeroDivisionError), lock.commit():
        raise ZeroDivisionError
    lock.release()
    lock.release()
    assert os.listdir(directory.path) == [".lock.turn"]


def test_lock_file_mode_follows_the_umask(directory, env):
    before = os.umask(0o027)
    try:
        Lock.take(directory, None, env).release()
        lock = Lock.take(directory, None, env)
    finally:
        os.umask(before)
    assert lock_path(directory).stat().st_mode & 0o777 == 0o640
    assert (directory.path / ".lock.turn").stat().st_mode & 0o777 == 0o640
    lock.release()


def test_unwritable_run_directory_is_refused(tmp_path, env):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be locked(.|\n)*--run-dir DIR") as caught:
        Lock.take(RunDirectory(tmp_path / "file" / "run"), None, env)
    assert caught.value.code == "HT702"


def test_heartbeat_renews_the_lock_file(directory, env, monkeypatch):
    monkeypatch.setattr("hpctrain.rundir.lock._HEARTBEAT", 0.02)
    lock = Lock.take(directory, None, env)
    old = time.time() - 1000
    os.utime(lock_path(directory), (old, old))
    until(lambda: lock_path(directory).stat().st_mtime > old + 900)
    lock.release()


def test_heartbeat_of_a_replaced_start_leaves_the_new_lock_alone(directory, env, monkeypatch):
    monkeypatch.setattr("hpctrain.rundir.lock._HEARTBEAT", 0.02)
    lock = Lock.take(directory, job(restart=0), env)
    leave_other = json.loads(lock_path(directory).read_text()) | {"token": "1" * 32, "restart": 1}
    other = lock_path(directory).with_name(".new")
    other.write_text(json.dumps(leave_other))
    set_age(other, 1000)
    os.replace(other, lock_path(directory))
    beats, renew = [], os.utime
    monkeypatch.setattr("hpctrain.rundir.lock.os.utime", lambda file: beats.append(renew(file)))
    until(lambda: len(beats) > 3)
    assert time.time() - lock_path(directory).stat().st_mtime > 900
    lock.release()
    assert lock_token(directory) == "1" * 32


# --- real processes of this host

HOLDS = """
import sys, time
from hpctrain.rundir.lock import Lock
from hpctrain.rundir import RunDirectory
lock = Lock.take(RunDirectory(sys.argv[1]), None, {})
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(directory):
    """Start a process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, directory.path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_start_is_refused_with_the_owner_and_the_fix(directory, holder, env):
    message = refusal(directory, job(), env)
    assert f"process {holder.pid} of " in message
    assert os.uname().nodename in message
    assert "since 20" in message
    assert "its process runs" in message
    assert "--run-dir DIR" in message
    assert f"kill {holder.pid}" in message
    assert f"rm {lock_path(directory)}" in message


def test_stopped_process_keeps_its_lock(directory, holder, env):
    holder.send_signal(signal.SIGSTOP)
    assert "its process runs" in refusal(directory, None, env)


@pytest.mark.parametrize("reaped", [True, False])
def test_lock_of_a_killed_process_is_taken_over(directory, holder, env, info, reaped):
    holder.kill()
    if reaped:
        holder.wait()
    else:
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    check_takeover(directory, None, env)
    assert f"takes over {directory.path} from process {holder.pid}" in info.text
    assert "its process has ended" in info.text


def test_recycled_pid_does_not_keep_a_lock(directory, holder, env):
    values = json.loads(lock_path(directory).read_text())
    lock_path(directory).write_text(json.dumps(values | {"started": values["started"] - 1}))
    check_takeover(directory, None, env)


def test_second_run_in_one_process_takes_over(directory, env):
    first = Lock.take(directory, None, env)
    second = Lock.take(directory, None, env)
    with pytest.raises(CheckpointError, match="fenced off"), first.commit():
        pass
    first.release()
    with second.commit():
        pass
    second.release()


def test_lock_from_before_a_reboot_is_taken_over(directory, env, monkeypatch):
    monkeypatch.setattr(liveness.system, "uptime", lambda: 30.0)
    write_lock(directory, age=40, boot="another")
    check_takeover(directory, None, env)
    write_lock(directory, age=20, boot="another")  # renewed since: a namesake of this host
    assert "last heartbeat" in refusal(directory, None, env)


# --- the age of the heartbeat, where neither /proc nor Slurm shows the owner


@pytest.mark.parametrize("shift", [1, -1])
def test_lock_of_another_host_expires_after_five_minutes(directory, env, shift):
    write_lock(directory, age=290 * shift, host="elsewhere")
    message = refusal(directory, None, env)
    assert "last heartbeat 2" in message
    assert "on elsewhere" in message
    set_age(lock_path(directory), 310 * shift)  # a heartbeat in the future does not count either
    check_takeover(directory, None, env)


@pytest.mark.parametrize("pid", [-1, 0, 2**40])
def test_lock_with_an_impossible_pid_is_taken_over(directory, env, pid):
    write_lock(directory, pid=pid, started=-1, age=301)
    check_takeover(directory, None, env)


@pytest.mark.parametrize(
    ("allocation", "values"),
    [
        (None, {"pid": 2**22 + 1, "namespace": 1}),  # a process of another container
        # Not a job of Slurm.
        *((job(), {"job": name, "host": "elsewhere"}) for name in ("69", "12345.pbs", "--help")),
    ],
)
def test_lock_of_an_unknown_owner_is_judged_by_age(directory, env, allocation, values):
    write_lock(directory, **values)
    assert "last heartbeat" in refusal(directory, allocation, env)
    set_age(lock_path(directory), 301)
    check_takeover(directory, allocation, env)


# --- jobs


def test_requeued_job_takes_over_its_own_lock(directory, env, info):
    write_lock(directory, job="70", job_id="70", restart=0, host="elsewhere")
    check_takeover(directory, job(restart=1), env)
    assert "the job was requeued since" in info.text
    write_lock(directory, job="70_3", job_id="73", restart=1, host="elsewhere")
    check_takeover(directory, job(task=3, restart=2), env)


def test_start_from_before_a_requeue_is_refused(directory, env):
    write_lock(directory, age=1000, job="70", restart=2, host="elsewhere")
    message = refusal(directory, job(restart=1), env)
    assert "this is its restart 1" in message
    assert "job 70 (restart 2)" in message


def test_array_tasks_are_different_jobs(directory, scontrol):
    write_lock(directory, job="70_3", cluster="alpha", restart=0, host="elsewhere")
    env = scontrol(SHOWN.format(word="RUNNING", restarts=0))
    assert "job 70_3 is RUNNING" in refusal(directory, job(task=4, restart=1), env)


@pytest.mark.parametrize("word", ["RUNNING", "PENDING", "COMPLETING"])
def test_live_job_keeps_its_lock(directory, scontrol, word):
    # For any age of the heartbeat, and although its process on this host has ended.
    write_lock(directory, age=1000, job="69", cluster="alpha", pid=2**22 - 1)
    env = scontrol(SHOWN.format(word=word, restarts=0))
    for allocation in (job(restart=3), None):
        message = refusal(directory, allocation, env)
        assert f"Slurm reports that job 69 is {word}" in message
        assert "scancel 69" in message


@pytest.mark.parametrize("word", ["COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL"])
def test_lock_of_an_ended_job_is_taken_over(directory, scontrol, word):
    write_lock(directory, job="69", cluster="alpha", host="elsewhere")
    check_takeover(directory, job(), scontrol(SHOWN.format(word=word, restarts=0)))


def test_lock_of_a_job_unknown_to_slurm_is_taken_over_by_its_user_only(directory, scontrol):
    env = scontrol(error="slurm_load_jobs error: Invalid job id specified", code=1)
    write_lock(
        directory, job="69", cluster="alpha", host="elsewhere", user=record.myself(None, {}).user
    )
    check_takeover(directory, job(), env)
    write_lock(directory, job="69", cluster="alpha", host="elsewhere", user="somebody")
    assert "last heartbeat" in refusal(directory, job(), env)  # jobs may be private


def test_lock_of_a_job_of_another_cluster_is_judged_by_age(directory, scontrol):
    ended = scontrol(SHOWN.format(word="COMPLETED", restarts=0))
    write_lock(directory, job="70", cluster="beta", host="elsewhere")
    assert "last heartbeat" in refusal(directory, job(restart=1), ended)
    assert "last heartbeat" in refusal(directory, job("71"), ended)
    set_age(lock_path(directory), 301)
    check_takeover(directory, job("71"), ended)


def test_job_steps_are_different_starts(directory, scontrol):
    env = {**scontrol("StepId=70.0 State=RUNNING"), "SLURM_STEP_ID": "1"}
    values = {"job": "70", "job_id": "70", "cluster": "alpha", "step": "0", "host": "elsewhere"}
    write_lock(directory, **values)
    assert "step 0 runs" in refusal(directory, job(), env)
    scontrol(error="Job step 70.0 not found", code=1)
    check_takeover(directory, job(), env)
    write_lock(directory, **values | {"step": "1"})  # Slurm cannot tell starts within a step apart
    assert "last heartbeat" in refusal(directory, job(), env)


def test_next_attempt_of_hpctrain_run_takes_over(directory, env):
    write_lock(directory, launch="5f3a", host="lost")
    assert "last heartbeat" in refusal(directory, None, {**env, "HPCTRAIN_START": "5f3b/1"})
    check_takeover(directory, None, {**env, "HPCTRAIN_START": "5f3a/1"})


# --- fencing


def test_replaced_start_is_fenced_from_commit(directory, env):
    old = Lock.take(directory, job(restart=0), env)
    with old.commit():
        pass
    new = Lock.take(directory, job(restart=1), env)
    with pytest.raises(CheckpointError, match=r"fenced off.*now belongs to job 70 \(restart 1\)"):
        old.commit().__enter__()
    old.release()
    with new.commit():
        pass
    new.release()
    for lock in (old, new):  # also after the end of the newer one
        with pytest.raises(CheckpointError, match=r"fenced off.*gone") as caught:
            lock.commit().__enter__()
        assert caught.value.code == "HT704"


def test_takeover_waits_for_a_commit(directory, env):
    old, looks = Lock.take(directory, job(restart=0), env), []

    def clock():  # it stands still, and is read again after each failed attempt
        looks.append(1)
        return 0.0

    other = threading.Thread(
        target=lambda: Lock.take(directory, job(restart=1), env, clock), daemon=True
    )
    with old.commit():
        other.start()
        until(lambda: len(looks) > 4)
        assert json.loads(lock_path(directory).read_text())["restart"] == 0
    other.join(60)
    assert not other.is_alive()
    assert json.loads(lock_path(directory).read_text())["restart"] == 1
    old.release()


def leaping_clock():
    """Return a clock that moves by more than the limit of a turn at each reading."""
    return itertools.count(0.0, 2 * record._TURN).__next__


def test_child_forked_in_a_commit_does_not_hold_the_flock(directory, env):
    lock = Lock.take(directory, None, env)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    with lock.commit():
        child.start()
    with record.turn(lock_path(directory), time.monotonic), pytest.raises(BlockingIOError):
        take_flock(directory)
    take_flock(directory)
    child.kill()
    child.join()
    lock.release()


def take_flock(directory):
    """Take and release the flock, or raise an error if it is held."""
    with open(directory.path / ".lock.turn", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_flock_that_is_never_released_is_ignored_after_a_time(directory, env, info):
    lock = Lock.take(directory, job(restart=0), env)
    with lock.commit():
        Lock.take(directory, job(restart=1), env, leaping_clock()).release()
    assert "not waiting" in info.text
    lock.release()


@pytest.mark.parametrize("error", ["ENOLCK", "ENOTSUP", "ENOSYS"])
def test_file_system_without_flock_still_fences(directory, env, monkeypatch, error):
    def flock(*_):
        raise OSError(getattr(errno, error), "no")

    monkeypatch.setattr(record.fcntl, "flock", flock)
    write_lock(directory, host="elsewhere")
    refusal(directory, job(restart=0), env)
    set_age(lock_path(directory), 301)
    old = Lock.take(directory, job(restart=0), env)
    new = Lock.take(directory, job(restart=1), env)
    with new.commit(), pytest.raises(CheckpointError, match="fenced off"), old.commit():
        pass
    old.release()
    new.release()


# --- files of other programs


def make_foreign(kind, file):
    if kind == "directory":
        file.mkdir()
        (file / "inside").touch()
    elif kind == "link":
        file.symlink_to(file.with_name("target"))
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *("directory", "link", "pipe"),
        *(b"", b"{", b"null", b"[]", b"\xff\xfe", b"{}", b"[" * 50_000, b"x" * 200_000),
        *(b'{"token": 1}', b'{"token": "0"}'),
    ],
)
def test_foreign_lock_file_is_refused_while_new_and_replaced_when_old(directory, env, info, kind):
    directory.path.mkdir()
    target = directory.path / "target"
    target.write_text("foreign")
    make_foreign(kind, lock_path(directory))
    with pytest.raises(UsageError, match=r"rm -r .*\.lock") as caught:
        Lock.take(directory, job(), env)
    assert caught.value.fixes[1:] == ("--run-dir DIR for another directory",)
    assert caught.value.code == "HT703"
    set_age(lock_path(directory), 301)
    lock = Lock.take(directory, job(), env)
    assert "is replaced" in info.text
    assert lock_path(directory).is_file()
    assert not lock_path(directory).is_symlink()
    with lock.commit():
        pass
    assert target.read_text() == "foreign"
    hostile_later = lock_path(directory)
    hostile_later.unlink()
    make_foreign(kind, hostile_later)
    with pytest.raises(CheckpointError, match="fenced off"), lock.commit():
        pass
    lock.release()


@pytest.mark.parametrize(
    "values",
    [
        *({"pid": pid} for pid in ("1", True, None)),
        *({"host": "\x1b[2Jhost"}, {"user": "ada\nroot"}, {"job": "9" * 300}),
    ],
)
def test_lock_file_with_invalid_values_is_refused(directory, env, values):
    write_lock(directory, **values)
    with pytest.raises(UsageError, match=r"incomplete, or not written by hpctrain(.|\n)*rm -r"):
        Lock.take(directory, None, env)


def test_truncated_lock_file_has_no_owner(directory, env):
    write_lock(directory)
    content = lock_path(directory).read_bytes()
    for length in range(0, len(content), 7):
        lock_path(directory).write_bytes(content[:length])
        assert record.look(lock_path(directory)).owner is None


@pytest.mark.parametrize("content", ["directory", "link"])
def test_foreign_flock_file_does_not_block_a_start(directory, env, content):
    directory.path.mkdir()
    make_foreign(content, directory.path / ".lock.turn")
    lock = Lock.take(directory, None, env)
    with lock.commit():
        pass
    lock.release()


# --- several starts at once


def take_lock(directory, allocation, barrier, results, number):
    barrier.wait()
    try:
        lock = Lock.take(directory, allocation, {})
    except UsageError as error:
        results.put((number, str(error)))
        return
    with lock.commit():
        results.put((number, "won"))
    time.sleep(600)  # it must run while the others read the lock


@pytest.mark.parametrize("before", ["nothing", "dead", "own", "old rubbish"])
def test_exactly_one_of_several_starts_wins_the_lock(directory, before):
    restart = 0
    if before == "dead":
        write_lock(directory, age=400, host="elsewhere")
    elif before == "own":
        write_lock(directory, job="70", host="elsewhere")
        restart = 1
    elif before == "old rubbish":
        directory.path.mkdir()
        lock_path(directory).touch()
        set_age(lock_path(directory), 400)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        content, age = (
            (lock_path(directory).read_bytes(), 400) if lock_path(directory).exists() else (b"", 0)
        )
        barrier, results = context.Barrier(4), context.Queue()
        processes = [
            context.Process(
                target=take_lock, args=(directory, job(restart=restart), barrier, results, n)
            )
            for n in range(4)
        ]
        for process in processes:
            process.start()
        outcomes = [results.get(timeout=60)[1] for _ in processes]
        for process in processes:
            process.kill()
            process.join()
        assert outcomes.count("won") == 1, outcomes
        assert all("its process runs" in text for text in outcomes if text != "won")
        lock_path(directory).unlink()
        if before != "nothing":
            lock_path(directory).write_bytes(content)
            set_age(lock_path(directory), age)
