"""Kills, damage, forged manifests, full disks: the newest complete checkpoint loads."""

import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks
from checkpoints import names, newest, save, state_of, two_checkpoints

from hpctrain.backends.extent import Extent
from hpctrain.checkpoint import Team, Writer, data_files, folder, process_name
from hpctrain.errors import CheckpointError
from hpctrain.rundir import RunDirectory

RANDOM = "0123456789abcdef"
# The system calls of a save that change files, or write them to the disk.
CHANGES = ["openat", "write", "fsync", "mkdir", "rename", "unlinkat", "rmdir"]


def temporaries(run):
    return [name for name in names(run) if name.startswith(".")]


@pytest.fixture
def run(tmp_path):
    return two_checkpoints(tmp_path / "run")


# Killed


def save_together(directory, steps):
    """Save by the writers of three ranks, each with a part of the weight."""
    data_files.LEAST_BYTES = 1
    name = process_name()
    teams = [Team(rank, range(3), False, name, "7") for rank in range(3)]
    writers = [Writer(directory, team=team) for team in teams]
    for step in steps:
        for writer in writers:
            state = state_of(step)
            weight = state["model"]["weight"]
            extents = {id(weight): Extent.whole(weight.shape, range(3))}
            writer.start(writer.prepare(step, state, {}, extents))
        for writer in writers:
            writer.settle()
        writers[0].all_written()
        writers[0].wait()
    for writer in reversed(writers):
        writer.close()


def save_steps(path, pipe, how):
    """Replace step 2, then add steps 3 and 4, which removes step 1; end the process."""
    # Some kernels let only an ancestor trace a process; PR_SET_PTRACER lifts this limit.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    directory = RunDirectory(path)
    os.write(pipe[1], b"x")
    select.select([pipe[2]], [], [])
    if how == "by three ranks":
        save_together(directory, (2, 3, 4))
    elif how == "in the background":
        writer = Writer(directory)
        for step in (2, 3, 4):
            writer.save(step, state_of(step), {})
            writer.wait()
        writer.close()
    else:
        for step in (2, 3, 4):
            save(directory, step, state_of(step), {})
    os._exit(0)


def trace_save(options, path, how):
    """Run `save_steps` in a process under strace.

    Returns:
        Its exit code, or the error of strace.
    """
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_steps(path, (ready[0], ready[1], go[0]), how)
        finally:
            os._exit(1)
    tracer = None
    try:
        os.read(ready[0], 1)
        command = ["strace", "-f", "-qq", "-p", str(pid), *options]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if tracer.poll() is not None:
                return tracer.stderr.read()
        os.write(go[1], b"x")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pid = None
        return code
    finally:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if tracer is not None:
            tracer.wait()
            tracer.stderr.close()
        for end in (*ready, *go):
            os.close(end)


def kill_at_each_call(path, calls, how):
    """Start one process after another, and kill each at another system call.

    Returns:
        The number of kills at each kind of call, or the error of strace.
    """
    table = Path(path) / "calls"
    options = ["-c", "-U", "name", "-o", str(table)]
    result = trace_save(options, two_checkpoints(Path(path) / "0").path, how)
    if result != 0:
        return str(result)
    made = [name for name in table.read_text().split() if name.isidentifier()]
    made = [name for name in made if name not in ("syscall", "total")]  # head and foot
    kills = {}
    for call in made if calls == "all" else sorted(set(made).intersection(calls)):
        # strace counts the calls of each kind and thread.
        number = kills[call] = 0
        while True:
            number += 1
            directory = two_checkpoints(Path(path) / f"{call}-{number}")
            inject = f"inject={call}:signal=KILL:when={number}"
            options = ["-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
            code = trace_save(options, directory.path, how)
            assert code in (0, -signal.SIGKILL), (call, number, code)
            check_checkpoints(directory, code == 0, (call, number))
            if code == 0:
                break
            kills[call] += 1
    return kills


def check_checkpoints(directory, survived, where):
    """Check that the newest complete checkpoint loads, and that the next saves succeed."""
    entries = names(directory)
    loaded = newest(directory)
    committed = [name.strip(".").removesuffix(".old") for name in entries]
    steps = {int(name.removeprefix("step-")) for name in committed if name.count(".") == 0}
    assert loaded == max(steps) >= 2, (where, entries)
    assert loaded == 4 or not survived, (where, entries)
    assert len(steps) >= 2, (where, entries)
    for step in (loaded, loaded + 1):
        save(directory, step, state_of(step), {})
        assert newest(directory) == step, (where, entries)
    assert not temporaries(directory), (where, entries, names(directory))
    assert len(directory.steps()) == 3, (where, entries, names(directory))
    shutil.rmtree(directory.path)


@pytest.fixture
def kill_saves(lacking, monkeypatch):
    """Return a function that kills saves, and returns the number of kills at each kind of call."""
    if not shutil.which("strace"):
        lacking("strace", "apt-get install strace")

    def kill(calls, how="at once"):
        # In memory if possible: the test is faster, and a kill does not empty a disk's cache.
        with tempfile.TemporaryDirectory(
            dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        ) as path:
            arguments = (path, calls, how)
            (kills,) = ranks.values(ranks.run(1, kill_at_each_call, *arguments, timeout=1800))
        if isinstance(kills, str):
            lacking("strace", kills)
        print(kills)
        return kills

    return kill


@pytest.mark.slow
def test_checkpoint_save_killed_at_each_file_call(kill_saves):
    """Kill saves at each system call that changes files; load the newest complete checkpoint."""
    kills = kill_saves(CHANGES)
    assert kills["fsync"] == 3 * 6
    assert kills["rename"] >= 5
    assert kills["unlinkat"] >= 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at once", "in the background", "by three ranks"])
def test_checkpoint_save_killed_at_any_system_call(kill_saves, how):
    """Kill saves at every system call; load the newest complete checkpoint."""
    # The writers of ranks wait for each other, some calls more or less.
    calls = CHANGES if how == "by three ranks" else "all"
    assert sum(kill_saves(calls, how).values()) > 50


# Damaged


def damaged_copies(content, every):
    """Yield the content cut short, with a byte more, and with each bit of some bytes flipped."""
    for length in {0, 1, 4, len(content) // 3, len(content) // 2, len(content) - 1}:
        yield content[:length]
    yield content + b"\0"
    for position in range(0, len(content), every):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            yield bytes(changed)


@pytest.mark.parametrize("name", ["manifest.json", "model.pt", "position.pt", "rank-00000.bin"])
@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_truncated_or_flipped_checkpoint_is_never_loaded(run, name, every):
    """Cut a file of the newest checkpoint short, or flip a bit of it; load the previous one."""
    path = run.checkpoint(2) / name
    content = path.read_bytes()
    for changed in damaged_copies(content, every):
        if name == "manifest.json" and changed == content.strip():
            continue  # the same manifest, without white space around it
        path.write_bytes(changed)
        assert newest(run) == 1
    path.write_bytes(content)
    assert newest(run) == 2


def test_checkpoint_with_file_of_another_is_refused(run):
    """Replace a file of a checkpoint, or the whole folder, by that of another checkpoint."""
    shutil.copy(run.checkpoint(1) / "rank-00000.bin", run.checkpoint(2) / "rank-00000.bin")
    assert newest(run) == 1
    shutil.rmtree(run.checkpoint(2))
    shutil.copytree(run.checkpoint(1), run.checkpoint(5))
    assert newest(run) == 1


# Forged


def forge(run, **changes):
    """Change fields of step 2's manifest, and give it the matching hash."""
    path = run.checkpoint(2) / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    manifest["sha256"] = folder.digest(manifest)
    path.write_text(json.dumps(manifest))


GOOD = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "files",
    [
        {"../x.pt": GOOD},
        {"/etc/passwd": GOOD},
        {"/tmp/x.pt": GOOD},
        {"sub/x.pt": GOOD},
        {"..pt": GOOD},
        {".pt": GOOD},
        {"x\n.pt\n": GOOD},
        {"x\0.pt": GOOD},
        {"": GOOD},
        {f"part{number}.pt": GOOD for number in range((1 << 17) + 1)},
        {"model.pt": {"size": "1", "sha256": "0" * 64}},
        {"model.pt": {"size": 1.0, "sha256": "0" * 64}},
        {"model.pt": {"size": True, "sha256": "0" * 64}},
        {"model.pt": {"size": 1, "sha256": 0}},
        {"model.pt": {"size": 1, "sha256": "0"}},
        {"model.pt": {"size": 1}},
        {"model.pt": None},
        {"model.pt": []},
        [["model.pt", GOOD]],
        "model.pt",
        None,
    ],
    ids=lambda files: repr(files)[:30],
)
def test_checkpoint_with_forged_manifest_files_is_refused(run, monkeypatch, files):
    """Give a manifest other paths, sizes or hashes of files, and a matching hash of its own."""
    forge(run, files=files)
    real, opened = os.open, []

    def note(path, *more, **keywords):
        opened.append(Path(path))
        return real(path, *more, **keywords)

    monkeypatch.setattr("os.open", note)
    assert newest(run) == 1
    beside = {run.checkpoint(1), run.checkpoint(2)}
    assert {path.parent for path in opened} == beside
    assert run.checkpoint(2) / "manifest.json" in opened
    assert len(set(opened)) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"format": 99},
        {"format": "4"},
        {"format": 4.0},
        {"step": 1},
        {"step": "2"},
        {"step": None},
    ],
)
def test_checkpoint_manifest_of_another_format_or_step_is_refused(run, changes):
    """Give a manifest another format or step, and a matching hash."""
    forge(run, **changes)
    assert newest(run) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "null",
        "3",
        '"x"',
        '{"format": 4}',
        "1" * 5000,
        '{"a": ' * 50_000,
        "\xff",
    ],
    ids=["deep", "list", "null", "number", "string", "short", "digits", "deep dict", "no UTF-8"],
)
def test_checkpoint_with_invalid_manifest_json_is_refused(run, text):
    """Replace a manifest by text that is no manifest."""
    (run.checkpoint(2) / "manifest.json").write_text(text, encoding="latin-1")
    assert newest(run) == 1


def test_checkpoint_with_huge_manifest_is_refused(run):
    """Make a manifest a sparse file of 1 TiB."""
    with open(run.checkpoint(2) / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    assert newest(run) == 1


def test_checkpoint_links_and_pipes_are_refused(run, tmp_path):
    """Replace a checkpoint by a link or a file, and each of its files by a link or a pipe."""
    good, two = tmp_path / "good", run.checkpoint(2)
    two.rename(good)
    two.symlink_to(good)  # a link to a good one
    assert newest(run) == 1
    two.unlink()
    two.write_text("a file")
    assert newest(run) == 1
    two.unlink()
    for name in ("manifest.json", "model.pt", "rank-00000.bin"):
        shutil.copytree(good, two)
        (two / name).unlink()
        (two / name).symlink_to(good / name)
        assert newest(run) == 1
        (two / name).unlink()
        os.mkfifo(two / name)
        assert newest(run) == 1
        shutil.rmtree(two)


def test_checkpoint_save_replaces_a_link(run, tmp_path):
    """Save a step whose folder is a link to another folder."""
    good = tmp_path / "good"
    run.checkpoint(2).rename(good)
    run.checkpoint(2).symlink_to(good)
    save(run, 2, state_of(2), {})
    assert newest(run) == 2
    assert not run.checkpoint(2).is_symlink()
    assert sorted(path.name for path in good.iterdir()) == [
        "manifest.json",
        "model.pt",
        "position.pt",
        "rank-00000.bin",
    ]
    for step in (3, 4, 5):
        save(run, step, state_of(step), {})
    assert good.exists()
    assert not temporaries(run)


# Full


@contextmanager
def limited_file_size(size):
    """Limit the size of files of this process, in bytes; Python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 20_000, 1_000_000])
def test_checkpoint_over_the_file_size_limit(run, size):
    """Limit the size of files in bytes during a save."""
    with limited_file_size(size), pytest.raises(CheckpointError, match="File too large") as caught:
        save(run, 3, state_of(3, 1_000_000), {})
    assert caught.value.fixes == ("ulimit -f unlimited",)
    assert caught.value.code == "HT705"
    assert names(run) == ["step-00000001", "step-00000002"]
    assert newest(run) == 2
    save(run, 3, state_of(3, 1_000_000), {})
    assert newest(run) == 3


def test_checkpoint_on_a_full_disk(small_disk):
    """Fill a disk of 2 MB; save again when there is space."""
    run = RunDirectory(small_disk / "run")
    writer = Writer(run)
    writer.save(1, state_of(1, 100_000), {})
    writer.wait()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_400_000))
    for step, size in ((2, 100_000), (1, 100_000), (3, 30_000), (4, 10_000_000)):
        writer.save(step, state_of(step, size), {})
        if step == 3:
            writer.wait()  # there is space for this one
            continue
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            writer.wait()
        assert caught.value.code == "HT715"
        assert f"the disk that holds {run.path} is full (" in caught.value.found
        assert f"the checkpoint of step {step} could not be written" in caught.value.found
        assert caught.value.fixes[0].startswith(f"df -h {run.path}, ")
        assert not temporaries(run)
        assert newest(run) == (3 if step == 4 else 1)
    filler.unlink()
    writer.save(5, state_of(5, 100_000), {})
    writer.close()
    assert newest(run) == 5
    assert run.steps() == [1, 3, 5]


def test_checkpoint_on_a_disk_that_can_hold_no_more_files(small_disk):
    run = RunDirectory(small_disk / "run")
    save(run, 1, state_of(1), {})
    subprocess.run(["mount", "-o", "remount,nr_inodes=16", str(small_disk)], check=True)
    for number in range(os.statvfs(small_disk).f_favail):
        (small_disk / str(number)).touch()
    with pytest.raises(CheckpointError, match="can hold no more files") as caught:
        save(run, 2, state_of(2), {})
    assert caught.value.fixes[0].startswith("df -i ")
    assert newest(run) == 1


def test_checkpoint_directory_that_vanishes_and_returns(run):
    """Move the run directory away during one save, and back for the next."""
    writer = Writer(run)
    run.path.rename(run.path.with_name("moved"))
    run.path.write_text("in the way")
    writer.save(3, state_of(3), {})
    with pytest.raises(CheckpointError, match="could not be written"):
        writer.wait()
    run.path.unlink()
    run.path.with_name("moved").rename(run.path)
    assert newest(run) == 2
    writer.save(3, state_of(3), {})
    writer.close()
    assert newest(run) == 3


@pytest.mark.parametrize("fails", range(1, 7))
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("step", [2, 3])
def test_checkpoint_failed_fsync_commits_nothing(run, monkeypatch, fails, number, step):
    """Fail one fsync of a save: of its three files, the manifest, the folder, or its parent."""
    real, calls = os.fsync, []

    def sync(descriptor):
        calls.append(descriptor)
        if len(calls) == fails:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    manifest = run.checkpoint(2) / "manifest.json"
    before = manifest.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", sync)
        with pytest.raises(CheckpointError) as caught:
            save(run, step, state_of(step), {})
    assert os.strerror(number) in caught.value.found
    code, command = {
        errno.EIO: ("HT705", f"df -h {run.checkpoints}"),
        errno.EDQUOT: ("HT715", "quota -s, "),
        errno.EROFS: ("HT715", f"touch {run.path}/x, "),
    }[number]
    assert caught.value.code == code
    assert caught.value.fixes[0].startswith(command)
    assert names(run) == ["step-00000001", "step-00000002"]
    assert manifest.stat().st_ino == before
    assert newest(run) == 2


# Left behind


def leave_temporary(run, name):
    """Make a temporary folder as a killed save leaves it; return its path."""
    path = run.checkpoints / name
    path.mkdir()
    (path / "model.pt").write_bytes(b"half")
    (path / "manifest.json").write_bytes(b'{"format"')
    return path


def ended_process():
    """Return the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftover_checkpoint_folders_are_removed_when_safe(run):
    """Leave temporary folders of ended and running processes and of other hosts, and save."""
    here = folder._here()
    own = leave_temporary(run, f".step-00000003.{here}.{os.getpid()}.{RANDOM}")
    ended = leave_temporary(run, f".step-00000003.{here}.{ended_process()}.{RANDOM}")
    alive = leave_temporary(run, f".step-00000003.{here}.1.{RANDOM}")
    elsewhere = leave_temporary(run, f".step-00000003.other.4026531836.77.{RANDOM}")
    container = leave_temporary(run, f".step-00000003.{here[:-1]}.{ended_process()}.{RANDOM}")
    strange = leave_temporary(run, ".step-00000003.notes")
    assert newest(run) == 2
    save(run, 3, state_of(3), {})  # without a lock, processes of other hosts may still run
    left = {path for path in (own, ended, alive, elsewhere, container, strange) if path.exists()}
    assert left == {alive, elsewhere, container, strange}
    assert newest(run) == 3

    @contextmanager
    def refused():
        raise CheckpointError.of_text("HT704", "another start has the run")
        yield

    writer = Writer(run, commit=refused)
    writer.save(4, state_of(4), {})
    with pytest.raises(CheckpointError, match="another start has the run"):
        writer.wait()
    writer.close()
    assert {path for path in left if path.exists()} == left

    @contextmanager
    def locked():
        yield

    writer = Writer(run, commit=locked)
    writer.save(4, state_of(4), {})
    writer.close()
    assert {path for path in left if path.exists()} == {alive, strange}
    assert newest(run) == 4


def test_folder_of_a_live_checkpoint_writer_is_kept(run, monkeypatch):
    """Save while another process, or another host, writes a checkpoint."""
    inside, go = threading.Event(), threading.Event()
    real = folder.write

    def wait_and_write(path, value):
        inside.set()
        assert go.wait(60)
        return real(path, value)

    writer = Writer(run)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "write", wait_and_write)
        writer.save(3, state_of(3), {})
        assert inside.wait(60)
    (name,) = temporaries(run)
    # As if a process of this host wrote it, and then a process of another host.
    for changed in (
        name.replace(f".{os.getpid()}.", ".1."),
        name.replace(f".{folder._here()}.", ".other.1."),
    ):
        (run.checkpoints / name).rename(run.checkpoints / changed)
        save(run, 4, state_of(4), {})
        assert temporaries(run) == [changed]
        name_now = run.checkpoints / changed
        name_now.rename(run.checkpoints / name)
    go.set()
    writer.close()
    assert run.steps() == [2, 3, 4] or run.steps() == [1, 2, 3, 4]
    assert not temporaries(run)


def test_checkpoint_being_replaced_still_loads(run):
    """Stop the replacement of a checkpoint before and after its second rename."""
    aside = run.checkpoints / ".step-00000002.old"
    run.checkpoint(2).rename(aside)  # killed between the two renames
    assert run.steps() == [1]
    assert newest(run) == 2
    assert newest(run) == 2  # a reader changes nothing
    shutil.copytree(run.checkpoint(1), run.checkpoint(2))  # the folder with the final name counts
    assert newest(run) == 1
    shutil.rmtree(run.checkpoint(2))
    save(run, 3, state_of(3), {})
    assert names(run) == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert newest(run) == 3
    shutil.copytree(run.checkpoint(2), aside)  # killed after the second
    save(run, 2, state_of(2), {})
    assert names(run) == [f"step-0000000{step}" for step in (1, 2, 3)]


def test_checkpoint_replacement_is_atomic(run, monkeypatch):
    """Fail the call that replaces a checkpoint."""
    save(run, 2, state_of(2), {"again": 1})
    assert names(run) == ["step-00000001", "step-00000002"]
    assert json.loads((run.checkpoint(2) / "manifest.json").read_text())["again"] == 1
    real = Path.rename

    count = []

    def fail_second_rename(self, target):
        if target == run.checkpoint(2) and not count:
            count.append(self)
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", fail_second_rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(run, 2, state_of(2), {"again": 2})
    assert names(run) == ["step-00000001", "step-00000002"]
    assert json.loads((run.checkpoint(2) / "manifest.json").read_text())["again"] == 1
