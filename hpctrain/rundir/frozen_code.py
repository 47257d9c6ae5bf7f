"""Frozen code of a job: the files of a project as they were when the job was submitted.

runs/.code/git             store of git: contents of files, and trees of them
runs/.code/index-PROJECT   index of git, which makes the next snapshot of a folder without git fast
runs/.code/TREE.json       record of a snapshot, see `Snapshot`
runs/.code/TREE/           files of a snapshot, written at the first start of a job
runs/.code/job-NUMBER      name of the snapshot of a job

A snapshot has what git would add: committed, changed and new files, without ignored and large ones.
Files that did not change since the last commit are not copied: the store finds them in the
project's own repository. Without git on a host, a job runs the code as it is.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.cluster.commands import NoAnswerError, run
from hpctrain.errors import StartError
from hpctrain.rundir import replace

__all__ = [
    "LARGEST",
    "STORE",
    "Snapshot",
    "files",
    "freeze",
    "note_job",
    "read",
    "tree_of_job",
]

#: Folder of all snapshots, below the folder from which the jobs were submitted.
STORE = Path("runs/.code")

#: Size in bytes above which a file is data, and not code.
LARGEST = 10 * 2**20

_SECONDS = 60.0
_DAYS_TO_KEEP = 60.0  # a snapshot that no job has started from for so long is removed
_LEFT_OUT = ("runs/", ".venv/")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot of a project.

    Attributes:
        tree: name of the snapshot; the same files give the same name.
        root: top folder of the project.
        commit: commit of the project's repository; empty without one.
        changed: whether the files differ from that commit.
        objects: folder with the contents of the project's repository; empty without one.
        path: folders of the project in `sys.path` of the process that submitted the job.
        left_out: files that are too large, by their paths in the project.
    """

    tree: str
    root: str
    commit: str = ""
    changed: bool = False
    objects: str = ""
    path: Sequence[str] = ()
    left_out: Sequence[str] = ()

    def place_of(self, path: str | os.PathLike[str], folder: Path) -> Path | None:
        """Return where a file of the project is in the snapshot; None for other files.

        Args:
            path: path of the file in the project.
            folder: folder of the snapshot, from `files`.
        """
        if not _is_below(self.root, path):
            return None
        place = folder / os.path.relpath(path, self.root)
        return place if place.exists() else None


def freeze(folder: Path, store: Path, path: Sequence[str] = ()) -> Snapshot:
    """Record the project around a folder.

    Args:
        folder: folder in the project; the project is its repository, else the folder itself.
        store: folder for the snapshots.
        path: `sys.path` of this process.

    Raises:
        NoAnswerError: git is missing or fails; the text has the reason.
    """
    top = run(["git", "rev-parse", "--show-toplevel", "--git-path", "objects"], 10.0, folder=folder)
    root, objects = folder.resolve(), ""
    if top.returncode == 0:
        lines = top.stdout.splitlines()
        root, objects = Path(lines[0]), str((folder / lines[1]).resolve())
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=store.absolute(), prefix=".new-") as temporary:
        # Several jobs may be submitted at the same time, so each works on an index of its own.
        index = Path(temporary, "index")
        env = _environ(store, objects) | {"GIT_WORK_TREE": str(root), "GIT_INDEX_FILE": str(index)}
        if not (store / "git").is_dir():
            made = Path(temporary, "git")
            _git(["init", "--quiet", "--bare", str(made)], _plain(), root)
            with contextlib.suppress(OSError):  # another start was faster
                made.rename(store / "git")
        commit = ""
        kept_index = store / f"index-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"
        own_index = kept_index
        if objects:
            found = run(["git", "rev-parse", "--quiet", "--verify", "HEAD"], 10.0, folder=root)
            commit = found.stdout.strip()
            own_index = Path(objects).parent / "index"
        with contextlib.suppress(FileNotFoundError):
            # With its times of all files, so that git reads only those that have changed. The time
            # of the index itself tells git which files may have changed since in the same second.
            shutil.copy2(own_index, index)
        listed = ["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
        names = _git(listed, _plain() if objects else env, root).split("\0")[:-1]
        kept, left_out = _sorted_by_size(root, names)
        for option, entries in (("--remove", kept), ("--force-remove", left_out)):
            if entries:
                text = "\0".join([*entries, ""])
                _git(["update-index", "-z", "--add", option, "--stdin"], env, root, text)
        tree = _git(["write-tree"], env, root).strip()
        head = _git(["rev-parse", f"{commit}^{{tree}}"], env, root).strip() if commit else tree
        if not objects and index.exists():
            index.replace(kept_index)
    own_path = [one for one in path if one and _is_below(root, one)]
    large = [name for name in left_out if os.path.lexists(root / name) and not _is_excluded(name)]
    snapshot = Snapshot(tree, str(root), commit, tree != head, objects, own_path, large)
    replace(store / f"{tree}.json", json.dumps(asdict(snapshot)))
    _remove_old(store)
    return snapshot


def read(store: Path, tree: str) -> Snapshot:
    """Return the record of a snapshot.

    Raises:
        StartError: there is no such snapshot.
    """
    try:
        return Snapshot(**json.loads((store / f"{tree}.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StartError("HT826.no-snapshot", tree=tree, store=store, reason=error) from None


def note_job(store: Path, job: str, tree: str) -> None:
    """Record the snapshot of a job.

    Args:
        store: folder for the snapshots.
        job: number of the job; for an array, the number of the array.
        tree: name of the snapshot.
    """
    (store / f"job-{job}").write_text(f"{tree}\n")


def tree_of_job(store: Path, job: str) -> str | None:
    """Return the name of the snapshot of a job; None if it has none."""
    try:
        return (store / f"job-{job}").read_text().strip()
    except OSError:
        return None


def files(store: Path, tree: str) -> Path:
    """Return the folder with the files of a snapshot; the first start of a job writes it.

    Raises:
        StartError: the snapshot is not whole, or git is missing on this host.
    """
    folder = store.absolute() / tree
    if not folder.is_dir():
        snapshot = read(store, tree)
        temporary = Path(tempfile.mkdtemp(dir=store, prefix=".new-")).absolute()
        env = _environ(store, snapshot.objects) | {
            "GIT_INDEX_FILE": str(temporary / ".index"),
            "GIT_WORK_TREE": str(temporary),
        }
        try:
            _git(["read-tree", tree], env, store)
            _git(["checkout-index", "--all", f"--prefix={temporary}/files/"], env, store)
            (temporary / "files").mkdir(exist_ok=True)
            (temporary / "files").rename(folder)
        except (NoAnswerError, OSError) as error:
            if not folder.is_dir():  # else another task of the array was faster
                raise StartError(
                    "HT826.no-snapshot", tree=tree, store=store, reason=error
                ) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    os.utime(store / f"{tree}.json")
    return folder


def _environ(store: Path, objects: str) -> dict[str, str]:
    alternate = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": objects} if objects else {}
    return {**_plain(), "GIT_DIR": str(store.absolute() / "git"), **alternate}


def _plain() -> dict[str, str]:
    """Return an environment in which git uses the repository of the folder that it runs in."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def _git(words: Sequence[str], env: Mapping[str, str], folder: Path, text: str = "") -> str:
    done = run(["git", *words], _SECONDS, env, folder, os.fsencode(text))
    if done.returncode:
        raise NoAnswerError(f"git {words[0]}: {' '.join(done.stderr.split())[:500]}")
    return done.stdout


def _sorted_by_size(root: Path, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files to keep, and those that are gone, excluded or too large."""
    kept: list[str] = []
    left_out: list[str] = []
    for name in names:
        try:
            whole = os.lstat(root / name).st_size <= LARGEST and not _is_excluded(name)
        except OSError:
            whole = False
        (kept if whole else left_out).append(name)
    return kept, left_out


def _is_excluded(name: str) -> bool:
    return name.startswith(_LEFT_OUT) or name.endswith("/")


def _is_below(root: str | Path, path: str | os.PathLike[str]) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(root)


def _remove_old(store: Path) -> None:
    oldest = time.time() - _DAYS_TO_KEEP * 86400
    for record in store.glob("*.json"):
        if record.stat().st_mtime < oldest:
            shutil.rmtree(store / record.stem, ignore_errors=True)
            record.unlink(missing_ok=True)
