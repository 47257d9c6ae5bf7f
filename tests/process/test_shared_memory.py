"""The folder in /dev/shm for copies of the state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.process import shared_memory


@pytest.fixture
def top(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_TOP", tmp_path)
    return tmp_path


def test_folder_is_for_this_user_alone(top):
    folder = shared_memory.folder_of("launch")
    shared_memory.make(folder)
    shared_memory.make(folder)
    assert folder.parent == top
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "open to others", "of another user"])
def test_folder_of_another_kind_or_user_is_refused_and_not_removed(top, monkeypatch, kind):
    folder, target = shared_memory.folder_of("launch"), top / "target"
    (target / "files").mkdir(parents=True)
    if kind == "link":
        folder.symlink_to(target)
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
        if kind == "open to others":
            folder.chmod(0o770)
        else:
            monkeypatch.setattr(shared_memory.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="no folder of this user alone"):
        shared_memory.make(folder)
    if kind != "open to others":
        shared_memory.remove(folder)
        assert os.path.lexists(folder)
    assert (target / "files").exists()


def test_places_of_hosts_and_of_run_directories_differ(top):
    places = {
        shared_memory.place_in(top, host, Path(run))
        for host in ("node1", "node/2") for run in ("/runs/a", "/runs/b")
    }  # fmt: skip
    assert len(places) == 4
    assert {place.parent for place in places} == {top}


def test_folders_that_no_process_holds_are_removed(top):
    own, used, unused = map(shared_memory.folder_of, ("own", "used", "unused"))
    new, kept = map(shared_memory.folder_of, ("new", "kept"))
    other = top / f"hpctrain-{os.getuid() + 1}-x"
    for folder in (own, used, unused, new, kept, other):
        (folder / "place").mkdir(parents=True)
        if folder != new:
            os.utime(folder, (1e9, 1e9))
    shared_memory.keep(str(kept))
    shared_memory.keep("")
    held = "; ".join(
        [
            "import sys, pathlib",
            "from hpctrain.process import shared_memory",
            "shared_memory.hold(pathlib.Path(sys.argv[1]))",
            "print(flush=True)",
            "sys.stdin.read()",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", held, used], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        shared_memory.remove_abandoned(str(own))
    finally:
        process.communicate()
    assert set(top.iterdir()) == {own, used, new, kept, other}
    shared_memory.remove_abandoned(str(own))
    assert set(top.iterdir()) == {own, new, kept, other}
