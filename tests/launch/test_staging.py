"""Copies on each host's own disk: what is copied, what is removed, and what is refused."""

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest

from hpctrain.errors import StartError
from hpctrain.launch import staging
from hpctrain.launch.staging import staged


class Host:
    """A host with a disk of its own at $TMPDIR, and a shared folder as the working directory."""

    def __init__(self, folder):
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        self.env = {"TMPDIR": str(self.disk), "PATH": "/usr/bin:/bin"}

    def staged(self, name="7-00", **files):
        places = [str(files.get(kind, "")) for kind in ("code", "environment", "data")]
        return staged(places, name, self.env)

    def folder(self, name):
        return self.disk / f"hpctrain-ada-{name}"


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "user_name", lambda: "ada")
    return Host(tmp_path)


def touch(path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def files_below(folder):
    return sorted(
        str(Path(name, file).relative_to(folder))
        for name, _, files in os.walk(folder)
        for file in files
    )


@pytest.mark.parametrize("source", [".", "code", "code/"])
def test_staged_code_leaves_out_runs_git_and_venv(host, source):
    for name in ("runs/old", ".git/file", ".venv/bin/python", "package/runs/file", "train.py"):
        touch(Path(source, name))
    with host.staged(code=source) as (variables, folder):
        scratch = host.folder("7-00")
        assert folder == str(scratch / "code")
        assert variables == {"HPCTRAIN_SCRATCH": str(scratch)}
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert files_below(folder) == ["package/runs/file", "train.py"]
    assert not list(host.disk.iterdir())


def test_staged_environment_is_first_on_the_path(host, tmp_path):
    for name, text in (
        ("answer", "#!/bin/sh\necho own\n"),
        ("python", '#!/bin/sh\necho "$@" >"$(dirname "$0")"/unpacked\n'),
        ("conda-unpack", ""),
    ):
        touch(tmp_path / "env" / "bin" / name).write_text(text)
        (tmp_path / "env" / "bin" / name).chmod(0o755)
    with tarfile.open("my env:1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "env", ".")
    with host.staged(environment="my env:1.tar.gz") as (variables, folder):
        programs = host.folder("7-00") / "environment" / "bin"
        assert folder is None
        assert variables["PATH"] == f"{programs}:/usr/bin:/bin"
        assert shutil.which("answer", path=variables["PATH"]) == str(programs / "answer")
        assert (programs / "unpacked").read_text() == f"{programs}/conda-unpack\n"
    assert not list(host.disk.iterdir())


def test_staged_data_follows_links_and_sets_the_variable(host, tmp_path):
    (tmp_path / "far").write_text("image")
    Path("my data/train").mkdir(parents=True)
    Path("my data/train/x.jpg").symlink_to(tmp_path / "far")
    with host.staged(data="my data/") as (variables, _):
        assert variables["HPCTRAIN_DATA"] == str(host.folder("7-00") / "data")
        copy = Path(variables["HPCTRAIN_DATA"], "my data", "train", "x.jpg")
        assert copy.read_text() == "image"
        assert not copy.is_symlink()
    assert not list(host.disk.iterdir())
    assert (tmp_path / "far").exists()


def test_nothing_staged_makes_no_folder(host):
    with host.staged() as (variables, folder):
        assert (variables, folder) == ({}, None)
        assert not list(host.disk.iterdir())


def test_slurm_tmpdir_comes_before_tmpdir(host, tmp_path):
    host.env["SLURM_TMPDIR"] = str(tmp_path / "of the job")
    Path(host.env["SLURM_TMPDIR"]).mkdir()
    touch("code/train.py")
    with host.staged(code="code") as (_, folder):
        assert folder.startswith(host.env["SLURM_TMPDIR"])


@pytest.mark.parametrize(
    "existing", ["a link", "another user's", "this user's", "of another host of this start"]
)
def test_existing_folder_is_refused_and_kept(host, lacking, tmp_path, existing):
    scratch = host.folder("7-00")
    if existing == "a link":
        (tmp_path / "target").mkdir()
        scratch.symlink_to(tmp_path / "target")
    else:
        scratch.mkdir()
    touch(scratch / "my-run")
    if existing == "another user's":
        if os.geteuid():
            lacking("mount", "a folder of another user needs root")
        os.chown(touch(scratch / ".start"), 1, 1)
        os.chown(scratch, 1, 1)
    if existing.startswith("of another host"):
        touch(scratch / ".start")  # $TMPDIR is on a file system that the hosts share
    touch("code/train.py")
    with pytest.raises(StartError, match="File exists") as caught, host.staged(code="code"):
        pass
    assert caught.value.code == "HT218"
    assert str(scratch) in str(caught.value)
    assert (scratch / "my-run").exists()


def test_only_copies_of_earlier_starts_of_the_job_are_removed(host):
    touch("code/train.py")
    others = [host.folder(name) for name in ("7-4-0", "7-results", "77-0", "7_1-0")]
    for folder in (host.folder("7-00"), host.folder("7-01"), *others):
        touch(folder / ".start")
        touch(folder / "code" / "train.py")
    host.folder("7-5").mkdir()  # without a .start file
    touch(host.folder("7-6"))
    host.folder("7-1").symlink_to(host.folder("77-0"))
    others += [host.folder(name) for name in ("7-5", "7-6", "7-1")]
    if not os.geteuid():  # an earlier start by another user, in a /tmp of all users
        touch(host.folder("7-2") / ".start")
        os.chown(host.folder("7-2"), 1, 1)
        others.append(host.folder("7-2"))
    with host.staged("7-10", code="code"):
        assert {*host.disk.iterdir()} == {*others, host.folder("7-10")}
    assert {*host.disk.iterdir()} == set(others)
    assert files_below(host.folder("77-0")) == [".start", "code/train.py"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"code": "missing"}, "No such file or directory: 'missing'"),
        ({"data": "images.tar"}, "Not a directory: 'images.tar'"),
        ({"environment": "missing.tar"}, "tar: missing.tar: "),
        ({"environment": "images.tar"}, "images.tar has no bin/ at its top"),
    ],
)
def test_failure_to_copy_leaves_nothing(host, tmp_path, files, message):
    touch(tmp_path / "environment" / "bin" / "python")
    with tarfile.open("images.tar", "w") as archive:
        archive.add(tmp_path / "environment")
    with pytest.raises(StartError, match=message) as caught, host.staged(**files):
        pass
    assert caught.value.code == "HT218"
    assert not list(host.disk.iterdir())


def test_files_that_cannot_be_read_are_counted(host):
    for name in ("a", "b", "c"):
        touch("data/x").parent.joinpath(name).symlink_to("missing")
    with pytest.raises(StartError, match=r"'data/.', and 2 more"), host.staged(data="data"):
        pass


def test_disk_that_cannot_be_written_is_named(host):
    host.disk.rmdir()
    with pytest.raises(StartError, match="No such file") as caught, host.staged(code="."):
        pass
    assert f"df -h {host.disk}" in str(caught.value)


def test_copies_are_removed_after_an_error(host):
    touch("code/train.py")
    with pytest.raises(RuntimeError), host.staged(code="code") as (_, folder):
        raise RuntimeError(folder)
    assert not list(host.disk.iterdir())


def test_copies_that_a_rank_has_removed_are_no_error(host):
    touch("code/train.py")
    with host.staged(code="code"):
        shutil.rmtree(host.folder("7-00"))


@pytest.fixture
def open_host(monkeypatch):
    """Return a host in a folder that all users may enter, unlike pytest's."""
    monkeypatch.setattr(staging, "user_name", lambda: "ada")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.chdir(folder)
        yield Host(Path(folder))


def test_user_can_remove_copies_of_read_only_folders(open_host, lacking):
    """Stage read-only folders, like shared data; their files cannot be removed as they are."""
    if os.geteuid():
        lacking("mount", "to become a user that is not root takes root")
    open_host.disk.chmod(0o777)
    earlier = open_host.folder("7-00")
    touch(earlier / ".start")
    for image in (touch("images/a/x.jpg"), touch(earlier / "data" / "a" / "x.jpg")):
        image.parent.chmod(0o555)
    for path in (earlier, *earlier.rglob("*")):
        os.chown(path, 65534, 65534)
    os.setresuid(65534, 65534, 0)
    try:
        with open_host.staged("7-10", data="images", code="images") as (variables, _):
            copies = [
                Path(variables["HPCTRAIN_DATA"], "images"),
                Path(variables["HPCTRAIN_SCRATCH"]),
            ]
            assert files_below(copies[0]) == ["a/x.jpg"]
            assert list(open_host.disk.iterdir()) == copies[1:]
        left = list(open_host.disk.iterdir())
    finally:
        os.setresuid(0, 0, 0)
    assert not left
