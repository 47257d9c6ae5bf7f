"""Files of a run directory: atomic writes, and reading after a crash."""

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain import rundir
from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory, append, create, replace
from hpctrain.rundir.exit_status import read_exit_status, write_exit_status


@pytest.mark.parametrize("code", [0, 1, 2, 75, 76])
def test_exit_status_file_round_trip(tmp_path, code):
    path = tmp_path / "not-there-yet" / "exit-status"
    assert read_exit_status(path) is None
    write_exit_status(str(path), code, 'stopped: "USR2", 10 s left\n')
    assert read_exit_status(path) == (code, 'stopped: "USR2", 10 s left\n')
    write_exit_status(str(path), 1, "later")
    assert read_exit_status(path) == (1, "later")
    assert [entry.name for entry in path.parent.iterdir()] == ["exit-status"]


def test_exit_status_file_that_is_incomplete_is_none(tmp_path):
    path = tmp_path / "exit-status"
    write_exit_status(str(path), 75, "stopped")
    complete = path.read_bytes()
    for length in range(len(complete) - 1):  # the last byte ends the line
        path.write_bytes(complete[:length])
        assert read_exit_status(path) is None
    for strange in (
        b"75",
        b"[]",
        b"null",
        b'{"code": "soon", "reason": ""}',
        b"\xff",
        b'{"code": 1}',
    ):
        path.write_bytes(strange)
        assert read_exit_status(path) is None
    assert read_exit_status(tmp_path) is None


@pytest.mark.parametrize("fails", ["fsync", "replace", "open"])
def test_failed_replace_keeps_the_old_file(tmp_path, monkeypatch, fails):
    path = tmp_path / "summary.json"
    replace(path, "old")

    def fail(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path if fails == "open" else os, fails, fail)
        with pytest.raises(OSError, match="No space left"):
            replace(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    replace(path, "new")
    assert path.read_text() == "new"


def test_create_refuses_an_existing_file(tmp_path):
    path = tmp_path / "run" / "run.json"
    create(path, "first")
    with pytest.raises(FileExistsError):
        create(path, "second")
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
@pytest.mark.parametrize("write", [create, replace])
def test_run_directory_files_follow_the_umask(tmp_path, mask, write):
    before = os.umask(mask)
    try:
        write(tmp_path / "file", "")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_metrics_reader_leaves_out_a_truncated_line(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.rows() == []
    lines = '{"step": 10, "loss": 0.5}\n{"step": 20, "loss": NaN}\n'
    run.metrics.write_text(lines)
    assert [row["step"] for row in run.rows()] == [10, 20]
    complete = '{"step": 30, "loss": 0.25}'
    for length in range(len(complete)):
        run.metrics.write_text(lines + complete[:length])
        assert [row["step"] for row in run.rows()] == [10, 20]
    run.metrics.write_text(lines + complete)
    assert run.rows()[2] == {"step": 30, "loss": 0.25}


def test_missing_json_is_none_and_damaged_json_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.read(run.identity) is None
    replace(run.identity, '{"name": "digits"}')
    assert run.read(run.identity) == {"name": "digits"}
    run.identity.write_bytes(b'{"name": "dig')
    with pytest.raises(UsageError, match=r"run\.json cannot be read") as caught:
        run.read(run.identity)
    assert caught.value.code == "HT701"


def test_run_directory_file_names(tmp_path):
    run = RunDirectory(tmp_path)
    places = [run.identity, run.starts, run.metrics, run.summary, run.log(3), run.checkpoint(42)]
    places += [run.timings, run.events, run.last_step, run.profile, run.tracked]
    assert [str(place.relative_to(tmp_path)) for place in places] == [
        "run.json",
        "starts.jsonl",
        "metrics.jsonl",
        "summary.json",
        "logs/rank-3.log",
        "checkpoints/step-00000042",
        "timings.jsonl",
        "events.jsonl",
        "last-step.json",
        "profile",
        "track.json",
    ]
    assert run.steps() == []


def test_append_after_a_truncated_line(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.starts.write_text('{"step": 1}\n{"step": 2, "comm')
    append(directory.starts, '{"step": 3}')
    append(directory.starts, '{"step": 4}')
    assert [line["step"] for line in directory.lines(directory.starts)] == [1, 3, 4]


@pytest.mark.parametrize("name", ["a pipe", "a device", "a folder"])
def test_pipes_devices_and_folders_are_refused(tmp_path, name):
    directory = RunDirectory(tmp_path)
    for path in (directory.metrics, directory.summary):
        if name == "a pipe":
            os.mkfifo(path)
        elif name == "a device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
    with pytest.raises(OSError, match=r"no regular file.*metrics\.jsonl"):
        directory.rows()
    with pytest.raises(UsageError, match=r"summary\.json cannot be read: .*no regular file"):
        directory.read(directory.summary)


def test_runs_that_other_programs_put_into_the_folder_are_not_progress_of_the_script(tmp_path):
    def add(name, step, **more):
        run = RunDirectory(tmp_path / name)
        (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
        run.identity.write_text(json.dumps({"format": 1, "name": name, **more}))

    directory = RunDirectory(tmp_path)
    assert directory.furthest() is None
    add("reference", 10, in_folder_of_name=False)
    assert (directory.furthest(), directory.current()) == (None, directory)
    add("fold-0", 20, in_folder_of_name=True)
    add("fold-1", 5, in_folder_of_name=True)
    assert directory.furthest() == 25
    assert [run.path.name for run in directory.runs()] == ["fold-0", "fold-1", "reference"]


@pytest.mark.parametrize(
    ("number", "free", "files", "found"),
    [
        (errno.ENOSPC, 7, 9, "is full (7,000 bytes free): its lock could not be written"),
        (errno.ENOSPC, 7, 0, "can hold no more files (0 inodes free): its lock"),
        (errno.EDQUOT, 7, 9, "is used up: its lock could not be written"),
        (errno.EROFS, 7, 9, "is read-only: its lock could not be written"),
        (errno.EIO, 0, 0, None),
        (errno.EACCES, 0, 0, None),
    ],
)
def test_error_of_a_disk_that_takes_no_more_data(monkeypatch, tmp_path, number, free, files, found):
    room = SimpleNamespace(f_bavail=free, f_frsize=1000, f_favail=files, f_files=9)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    folder = tmp_path / "not" / "there"
    error = rundir.no_room(folder, "its lock", OSError(number, os.strerror(number)))
    if found is None:
        assert error is None
        return
    assert error.code == "HT715"
    assert f"that holds {folder} {found}" in error.found
    assert os.strerror(number) in error.found
    assert error.fixes


@pytest.mark.parametrize(
    ("free", "files", "all_files", "found"),
    [
        (2000, 9, 9, ""),
        (2000, 0, 0, ""),  # a file system that counts no files
        (7, 9, 9, "is full now (7,000 bytes free)"),
        (2000, 0, 9, "is full now (0 inodes free)"),
    ],
)
def test_disk_that_is_full_now(monkeypatch, tmp_path, free, files, all_files, found):
    room = SimpleNamespace(f_bavail=free, f_frsize=1000, f_favail=files, f_files=all_files)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    assert rundir.full_now(tmp_path) == (found and f"the disk that holds {tmp_path} {found}")
