"""Command of a rank in a container."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster import env_vars
from hpctrain.cluster.job import submit_folder
from hpctrain.errors import UsageError

__all__ = ["apptainer", "pyxis"]

# Characters that the names of mounted folders cannot have. Pyxis writes them into a script of bash.
_OF_BOTH = ",:"
_OF_PYXIS = _OF_BOTH + '$`"\\'
# What the job decides, and not the image: the code that runs, and the bits of a sum.
_ALWAYS = ("PYTHONPATH", "OMP_NUM_THREADS")


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

    The values of an image override those of the job, except PYTHONPATH, OMP_NUM_THREADS and
    `variables`. Source: README of Pyxis; tried with 0.24.0 and enroot 4.1.2.

    Args:
        image: path or address of the image.
        folder: working directory.
        env: environment of the ranks.
        variables: names of variables that override those of the image.

    Raises:
        UsageError: a folder has a name that cannot be mounted.
    """
    folders = _mounts(env, _OF_PYXIS)
    if not any(Path(folder).is_relative_to(mounted) for mounted in folders):
        folders.append(_checked(folder, _OF_PYXIS))
    mounts = [f"{path}:{path}" for path in folders]
    # Pyxis reads its variable only without the option.
    mounts += filter(None, [env.get("PYXIS_CONTAINER_MOUNTS")])
    names = list(dict.fromkeys((*filter(env.get, _ALWAYS), *variables)))
    # A file by a plain relative path would be taken for the name of an image in a registry.
    is_file = os.path.isfile(_image(image, (image,), env))
    return [
        f"--container-image={_image(image, (image,) if is_file else ('.',), env)}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={folder}",
        *([f"--container-env={','.join(names)}"] if names else []),
    ]


def _mounts(env: Mapping[str, str], refused: str = _OF_BOTH) -> list[str]:
    names = ("SLURM_SUBMIT_DIR", env_vars.RUN_DIR, env_vars.SCRATCH)
    folders = dict.fromkeys(env[name] for name in names if env.get(name))
    return [_checked(folder, refused) for folder in folders]


def _checked(folder: str, refused: str) -> str:
    """Return a folder if its name can be mounted."""
    if set(folder) & set(refused):
        raise UsageError("HT811.cannot-mount", folder=folder, characters=" ".join(refused))
    return folder


def _image(name: str, relative: tuple[str, ...], env: Mapping[str, str]) -> str:
    """Return the image, a relative path below the submit directory: ranks may start elsewhere."""
    if "://" in name or os.path.isabs(name) or not name.startswith(relative):
        return name
    return os.path.join(submit_folder(env), name)
