"""One run, one directory: who is refused, who takes over, and who may not commit any more.

Other hosts, boots and jobs are simulated by what the lock file says; scontrol is a fake, a script
on the PATH that says what the real one said. Processes and their ends are real.
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
from hpctrain.rundir.lock import Lock, liveness, mutex, record

SHOWN = (
    "JobId=70 JobName=train Priority=1 JobState={word} Reason=None Requeue=1 Restarts={restarts} "
    "BatchFlag=1"
)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def env(tmp_path):
    """An environment without Slurm."""
    return {"PATH": str(tmp_path)}


@pytest.fixture
def scontrol(tmp_path):
    """A function that puts a fake scontrol on the PATH, and gives the environment with it."""

    fake = fake_slurm.FakeSlurm(tmp_path)
    fake.jobs(None)

    def put(says="", error="", code=0):
        fake.command("scontrol", says, error, code)
        return {**fake.env, "SLURM_CLUSTER_NAME": "alpha"}

    return put


@pytest.fixture
def info(caplog):
    """What is said, as text."""
    logger = logging.getLogger("hpctrain")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)  # which also forgets what was decided under the one before
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


def job(number="70", restart=0, task=None):
    array = number if task is not None else None
    return Allocation("slurm", number, array, task, restart)


def leave(directory, age=0.0, **said):
    """Leave a lock file as another start would; `said` are its values that differ from mine."""
    lock = Lock.take(directory, None, {})
    values = json.loads(path(directory).read_text())
    lock.release()
    values |= {"token": "0" * 32, "user": "ada", **said}
    path(directory).write_text(json.dumps(values))
    grow_old(path(directory), age)


def grow_old(file, age):
    os.utime(file, (time.time() - age,) * 2, follow_symlinks=False)


def path(directory):
    return directory.path / ".lock"


def token(directory):
    return json.loads(path(directory).read_text())["token"]


def refused(directory, allocation, env):
    """The message with which a start is refused; the lock is as before."""
    before = token(directory)
    with pytest.raises(UsageError) as caught:
        Lock.take(directory, allocation, env)
    assert caught.value.exit_code == 2
    assert caught.value.code == "HT703"
    assert token(directory) == before
    return str(caught.value)


def taken_over(directory, allocation, env):
    """Take over, commit, release; nothing but the file for the turns is left."""
    before = token(directory)
    lock = Lock.take(directory, allocation, env)
    assert token(directory) != before
    with lock.commit():
        pass
    lock.release()
    assert os.listdir(directory.path) == [".lock.turn"]


# --- an ordinary life


def test_lock_is_taken_and_released(directory, env):
    lock = Lock.take(directory, job(restart=2), {**env, "SLURM_CLUSTER_NAME": "alpha"})
    said = json.loads(path(directory).read_text())
    assert (said["job"], said["restart"], said["cluster"]) == ("70", 2, "alpha")
    assert (said["pid"], said["host"]) == (os.getpid(), os.uname().nodename)
    with lock.commit():
        assert path(directory).exists()
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
    assert path(directory).stat().st_mode & 0o777 == 0o640
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
    os.utime(path(directory), (old, old))
    until(lambda: path(directory).stat().st_mtime > old + 900)
    lock.release()


def test_heartbeat_of_a_replaced_start_leaves_the_new_lock_alone(directory, env, monkeypatch):
    monkeypatch.setattr("hpctrain.rundir.lock._HEARTBEAT", 0.02)
    lock = Lock.take(directory, job(restart=0), env)
    leave_other = json.loads(path(directory).read_text()) | {"token": "1" * 32, "restart": 1}
    other = path(directory).with_name(".new")
    other.write_text(json.dumps(leave_other))
    grow_old(other, 1000)
    os.replace(other, path(directory))
    beats, renew = [], os.utime
    monkeypatch.setattr("hpctrain.rundir.lock.os.utime", lambda file: beats.append(renew(file)))
    until(lambda: len(beats) > 3)
    assert time.time() - path(directory).stat().st_mtime > 900
    lock.release()
    assert token(directory) == "1" * 32


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
    """A process that has the directory, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, directory.path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_start_is_refused_with_the_owner_and_the_fix(directory, holder, env):
    said = refused(directory, job(), env)
    assert f"process {holder.pid} of " in said
    assert os.uname().nodename in said
    assert "since 20" in said
    assert "its process runs" in said
    assert "--run-dir DIR" in said
    assert f"kill {holder.pid}" in said
    assert f"rm {path(directory)}" in said


def test_stopped_process_keeps_its_lock(directory, holder, env):
    holder.send_signal(signal.SIGSTOP)
    assert "its process runs" in refused(directory, None, env)


@pytest.mark.parametrize("reaped", [True, False])
def test_lock_of_a_killed_process_is_taken_over(directory, holder, env, info, reaped):
    holder.kill()
    if reaped:
        holder.wait()
    else:
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    taken_over(directory, None, env)
    assert f"takes over {directory.path} from process {holder.pid}" in info.text
    assert "its process is gone" in info.text


def test_recycled_pid_does_not_keep_a_lock(directory, holder, env):
    said = json.loads(path(directory).read_text())
    path(directory).write_text(json.dumps(said | {"started": said["started"] - 1}))
    taken_over(directory, None, env)


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
    monkeypatch.setattr(liveness, "_uptime", lambda: 30.0)
    leave(directory, age=40, boot="another")
    taken_over(directory, None, env)
    leave(directory, age=20, boot="another")  # renewed since: another host of the same name
    assert "last heard of" in refused(directory, None, env)


# --- age, where nobody can be asked


@pytest.mark.parametrize("shift", [1, -1])
def test_lock_of_another_host_expires_after_five_minutes(directory, env, shift):
    leave(directory, age=290 * shift, host="elsewhere")
    said = refused(directory, None, env)
    assert "last heard of 2" in said
    assert "on elsewhere" in said
    grow_old(path(directory), 310 * shift)  # a time to come is no sign of life either
    taken_over(directory, None, env)


@pytest.mark.parametrize("pid", [-1, 0, 2**40])
def test_lock_with_an_impossible_pid_is_taken_over(directory, env, pid):
    leave(directory, pid=pid, started=-1, age=301)
    taken_over(directory, None, env)


@pytest.mark.parametrize(
    ("allocation", "said"),
    [
        (None, {"pid": 2**22 + 1, "namespace": "pid:[1]"}),  # of another container
        # No job of Slurm's.
        *((job(), {"job": name, "host": "elsewhere"}) for name in ("69", "12345.pbs", "--help")),
    ],
)
def test_lock_is_judged_by_age_where_nobody_can_be_asked(directory, env, allocation, said):
    leave(directory, **said)
    assert "last heard of" in refused(directory, allocation, env)
    grow_old(path(directory), 301)
    taken_over(directory, allocation, env)


# --- jobs


def test_requeued_job_takes_over_its_own_lock(directory, env, info):
    leave(directory, job="70", job_id="70", restart=0, host="elsewhere")
    taken_over(directory, job(restart=1), env)
    assert "the job was requeued since" in info.text
    leave(directory, job="70_3", job_id="73", restart=1, host="elsewhere")
    taken_over(directory, job(task=3, restart=2), env)


def test_start_from_before_a_requeue_is_refused(directory, env):
    leave(directory, age=1000, job="70", restart=2, host="elsewhere")
    said = refused(directory, job(restart=1), env)
    assert "this is its start 1" in said
    assert "job 70 (restart 2)" in said


def test_array_tasks_are_different_jobs(directory, scontrol):
    leave(directory, job="70_3", cluster="alpha", restart=0, host="elsewhere")
    env = scontrol(SHOWN.format(word="RUNNING", restarts=0))
    assert "job 70_3 is RUNNING" in refused(directory, job(task=4, restart=1), env)


@pytest.mark.parametrize("word", ["RUNNING", "PENDING", "COMPLETING"])
def test_live_job_keeps_its_lock(directory, scontrol, word):
    # However long it was silent, and although its process of this host is gone.
    leave(directory, age=1000, job="69", cluster="alpha", pid=2**22 - 1)
    env = scontrol(SHOWN.format(word=word, restarts=0))
    for allocation in (job(restart=3), None):
        said = refused(directory, allocation, env)
        assert f"Slurm says that job 69 is {word}" in said
        assert "scancel 69" in said


@pytest.mark.parametrize("word", ["COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL"])
def test_lock_of_an_ended_job_is_taken_over(directory, scontrol, word):
    leave(directory, job="69", cluster="alpha", host="elsewhere")
    taken_over(directory, job(), scontrol(SHOWN.format(word=word, restarts=0)))


def test_lock_of_a_job_unknown_to_slurm_is_taken_over_by_its_user_alone(directory, scontrol):
    env = scontrol(error="slurm_load_jobs error: Invalid job id specified", code=1)
    leave(directory, job="69", cluster="alpha", host="elsewhere", user=record.myself(None, {}).user)
    taken_over(directory, job(), env)
    leave(directory, job="69", cluster="alpha", host="elsewhere", user="somebody")
    assert "last heard of" in refused(directory, job(), env)  # jobs may be private


def test_job_id_of_another_cluster_is_judged_by_age(directory, scontrol):
    ended = scontrol(SHOWN.format(word="COMPLETED", restarts=0))
    leave(directory, job="70", cluster="beta", host="elsewhere")
    assert "last heard of" in refused(directory, job(restart=1), ended)
    assert "last heard of" in refused(directory, job("71"), ended)
    grow_old(path(directory), 301)
    taken_over(directory, job("71"), ended)


def test_job_steps_are_different_starts(directory, scontrol):
    env = {**scontrol("StepId=70.0 State=RUNNING"), "SLURM_STEP_ID": "1"}
    theirs = {"job": "70", "job_id": "70", "cluster": "alpha", "step": "0", "host": "elsewhere"}
    leave(directory, **theirs)
    assert "step 0 runs" in refused(directory, job(), env)
    scontrol(error="Job step 70.0 not found", code=1)
    taken_over(directory, job(), env)
    leave(directory, **theirs | {"step": "1"})  # within a step nobody can be asked
    assert "last heard of" in refused(directory, job(), env)


def test_elastic_restart_takes_over(directory, env):
    leave(directory, launch="5f3a", host="lost")
    taken_over(directory, None, {**env, "HPCTRAIN_START": "5f3a"})
    # `hpctrain run` without --elastic has an address there, which another start may have later.
    lock = Lock.take(directory, None, {**env, "HPCTRAIN_START": "127.0.0.1:2000"})
    assert json.loads(path(directory).read_text())["launch"] == ""
    lock.release()


# --- fencing


def test_replaced_start_is_fenced_from_commit(directory, env):
    old = Lock.take(directory, job(restart=0), env)
    with old.commit():
        pass
    new = Lock.take(directory, job(restart=1), env)
    with pytest.raises(CheckpointError, match=r"fenced off.*now that of job 70 \(restart 1\)"):
        old.commit().__enter__()
    old.release()
    with new.commit():
        pass
    new.release()
    for held in (old, new):  # also when the newer one has ended
        with pytest.raises(CheckpointError, match=r"fenced off.*gone") as caught:
            held.commit().__enter__()
        assert caught.value.code == "HT704"


def test_takeover_waits_for_a_commit(directory, env):
    old, looks = Lock.take(directory, job(restart=0), env), []

    def clock():  # it stands still, and is read once more each time that the turn is not given
        looks.append(1)
        return 0.0

    other = threading.Thread(
        target=lambda: Lock.take(directory, job(restart=1), env, clock), daemon=True
    )
    with old.commit():
        other.start()
        until(lambda: len(looks) > 4)
        assert json.loads(path(directory).read_text())["restart"] == 0
    other.join(60)
    assert not other.is_alive()
    assert json.loads(path(directory).read_text())["restart"] == 1
    old.release()


def leaping_clock():
    """Let more than the time for a turn go by between one look and the next."""
    return itertools.count(0.0, 2 * mutex._TURN).__next__


def test_child_forked_in_a_commit_does_not_hold_the_flock(directory, env):
    lock = Lock.take(directory, None, env)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    with lock.commit():
        child.start()
    with mutex.turn(path(directory)), pytest.raises(BlockingIOError):
        take_flock(directory)
    take_flock(directory)
    child.kill()
    child.join()
    lock.release()


def take_flock(directory):
    """Take the flock and give it back, or raise where it is held."""
    with open(directory.path / ".lock.turn", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_flock_that_is_never_released_is_given_up(directory, env, info):
    lock = Lock.take(directory, job(restart=0), env)
    with lock.commit():
        Lock.take(directory, job(restart=1), env, leaping_clock()).release()
    assert "not waiting" in info.text
    lock.release()


@pytest.mark.parametrize("error", ["ENOLCK", "ENOTSUP", "ENOSYS"])
def test_file_system_without_flock_still_fences(directory, env, monkeypatch, error):
    def flock(*_):
        raise OSError(getattr(errno, error), "no")

    monkeypatch.setattr(mutex.fcntl, "flock", flock)
    leave(directory, host="elsewhere")
    refused(directory, job(restart=0), env)
    grow_old(path(directory), 301)
    old = Lock.take(directory, job(restart=0), env)
    new = Lock.take(directory, job(restart=1), env)
    with new.commit(), pytest.raises(CheckpointError, match="fenced off"), old.commit():
        pass
    old.release()
    new.release()


# --- files that no start wrote


def hostile(kind, file):
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
def test_foreign_lock_file_is_refused_while_young_and_replaced_when_old(directory, env, info, kind):
    directory.path.mkdir()
    target = directory.path / "target"
    target.write_text("somebody's")
    hostile(kind, path(directory))
    with pytest.raises(UsageError, match=r"rm -r .*\.lock") as caught:
        Lock.take(directory, job(), env)
    assert caught.value.fixes[1:] == ("--run-dir DIR",)
    assert caught.value.code == "HT703"
    grow_old(path(directory), 301)
    lock = Lock.take(directory, job(), env)
    assert "is replaced" in info.text
    assert path(directory).is_file()
    assert not path(directory).is_symlink()
    with lock.commit():
        pass
    assert target.read_text() == "somebody's"
    hostile_later = path(directory)
    hostile_later.unlink()
    hostile(kind, hostile_later)
    with pytest.raises(CheckpointError, match="fenced off"), lock.commit():
        pass
    lock.release()


@pytest.mark.parametrize(
    "said",
    [
        *({"pid": pid} for pid in ("1", True, None)),
        *({"host": "\x1b[2Jhost"}, {"user": "ada\nroot"}, {"job": "9" * 300}),
    ],
)
def test_lock_file_with_invalid_values_is_refused(directory, env, said):
    leave(directory, **said)
    with pytest.raises(UsageError, match=r"not whole, or not written by hpctrain(.|\n)*rm -r"):
        Lock.take(directory, None, env)


def test_truncated_lock_file_has_no_owner(directory, env):
    leave(directory)
    whole = path(directory).read_bytes()
    for length in range(0, len(whole), 7):
        path(directory).write_bytes(whole[:length])
        assert record.look(path(directory)).owner is None


@pytest.mark.parametrize("content", ["directory", "link"])
def test_foreign_flock_file_stops_nobody(directory, env, content):
    directory.path.mkdir()
    hostile(content, directory.path / ".lock.turn")
    lock = Lock.take(directory, None, env)
    with lock.commit():
        pass
    lock.release()


# --- several at once


def race(directory, allocation, barrier, results, number):
    barrier.wait()
    try:
        lock = Lock.take(directory, allocation, {})
    except UsageError as error:
        results.put((number, str(error)))
        return
    with lock.commit():
        results.put((number, "won"))
    time.sleep(600)  # it has to live while the others look


@pytest.mark.parametrize("before", ["nothing", "dead", "own", "old rubbish"])
def test_exactly_one_of_several_starts_wins_the_lock(directory, before):
    restart = 0
    if before == "dead":
        leave(directory, age=400, host="elsewhere")
    elif before == "own":
        leave(directory, job="70", host="elsewhere")
        restart = 1
    elif before == "old rubbish":
        directory.path.mkdir()
        path(directory).touch()
        grow_old(path(directory), 400)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        content, age = (path(directory).read_bytes(), 400) if path(directory).exists() else (b"", 0)
        barrier, results = context.Barrier(4), context.Queue()
        processes = [
            context.Process(
                target=race, args=(directory, job(restart=restart), barrier, results, n)
            )
            for n in range(4)
        ]
        for process in processes:
            process.start()
        said = [results.get(timeout=60)[1] for _ in processes]
        for process in processes:
            process.kill()
            process.join()
        assert said.count("won") == 1, said
        assert all("its process runs" in text for text in said if text != "won")
        path(directory).unlink()
        if before != "nothing":
            path(directory).write_bytes(content)
            grow_old(path(directory), age)
