"""Command of a rank in a container."""

import os
from collections.abc import Mapping, Sequence

from hpctrain.cluster import env_vars
from hpctrain.errors import UsageError

__all__ = ["RUNTIMES", "apptainer", "pyxis"]

RUNTIMES = ("apptainer", "pyxis")


def apptainer(
    command: Sequence[str], image: str, gpus: bool, folder: str, env: Mapping[str, str]
) -> list[str]:
    """Return the command that runs a command in a container of Apptainer.

    In the container are the submit directory and that of the run, all variables, and the GPUs.

    Args:
        command: program and arguments.
        image: path or address of the image.
        gpus: whether this host has GPUs.
        folder: working directory.
        env: environment of the ranks.

    Raises:
        UsageError: a folder has a name that cannot be mounted.
    """
    binds = [word for path in _mounts(env) for word in ("--bind", path)]
    nv = ["--nv"] if gpus else []
    return ["apptainer", "exec", *nv, "--pwd", folder, *binds, _image(image, ("",), env), *command]


def pyxis(image: str, folder: str, env: Mapping[str, str], variables: Sequence[str]) -> list[str]:
    """Return the options with which srun starts its tasks in a container of Pyxis.

    Args:
        image: path or address of the image.
        folder: working directory.
        env: environment of the ranks.
        variables: names of variables that override those of the image.

    Raises:
        UsageError: a folder has a name that cannot be mounted.
    """
    mounts = ",".join(f"{path}:{path}" for path in _mounts(env))
    return [
        f"--container-image={_image(image, ('./', '../'), env)}",
        f"--container-mounts={mounts}",
        f"--container-workdir={folder}",
        *([f"--container-env={','.join(variables)}"] if variables else []),
    ]


def _mounts(env: Mapping[str, str]) -> list[str]:
    names = ("SLURM_SUBMIT_DIR", env_vars.RUN_DIR, env_vars.SCRATCH)
    folders = list(dict.fromkeys(env[name] for name in names if env.get(name)))
    for folder in folders:
        if set(folder) & set(",:"):
            raise UsageError(
                "HT811", f"a container and the folder {folder}", "folders without , and :"
            )
    return folders


def _image(name: str, relative: tuple[str, ...], env: Mapping[str, str]) -> str:
    """Return the image, a relative path below the submit directory: ranks may start elsewhere."""
    if "://" in name or os.path.isabs(name) or not name.startswith(relative):
        return name
    return os.path.join(env.get("SLURM_SUBMIT_DIR") or os.getcwd(), name)
