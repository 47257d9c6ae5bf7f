"""Work of each rank of a submitit job, and fields that such a job cannot have."""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs.function import Function, Script, pack
from hpctrain.jobs.script import is_python
from hpctrain.jobs.spec import JobSpec

__all__ = ["check_launcher", "of_call", "of_command", "refuse"]

_AS_SCRIPT = "hpctrain submit --via sbatch, which submits only a script"
# Fields that a submitit job cannot have, and what to do instead.
_UNSUPPORTED = {
    **dict.fromkeys(
        ("container", "stage_code", "stage_environment", "stage_data", "elastic", "requeue_plain"),
        (_AS_SCRIPT,),
    ),
    "array": ("one submit() for each index", _AS_SCRIPT),
    "sweep": ("[hpctrain.submit(train, spec, kwargs=one) for one in …]", _AS_SCRIPT),
}
_FIRST_ARGUMENT = "remove it: the function or script is the first argument"
_ALREADY_GIVEN = dict.fromkeys(("command", "function"), (_FIRST_ARGUMENT,))


def of_call(
    train: Callable[..., Any] | str | os.PathLike[str],
    spec: JobSpec,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Function | Script, str]:
    """Return the work of each rank for a call of `hpctrain.submit`, and the job's name.

    Raises:
        UsageError: the work cannot be sent, or the spec has a field that such a job cannot have.
    """
    refuse(spec, {**_ALREADY_GIVEN, **_UNSUPPORTED})
    work: Function | Script
    if callable(train):
        refuse(spec, {"backend": ("hpctrain.Session(backend=…) in the function",)})
        _check_arguments(train, args, kwargs)
        work = pack(train, args, kwargs)
        title = getattr(train, "__name__", type(train).__name__)
    else:
        work = _script(os.fspath(train), [str(argument) for argument in args], spec)
        title = Path(train).stem
    return work, spec.name or re.sub(r"[^\w.-]", "_", title).strip("_")[:100] or "job"


def _check_arguments(
    train: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise UsageError if a function does not take its arguments, before the job is queued."""
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # such as a function written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(train, "__name__", type(train).__name__)
        raise UsageError(
            "HT813",
            f"{name}{signature} with args={args!r:.200} and kwargs={kwargs!r:.200}: {error}",
            "arguments that fit its signature",
        ) from None


def of_command(spec: JobSpec) -> tuple[Script, str]:
    """Return the work of each rank for a spec's own command, and the Python for it.

    Raises:
        UsageError: it is another command than `python X.py …` or `python -m M …`, or the spec has
            a field that such a job cannot have.
    """
    instead = ("command = python X.py …", "hpctrain.submit(FUNCTION, …)")
    refuse(spec, {**_UNSUPPORTED, "function": instead})
    check_launcher(spec)
    argv = [argument for argument in spec.command if argument != "-u"]
    module = argv[1:2] == ["-m"]
    name = argv[1 + module : 2 + module]
    if not name or not is_python(argv[0]) or name[0].startswith("-"):
        raise UsageError(
            "HT810",
            f"submitit with the command {shlex.join(spec.command)!r}",
            "python X.py …, or python -m M …",
            _AS_SCRIPT,
        )
    arguments = argv[2 + module :]
    if module:
        return Script(name[0], True, (*arguments, *_backend(spec))), argv[0]
    return _script(name[0], arguments, spec), argv[0]


def check_launcher(spec: JobSpec) -> None:
    """Raise UsageError if submitit cannot start ranks with this launcher."""
    if spec.launcher == "none":
        raise UsageError(
            "HT811",
            f"launcher = {spec.launcher!r} in a job of submitit",
            "hpctrain, or srun",
            _AS_SCRIPT,
        )


def refuse(spec: JobSpec, fields: Mapping[str, tuple[str, ...]]) -> None:
    """Raise UsageError if a spec has one of these fields, with what to do instead.

    No field of a spec is dropped silently.
    """
    for name, instead in fields.items():
        if getattr(spec, name):
            raise UsageError(
                "HT811", f"{name} = {getattr(spec, name)!r} in a job of submitit", "", *instead
            )


def _script(path: str, arguments: Sequence[str], spec: JobSpec) -> Script:
    if not os.path.isfile(path):
        raise UsageError("HT805", f"there is no file {path!r}", "the path of a Python script")
    return Script(os.path.abspath(path), False, (*arguments, *_backend(spec)))


def _backend(spec: JobSpec) -> tuple[str, ...]:
    return ("--backend", spec.backend) if spec.backend else ()
