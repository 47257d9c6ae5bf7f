"""Copies of code, an environment and data on each host's own disk, for as long as the ranks run."""

import contextlib
import glob
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.cluster.texts import user_name
from hpctrain.errors import StartError

__all__ = ["staged"]

_MARK = ".start"  # only folders with this file are removed: all users can write in /tmp
_LEFT_OUT = ("runs", ".git", ".venv")


@contextlib.contextmanager
def staged(
    files: Sequence[str], name: str, env: Mapping[str, str]
) -> Iterator[tuple[dict[str, str], str | None]]:
    """Copy the files, yield variables and working directory for the ranks, and remove the copies.

    Args:
        files: what to copy, each empty for nothing: the folder in which the ranks start, a tar
            archive of an environment with `bin` at its top, and a folder with data, whose copy is
            found by its name.
        name: name of this start, `LABEL-NUMBER`; copies of earlier starts of LABEL are removed.
        env: environment of this process.

    Raises:
        StartError: the files cannot be copied.
    """
    if not any(files):
        yield {}, None
        return
    code, environment, data = files
    top = Path(env.get("SLURM_TMPDIR") or env.get("TMPDIR") or "/tmp")  # noqa: S108
    folder = top / f"hpctrain-{user_name()}-{name}"
    try:
        _remove_earlier(folder)
        folder.mkdir(mode=0o700)
        (folder / _MARK).touch()
    except OSError as error:
        raise _failed(folder, error) from None
    try:
        try:
            variables = _copy(code, environment, data, folder, env)
        except (OSError, shutil.Error) as error:
            raise _failed(folder, error) from None
        variables[env_vars.SCRATCH] = str(folder)
        yield variables, str(folder / "code") if code else None
    finally:
        _remove(folder)


def _copy(
    code: str, environment: str, data: str, folder: Path, env: Mapping[str, str]
) -> dict[str, str]:
    variables = {}
    # The disk may be below the folder that is copied.
    own = shutil.ignore_patterns(folder.name)
    if code:
        source = Path(code)

        def left_out(path: str, names: list[str]) -> list[str]:
            return [*own(path, names), *(_LEFT_OUT if Path(path) == source else ())]

        shutil.copytree(source, folder / "code", symlinks=True, ignore=left_out)
    if environment:
        place = folder / "environment"
        place.mkdir()
        _run("tar", "-C", str(place), "--force-local", "-xf", environment)
        programs = place / "bin"
        if not programs.is_dir():
            raise StartError("HT218.archive-without-bin", environment=environment)
        if (programs / "conda-unpack").exists():  # conda-pack requires this
            _run(str(programs / "python"), str(programs / "conda-unpack"))
        variables["PATH"] = f"{programs}:{env.get('PATH', os.defpath)}"
    if data:
        # Links become files, as their targets may be on a remote disk. Modes are not copied, as
        # read-only copies could not be removed.
        name = Path(data).name
        place = folder / "data" / name
        shutil.copytree(data, place, ignore=own, copy_function=shutil.copyfile)
        variables[env_vars.DATA] = str(folder / "data")
    return variables


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")


def _remove_earlier(folder: Path) -> None:
    """Remove copies that killed starts of the same job have left.

    A folder of this start is from another host, where this disk is not the host's own.
    """
    label = folder.name.rpartition("-")[0]
    for old in folder.parent.glob(f"{glob.escape(label)}-*"):
        if old != folder and old.name.removeprefix(f"{label}-").isdecimal() and _is_own(old):
            _remove(old)


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    return is_folder and status.st_uid == os.getuid() and (folder / _MARK).is_file()


def _remove(folder: Path) -> None:
    for name, _, _ in os.walk(folder):  # only root could remove what is in a read-only folder
        with contextlib.suppress(OSError):
            os.chmod(name, 0o700)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _MARK:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)  # the mark is removed last, in case of a kill


def _failed(folder: Path, error: Exception) -> StartError:
    reason = str(error)
    if isinstance(error, shutil.Error):  # a list: source, copy and reason for each file
        (_, _, reason), *others = error.args[0]
        reason += f", and {len(others)} more" if others else ""
    return StartError("HT218.copy-failed", node=os.uname().nodename, folder=folder, reason=reason)
