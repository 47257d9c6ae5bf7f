"""A checkpoint is complete or absent, and a damaged one does not end the run."""

import errno
import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import load_newest, names, newest, save, state_of, two_checkpoints

from hpctrain.checkpoint import Writer, durable_files
from hpctrain.checkpoint.loading import digest
from hpctrain.errors import CheckpointError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def saved(run):
    return two_checkpoints(run.path)


def test_checkpoint_round_trip(run):
    assert load_newest(run) is None
    state = {
        "model": {"weight": torch.full((3, 2), 7.0), "name": "w"},
        "position": {"step": 7, "random": torch.get_rng_state()},
    }
    folder = save(run, 7, state, {"world": {"world_size": 2}})
    assert folder == run.checkpoint(7)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.pt",
        "position.pt",
        "rank-00000.bin",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert manifest["world"] == {"world_size": 2}
    step, loaded = load_newest(run)
    assert step == 7
    assert loaded.keys() == state.keys()
    assert loaded["model"]["name"] == "w"
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert torch.equal(loaded["position"]["random"], state["position"]["random"])


def test_newest_three_checkpoints_are_kept(run):
    for step in (5, 10, 99_999_999, 100_000_000, 100_000_001):
        save(run, step, state_of(0), {})
    assert run.steps() == [99_999_999, 100_000_000, 100_000_001]
    assert len(names(run)) == 3
    assert load_newest(run)[0] == 100_000_001


def truncate_file(folder):
    path = folder / "model.pt"
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_byte(folder):
    path = folder / "position.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove_file(folder):
    (folder / "model.pt").unlink()


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage", [truncate_file, flip_a_byte, remove_file, remove_manifest, empty_folder]
)
def test_damaged_checkpoint_is_logged_and_the_previous_loaded(saved, damage, caplog):
    damage(saved.checkpoint(2))
    caplog.set_level("ERROR", logger="hpctrain")
    logger.addHandler(caplog.handler)
    try:
        assert newest(saved) == 1
    finally:
        logger.removeHandler(caplog.handler)
    assert "step-00000002" in caplog.text
    damage(saved.checkpoint(1))
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as caught:
        load_newest(saved)
    assert str(saved.checkpoints) in caught.value.found
    assert caught.value.fixes
    assert caught.value.code == "HT707"


class HalfFile(io.FileIO):
    """A file on a full disk, which takes a part of what is written."""

    def write(self, data):
        super().write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk:
    """A stand-in for `open`, with room for some more files."""

    def __init__(self, good):
        self.good = good

    def __call__(self, path, mode, **keywords):
        self.good -= 1
        return open(path, mode, **keywords) if self.good >= 0 else HalfFile(path, mode)


@pytest.mark.parametrize("good", [0, 1])
def test_failed_checkpoint_write_keeps_the_previous(saved, monkeypatch, good):
    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "open", FullDisk(good), raising=False)
        for step in (2, 3):
            with pytest.raises(
                CheckpointError, match=f"step {step} could not be written"
            ) as caught:
                save(saved, step, state_of(step), {})
            assert caught.value.fixes[0].startswith("df ")
    assert names(saved) == ["step-00000001", "step-00000002"]
    assert newest(saved) == 2
    save(saved, 3, state_of(3), {})
    assert newest(saved) == 3


def test_failed_checkpoint_commit_leaves_nothing(saved, monkeypatch):
    def fail(*arguments, **keywords):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(saved, 3, state_of(3), {})
    assert names(saved) == ["step-00000001", "step-00000002"]
    assert newest(saved) == 2


def test_temporary_folders_are_not_checkpoints(saved):
    shutil.copytree(saved.checkpoint(2), saved.checkpoints / ".step-00000003.4711")
    (saved.checkpoints / "step-00000004.old").mkdir()
    (saved.checkpoints / "step-5").mkdir()
    (saved.checkpoints / "notes").write_text("notes")
    assert saved.steps() == [1, 2]
    assert newest(saved) == 2


def test_checkpoint_manifest_has_the_given_fields(run):
    facts = {"step": 99, "format": 1, "metrics": {"loss": float("nan")}, 7: "seven"}
    writer = Writer(run)
    writer.save(3, state_of(3), facts)
    writer.close()
    manifest = json.loads((run.checkpoint(3) / "manifest.json").read_text())
    assert manifest["step"] == 3
    assert manifest["format"] == 4
    assert manifest["7"] == "seven"
    assert newest(run) == 3


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_checkpoint_modes_follow_the_umask(run, mask):
    before = os.umask(mask)
    try:
        save(run, 1, state_of(1), {})
        save(run, 1, state_of(1), {})
    finally:
        os.umask(before)
    folder = run.checkpoint(1)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}


def steps_kept(run, values, **options):
    """Save steps 1, 2, … with these values of a metric; return the steps that are kept."""
    name = options["best"]
    for step, value in enumerate(values, 1):
        metrics = {} if value is None else {name: value}
        # Each by a new start, which reads the best from the disk.
        save(run, step, state_of(step), {"metrics": metrics}, **options)
    assert len(names(run)) == len(run.steps())
    return run.steps()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values", "kept"),
    [
        ("top1", [0.1, 0.9, 0.3, 0.4, 0.5], [2, 4, 5]),
        ("top1", [0.9, 0.1, 0.9, 0.2, 0.3, 0.4], [3, 5, 6]),  # ties: the newer one
        ("eval_loss", [0.3, 0.1, 0.9, 0.2, 0.3], [2, 4, 5]),
        ("loss", [NAN, 0.5, NAN, NAN, NAN], [2, 4, 5]),
        ("loss", [INF, 0.5, -INF, NAN, NAN, NAN], [3, 5, 6]),
        ("top1", [NAN, NAN, NAN], [2, 3]),
        ("top1", [None, 0.5, None, None], [2, 3, 4]),
        ("top1", [1, True, "0.9", None, None], [2, 4, 5]),
        ("top1", [None, None, None], [2, 3]),
    ],
)
def test_best_checkpoint_is_kept(run, name, values, kept):
    assert steps_kept(run, values, keep=2, best=name) == kept


def test_best_checkpoint_can_be_step_0(run):
    for step in range(4):
        metrics = {"loss": float(step)}
        save(run, step, state_of(step), {"metrics": metrics}, keep=1, best="loss")
    assert run.steps() == [0, 3]


def test_damaged_checkpoints_do_not_count_as_kept(run):
    for step in range(1, 5):
        if step > 2:
            truncate_file(run.checkpoint(step - 1))
        save(run, step, state_of(step), {})
    assert run.steps() == [1, 2, 3, 4]
    assert newest(run) == 4


def test_resume_before_a_damaged_checkpoint_keeps_new_checkpoints(run):
    for step in (10, 20, 30, 40):
        save(run, step, state_of(step), {})
    for step in (30, 40):
        flip_a_byte(run.checkpoint(step))
    assert newest(run) == 20
    save(run, 25, state_of(25), {}, keep=1)
    assert run.steps() == [25, 30, 40]
    assert newest(run) == 25


def test_checkpoint_gets_its_name_after_its_manifest_is_written(run, monkeypatch):
    rename, seen = Path.rename, []

    def record_and_rename(source, target):
        if target == run.checkpoint(1):
            seen.append(sorted(os.listdir(source)))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", record_and_rename)
    save(run, 1, state_of(1), {})
    assert seen == [["manifest.json", "model.pt", "position.pt", "rank-00000.bin"]]


def test_checkpoint_that_holds_code_is_not_run(saved, tmp_path):
    """Save the code as a checkpoint, so that all sizes and hashes of the manifest are right."""
    folder, ran = saved.checkpoint(2), tmp_path / "ran"
    torch.save(_Code(ran), folder / "model.pt")
    content = (folder / "model.pt").read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    sha256 = hashlib.sha256(content).hexdigest()
    manifest["files"]["model.pt"] = {"size": len(content), "sha256": sha256}
    manifest["sha256"] = digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert newest(saved) == 1
    assert not ran.exists()


class _Code:
    """A value that makes a file when its pickle is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)
