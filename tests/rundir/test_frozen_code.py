"""Frozen code of a job: what a snapshot has, and that an edit after it changes nothing."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.errors import StartError
from hpctrain.launch.frozen_program import from_snapshot
from hpctrain.rundir import frozen_code

STORE = frozen_code.STORE


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Return a function that runs git in the current folder, with a name for its commits."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "ada")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "ada@example.com")
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*words):
        done = subprocess.run(["git", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def project(tmp_path, monkeypatch, git):
    """Make a repository with a commit, and enter it."""
    top = tmp_path / "project"
    (top / "package").mkdir(parents=True)
    monkeypatch.chdir(top)
    Path("train.py").write_text("x = 1\n")
    Path("package", "model.py").write_text("y = 1\n")
    Path(".gitignore").write_text("runs/\n*.log\n")
    git("init", "--quiet", ".")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    return top


def texts(folder):
    """Return the text of each file below a folder, by its path."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def frozen():
    """Freeze the current folder; return the record and the files."""
    snapshot = frozen_code.freeze(Path(), STORE)
    return snapshot, texts(frozen_code.files(STORE, snapshot.tree))


@pytest.mark.parametrize("with_git", [True, False])
def test_jobs_that_are_submitted_at_once_have_one_snapshot(project, with_git):
    if not with_git:
        shutil.rmtree(".git")
    for number in range(200):
        Path("package", f"{number}.py").write_text(f"{number}\n")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: frozen_code.freeze(Path(), STORE), range(8)))
    assert all(one == found[0] for one in found)
    assert len(texts(frozen_code.files(STORE, found[0].tree))) == 203
    left = {path.name for path in STORE.iterdir()} - {found[0].tree, f"{found[0].tree}.json"}
    assert {name.partition("-")[0] for name in left} == ({"git"} if with_git else {"git", "index"})


def test_snapshot_has_committed_changed_and_new_files(project, git):
    snapshot, files = frozen()
    assert (snapshot.changed, snapshot.root) == (False, str(project))
    assert snapshot.commit == git("rev-parse", "HEAD").strip()
    assert files["train.py"] == "x = 1\n"
    Path("train.py").write_text("x = 2\n")
    Path("package", "new.py").write_text("z = 1\n")
    Path("package", "model.py").unlink()
    Path("train.log").write_text("ignored\n")
    snapshot, files = frozen()
    assert snapshot.changed
    assert files == {
        "train.py": "x = 2\n",
        "package/new.py": "z = 1\n",
        ".gitignore": "runs/\n*.log\n",
    }
    # The person's own index and files stay as they were.
    assert git("status", "--porcelain").split() == [
        *("D", "package/model.py", "M", "train.py", "??", "package/new.py"),
    ]


def test_snapshot_sees_an_edit_of_the_same_size_in_the_second_of_a_commit(project, git):
    for number in range(2, 6):
        Path("train.py").write_text(f"x = {number}\n")
        git("commit", "--quiet", "-am", "next")
        Path("train.py").write_text("x = 9\n")
        snapshot, files = frozen()
        assert snapshot.changed
        assert files["train.py"] == "x = 9\n"


def test_snapshot_stays_as_it_was_after_edits_and_commits(project, git):
    Path("train.py").write_text("x = 2\n")
    first, before = frozen()
    Path("train.py").write_text("x = 3\n")
    git("commit", "--quiet", "-am", "second")
    assert texts(frozen_code.files(STORE, first.tree)) == before


def test_large_files_are_left_out_and_named(project):
    with open("weights.bin", "wb") as file:
        file.truncate(frozen_code.LARGEST + 1)
    snapshot, files = frozen()
    assert snapshot.left_out == ["weights.bin"]
    assert "weights.bin" not in files


def test_folder_without_a_repository_is_frozen(tmp_path, monkeypatch, git):
    top = tmp_path / "plain"
    top.mkdir()
    monkeypatch.chdir(top)
    Path("train.py").write_text("x = 1\n")
    snapshot, files = frozen()
    assert (snapshot.commit, snapshot.changed, files) == ("", False, {"train.py": "x = 1\n"})
    Path("train.py").rename("other.py")
    assert frozen()[1] == {"other.py": "x = 1\n"}


def test_hostile_names_of_files_are_frozen(project):
    names = ["a b.py", "it's.py", "-n.py", "new\nline.py", "é.py", os.fsdecode(b"\xff.py")]
    for name in names:
        Path(name).write_text("x\n")
    assert set(names) <= set(frozen()[1])


def test_missing_git_is_an_answer_and_not_a_traceback(project, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAnswerError, match="no git"):
        frozen_code.freeze(Path(), STORE)


def test_snapshot_whose_store_is_gone_names_the_fix(project):
    snapshot = frozen_code.freeze(Path(), STORE)
    for path in (STORE / "git" / "objects").glob("??"):
        for file in path.iterdir():
            file.unlink()
    Path(snapshot.objects).rename("elsewhere")
    with pytest.raises(StartError, match="cannot be written") as caught:
        frozen_code.files(STORE, snapshot.tree)
    assert caught.value.code == "HT826"
    assert not [path for path in STORE.iterdir() if path.name.startswith(".new")]
    with pytest.raises(StartError, match="cannot be written"):
        frozen_code.files(STORE, "0" * 40)


def test_program_gets_code_from_the_snapshot_and_data_from_where_they_were(project):
    snapshot = frozen_code.freeze(Path(), STORE, [str(project / "package"), "/usr/lib"])
    folder = frozen_code.files(STORE, snapshot.tree)
    words, environ = from_snapshot(["python", "train.py", "package"], snapshot, folder, {})
    assert words == ["python", str(folder / "train.py"), "package"]
    assert environ["PYTHONPATH"] == str(folder / "package")
    words, environ = from_snapshot(["python", "-m", "package.model"], snapshot, folder, {})
    assert words == ["python", "-P", "-m", "package.model"]
    assert environ["PYTHONPATH"].split(":")[0] == str(folder)
    words, _ = from_snapshot(["bash", "train.py"], snapshot, folder, {})
    assert words == ["bash", "train.py"]
    assert environ["HPCTRAIN_COMMIT"] == snapshot.commit


def test_program_that_the_snapshot_runs_is_the_frozen_one(project):
    Path("train.py").write_text("import sys, helper; print(helper.x, sys.argv[1:])\n")
    Path("helper.py").write_text("x = 1\n")
    snapshot = frozen_code.freeze(Path(), STORE)
    folder = frozen_code.files(STORE, snapshot.tree)
    Path("helper.py").write_text("x = 2\n")
    env = {"PATH": os.environ["PATH"]}
    for command in (["python3", "train.py", "a"], ["python3", "-m", "train", "a"]):
        words, environ = from_snapshot(command, snapshot, folder, env)
        done = subprocess.run(words, env=environ, capture_output=True, text=True)
        assert done.stdout == "1 ['a']\n", done.stderr
