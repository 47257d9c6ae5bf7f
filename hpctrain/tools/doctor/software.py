"""Python, torch and what else is installed: is it there, and does it fit together?"""

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import signal
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hpctrain._version import __version__
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding, plain
from hpctrain.tools.doctor.subprocesses import ask

__all__ = ["horovod", "import_torch", "python", "submitit", "torch"]

_IMPORT_SECONDS = 90.0  # on a file system with many small files and a cold cache
_ASK_HOROVOD = (
    "import json, horovod, horovod.torch as hvd; print(json.dumps({'version': horovod.__version__, "
    "'gloo': bool(hvd.gloo_built()), 'mpi': bool(hvd.mpi_built()), "
    "'nccl': bool(hvd.nccl_built())}))"
)


def python() -> Finding:
    """This interpreter and this package."""
    kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    found = f"{platform.python_version()}, {sys.executable} ({kind}), hpctrain {__version__}"
    return Finding("python", OK, found)


def import_torch() -> tuple[ModuleType | None, Finding]:
    """Torch, or None with what is wrong with it."""
    try:
        module = importlib.import_module("torch")
        facts = {
            "version": str(module.__version__),
            "cuda": module.version.cuda,
            "hip": module.version.hip,
            "nccl": _nccl(module),
        }
    except Exception as error:  # whatever a broken installation raises
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, torch({}, "" if missing else f"{type(error).__name__}: {error}")
    return module, torch(facts)


def _nccl(module: ModuleType) -> str | None:
    """The version of NCCL in this build of torch; None in one that has none."""
    try:
        version = module.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def torch(facts: Mapping[str, Any], error: str = "") -> Finding:
    """Is torch there?

    Args:
        facts: "version", "cuda", "hip", "nccl"; empty where it cannot be imported.
        error: why not; empty where it is not installed.
    """
    if not facts and not error:
        fix = f"{sys.executable} -m pip install torch"
        return Finding("torch", PROBLEM, "not installed for this Python", fix)
    if not facts:
        return Finding(
            "torch",
            PROBLEM,
            f"import torch fails: {plain(error)}",
            f"{sys.executable} -m pip install --force-reinstall torch    "
            "(and try without LD_LIBRARY_PATH: env -u LD_LIBRARY_PATH hpctrain doctor)",
        )
    if facts["hip"]:
        build = f"ROCm {facts['hip']}"
    else:
        build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    nccl = f", {'RCCL' if facts['hip'] else 'NCCL'} {facts['nccl']}" if facts["nccl"] else ""
    return Finding("torch", OK, f"{facts['version']}, {build}{nccl}")


def horovod() -> Finding:
    """Whether an installed Horovod works with this torch: tried in a process of its own."""
    if importlib.util.find_spec("horovod") is None:
        return judge_horovod(False, None)
    return judge_horovod(True, ask([sys.executable, "-c", _ASK_HOROVOD], _IMPORT_SECONDS))


def judge_horovod(installed: bool, answer: tuple[int, str] | None) -> Finding:
    """What a process that imported Horovod said.

    Args:
        installed: whether there is one.
        answer: exit code and output; None where it took too long.
    """
    fix = "hpctrain horovod build"
    if not installed:
        return Finding("horovod", OK, "not installed")
    if answer is None:
        found = f"import horovod.torch takes more than {_IMPORT_SECONDS:.0f} s"
        return Finding("horovod", WARNING, found, fix)
    code, said = answer
    lines = said.strip().splitlines() or [""]
    if code < 0:
        found = f"import horovod.torch crashes with {_signal(-code)}: built for another torch"
        return Finding("horovod", WARNING, found, fix)
    try:
        facts = json.loads(lines[-1]) if code == 0 else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        return Finding("horovod", WARNING, f"import horovod.torch fails: {plain(lines[-1])}", fix)
    carriers = [name for name in ("gloo", "mpi", "nccl") if facts.get(name)]
    built = ", ".join(carriers) or "nothing to talk over"
    level = OK if {"gloo", "mpi"} & set(carriers) else WARNING
    found = f"{facts.get('version')}, built with {built}"
    return Finding("horovod", level, found, "" if level == OK else fix)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def submitit() -> Finding:
    """Its version, where it is installed."""
    try:
        return Finding("submitit", OK, importlib.metadata.version("submitit"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("submitit", OK, "not installed")
