"""hpctrain on the login host of a cluster, over one ssh connection that is kept for ten minutes.

The host needs ssh, sh, tar and a Python; hpctrain itself is copied there once for each version, to
~/.cache/hpctrain/client-HASH, and jobs that are submitted run it. ssh is the user's own, with its
config and its keys.

The connection: ControlMaster, ControlPath and ControlPersist of ssh_config(5).
"""

import hashlib
import io
import os
import re
import shlex
import stat
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from hpctrain.cluster.texts import printable
from hpctrain.errors import HpctrainError, StartError, UsageError
from hpctrain.rundir import frozen_code

__all__ = ["Cluster", "clusters", "find", "pull", "run_there", "send_code"]

_PACKAGE = Path(__file__).parents[1]
_KEPT = 600  # seconds that a connection waits for the next command
_SECONDS_TO_CONNECT = 10
_OLDEST = (3, 11)
# Exit codes of the script below, and of ssh.
_NO_CLIENT, _WRONG_PYTHON, _NO_FOLDER, _NO_CONNECTION = 97, 96, 95, 255
_SENT = f"{frozen_code.STORE}/sent"  # tree whose files were copied to the host
_BASE_NAME = re.compile(r"[A-Za-z0-9_.@:\[\]-]+\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster with a login host.

    Attributes:
        name: name for the user.
        host: login host, as ssh takes it.
        folder: folder there, in the home or absolute, in which all commands run; before the first
            `submit` makes it, they run in the home.
        python: Python there.
        setup: line of a shell before each command, such as `module load python`.
    """

    name: str
    host: str
    folder: str
    python: str = "python3"
    setup: str = ""


def clusters(env: Mapping[str, str]) -> list[Cluster]:
    """Return the clusters of the user's file, clusters.toml.

    Raises:
        UsageError: the file cannot be read, or has an entry that is not known.
    """
    path = _file(env)
    try:
        table = tomllib.loads(path.read_text())
        return [_cluster(name, entry) for name, entry in table.items()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError) as error:
        names = ", ".join(field.name for field in fields(Cluster)[1:])
        raise UsageError(
            "HT829",
            f"{path} cannot be used: {error}",
            f"a table for each cluster, with host and what else is wanted of {names}",
            'the lines [alps] and host = "login.example.org"',
        ) from None


def _cluster(name: str, entry: Mapping[str, str]) -> Cluster:
    if not entry.get("host"):
        raise ValueError(f"[{name}] has no host")
    return Cluster(name, **{"folder": _default_folder(), **entry})


def _file(env: Mapping[str, str]) -> Path:
    home = env.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home, "hpctrain", "clusters.toml")


def _default_folder() -> str:
    return Path.cwd().name or "project"


def find(name: str, env: Mapping[str, str]) -> Cluster:
    """Return the cluster with a name; another name is that of a host, for ssh.

    Raises:
        UsageError: as in `clusters`; or the name can be neither.
    """
    for cluster in clusters(env):
        if cluster.name == name:
            return cluster
    if not _BASE_NAME.match(name) or name.startswith("-"):
        raise UsageError(
            "HT829", f"{printable(name)!r} is no host", f"a host, or a name in {_file(env)}"
        )
    return Cluster(name, name, _default_folder())


def run_there(
    cluster: Cluster,
    words: Sequence[str],
    env: Mapping[str, str],
    *,
    capture: bool = False,
    terminal: bool = False,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of hpctrain in the cluster's folder; its exit code is that of the command.

    Args:
        cluster: the cluster.
        words: command of hpctrain and its arguments.
        env: environment of ssh.
        capture: whether to return its output; else it goes to this process's.
        terminal: whether the command gets a terminal.
        seconds: time to connect and for the whole command; None for ten seconds and no limit.

    Raises:
        StartError: the host cannot be reached, or has no Python that is new enough.
    """
    client = _hash()
    place = f'"$HOME"/.cache/hpctrain/client-{client}'
    check = f"import sys; sys.exit(sys.version_info < {_OLDEST})"
    command = shlex.join(words)
    script = "\n".join(
        [
            _enter(cluster),
            f"{_python(cluster)} -c {shlex.quote(check)} || exit {_WRONG_PYTHON}",
            f"test -d {place} || exit {_NO_CLIENT}",
            f"PYTHONPATH={place} exec {_python(cluster)} -m hpctrain {command}",
        ]
    )
    for _ in range(2):
        done = _ssh(cluster, script, env, capture=capture, terminal=terminal, seconds=seconds)
        if done.returncode != _NO_CLIENT:
            break
        _send_client(cluster, client, env)
    _check(cluster, done)
    return done


def send_code(cluster: Cluster, env: Mapping[str, str]) -> int:
    """Copy the project here to the cluster's folder: what has changed since the last time.

    Files that are gone here are removed there; files that were never sent stay.

    Returns:
        Number of files that were sent or removed.

    Raises:
        UsageError: this is not the top folder of the project.
        StartError: the host cannot be reached, or the files cannot be written there.
        NoAnswerError: git is missing or fails.
    """
    store = frozen_code.STORE
    snapshot = frozen_code.freeze(Path(), store)
    tree = snapshot.tree
    if Path(snapshot.root) != Path.cwd().resolve():
        # The cluster's folder gets the whole project, and the command would run at its top.
        raise UsageError(
            "HT829",
            f"{Path.cwd()} is a folder in the project {snapshot.root}",
            "the top folder of the project",
            f"cd {shlex.quote(snapshot.root)}",
        )
    before = _ssh(
        cluster, f"{_enter(cluster, True)}\ncat {_SENT} 2>/dev/null || true", env, capture=True
    )
    _check(cluster, before)
    sent, gone = frozen_code.changes(store, before.stdout.decode(errors="replace").strip(), tree)
    if not sent and not gone:
        return 0
    archive = io.BytesIO()
    folder = frozen_code.files(store, tree)
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        for name in sent:
            tar.add(folder / name, name, recursive=False)
    # tar reads standard input, so the names of removed files are in the script.
    removed = "".join(f"rm -f -- {shlex.quote(name)}\n" for name in gone)
    script = (
        f"{_enter(cluster, True)}\n{removed}mkdir -p {store}\ntar xzf - && echo {tree} > {_SENT}"
    )
    done = _ssh(cluster, script, env, text=archive.getvalue(), capture=True)
    _check(cluster, done)
    if done.returncode:
        raise _failed(cluster, "the code cannot be written there", done)
    return len(sent) + len(gone)


def pull(cluster: Cluster, run_dir: str, target: Path, env: Mapping[str, str]) -> None:
    """Copy a run directory from the cluster, without its checkpoints.

    Args:
        cluster: the cluster.
        run_dir: path there.
        target: folder here, in which the run directory is written.
        env: environment of ssh.

    Raises:
        StartError: the host cannot be reached, or the run cannot be read or written.
    """
    parent, name = os.path.split(run_dir.rstrip("/"))
    words = ["tar", "czf", "-", "--exclude=checkpoints", "--exclude=.attempts-*", "--", name]
    script = f"{_enter(cluster)}\ncd {shlex.quote(parent or '.')} && exec {shlex.join(words)}"
    done = _ssh(cluster, script, env, capture=True)
    _check(cluster, done)
    if done.returncode:
        raise _failed(cluster, f"{run_dir} cannot be read", done)
    target.mkdir(parents=True, exist_ok=True)
    # Not tarfile: before Python 3.11.4 it writes outside of the target if the archive says so.
    unpack = ["tar", "xzf", "-", "--no-same-owner", "--no-same-permissions", "-C", str(target)]
    unpacked = subprocess.run(unpack, input=done.stdout, capture_output=True, check=False)
    if unpacked.returncode:
        raise _failed(cluster, f"{run_dir} cannot be written to {target}", unpacked)


def _enter(cluster: Cluster, make: bool = False) -> str:
    """Return the lines of a script that set up the shell, and go to the folder.

    A folder that is not there is made, or the home is used in its place.
    """
    folder = _home(cluster.folder)
    go = f"mkdir -p {folder} && cd {folder}" if make else f"cd {folder} 2>/dev/null || cd"
    return f"{cluster.setup or ':'}\n{go} || exit {_NO_FOLDER}"


def _python(cluster: Cluster) -> str:
    return _home(cluster.python) if "/" in cluster.python else shlex.quote(cluster.python)


def _home(path: str) -> str:
    """Return a path for a shell, whose ~ is the home there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def _socket_folder(env: Mapping[str, str]) -> Path | None:
    """Return a folder of this user alone for the sockets of kept connections; None without one.

    Its path is short: that of a socket has at most 108 bytes, of which ssh needs 60.
    """
    folder = Path(env.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"hpctrain-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return None
    own = state.st_uid == os.getuid() and stat.S_IMODE(state.st_mode) == 0o700
    short = len(os.fsencode(folder)) < 48
    return folder if own and short and stat.S_ISDIR(state.st_mode) else None


def _ssh(
    cluster: Cluster,
    script: str,
    env: Mapping[str, str],
    *,
    text: bytes = b"",
    capture: bool = False,
    terminal: bool = False,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a script of sh on the login host."""
    options = {"ConnectTimeout": str(max(1, int(seconds or _SECONDS_TO_CONNECT)))}
    if folder := _socket_folder(env):
        options |= {"ControlMaster": "auto", "ControlPath": f"{folder}/%C"}
        options["ControlPersist"] = str(_KEPT)
    if seconds is not None:
        options["BatchMode"] = "yes"  # nobody answers a question for a password
    argv = ["ssh", *(f"-o{name}={value}" for name, value in options.items())]
    argv += ["-t"] if terminal else ["-T"]
    # The login shell may be another one, such as csh or fish.
    argv += ["--", cluster.host, f"exec sh -c {shlex.quote(script)}"]
    try:
        return subprocess.run(
            argv, input=None if terminal else text, capture_output=capture, env=dict(env),
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, _NO_CONNECTION, b"", b"no answer in time")
    except FileNotFoundError:
        raise StartError("HT830", "no ssh on the PATH", "the ssh of OpenSSH") from None


def _check(cluster: Cluster, done: subprocess.CompletedProcess[bytes]) -> None:
    """Raise the error of a script that could not begin."""
    if done.returncode == _NO_CONNECTION:
        raise _failed(cluster, "it cannot be reached", done, f"ssh {cluster.host} true")
    if done.returncode == _NO_FOLDER:
        raise _failed(cluster, f"its folder {cluster.folder} cannot be made", done)
    if done.returncode == _WRONG_PYTHON:
        oldest = ".".join(map(str, _OLDEST))
        raise StartError(
            "HT831",
            f"{cluster.python} on {cluster.host} is missing, or older than {oldest}",
            f"Python {oldest} or later on the login host",
            'python = "~/project/.venv/bin/python" in clusters.toml',
            'setup = "module load python" there',
        )


def _failed(
    cluster: Cluster, what: str, done: subprocess.CompletedProcess[bytes], *fixes: str
) -> HpctrainError:
    said = printable(" ".join((done.stderr or b"").decode(errors="replace").split()))[:500]
    return StartError(
        "HT830",
        f"{cluster.name} ({cluster.host}): {what}" + (f": {said}" if said else ""),
        "a login host that ssh reaches, with room in its home",
        *fixes,
    )


def _files() -> list[Path]:
    """Return the files of this package, without compiled ones."""
    return sorted(
        path
        for path in _PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    )


def _hash() -> str:
    """Return a hash of this package: another version goes to another folder."""
    found = hashlib.sha256()
    for path in _files():
        found.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _send_client(cluster: Cluster, client: str, env: Mapping[str, str]) -> None:
    """Copy this package to the login host.

    Raises:
        StartError: it cannot be written there.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in _files():
            tar.add(path, Path("hpctrain", path.relative_to(_PACKAGE)))
    # Of two copies at once, the first one stays.
    script = f"""{cluster.setup or ":"}
cd "$HOME" && mkdir -p .cache/hpctrain/new-$$ && cd .cache/hpctrain && tar xzf - -C new-$$ || exit
mv -T new-$$ client-{client} 2>/dev/null || rm -rf new-$$
test -d client-{client}"""
    done = _ssh(cluster, script, env, text=archive.getvalue(), capture=True)
    if done.returncode:
        raise _failed(cluster, "hpctrain cannot be copied there", done)
