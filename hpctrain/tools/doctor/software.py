"""Checks of Python, torch and other packages: installed, and compatible with each other."""

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
from hpctrain.cluster.texts import printable
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.subprocesses import ask

__all__ = ["horovod", "import_torch", "python", "submitit", "torch"]

_IMPORT_SECONDS = 90.0  # for a cold cache: a package has many small files
_ASK_HOROVOD = (
    "import json, horovod, horovod.torch as hvd; print(json.dumps({'version': horovod.__version__, "
    "'gloo': bool(hvd.gloo_built()), 'mpi': bool(hvd.mpi_built()), "
    "'nccl': bool(hvd.nccl_built())}))"
)


def python() -> Finding:
    """Return a finding with the versions of Python and hpctrain."""
    kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    found = f"{platform.python_version()}, {sys.executable} ({kind}), hpctrain {__version__}"
    return Finding("python", OK, found)


def import_torch() -> tuple[ModuleType | None, Finding]:
    """Import torch; return the module, or None where that fails, with a finding."""
    try:
        module = importlib.import_module("torch")
        facts = {
            "version": str(module.__version__),
            "cuda": module.version.cuda,
            "hip": module.version.hip,
            "nccl": _nccl(module),
        }
    except Exception as error:  # a broken installation may raise any error
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, torch({}, "" if missing else f"{type(error).__name__}: {error}")
    return module, torch(facts)


def _nccl(module: ModuleType) -> str | None:
    """Return the version of NCCL in this build of torch; None in a build without NCCL."""
    try:
        version = module.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def torch(facts: Mapping[str, Any], error: str = "") -> Finding:
    """Return a finding about torch.

    Args:
        facts: "version", "cuda", "hip" and "nccl"; empty where torch cannot be imported.
        error: error of the import; empty where there is none or torch is not installed.
    """
    if not facts and not error:
        fix = f"{sys.executable} -m pip install torch"
        return Finding("torch", PROBLEM, "not installed for this Python", (fix,))
    if not facts:
        return Finding(
            "torch",
            PROBLEM,
            f"import torch fails: {printable(' '.join(str(error).split()))}",
            (
                f"{sys.executable} -m pip install --force-reinstall torch",
                "try without LD_LIBRARY_PATH: env -u LD_LIBRARY_PATH hpctrain doctor",
            ),
        )
    if facts["hip"]:
        build = f"ROCm {facts['hip']}"
    else:
        build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    nccl = f", {'RCCL' if facts['hip'] else 'NCCL'} {facts['nccl']}" if facts["nccl"] else ""
    return Finding("torch", OK, f"{facts['version']}, {build}{nccl}")


def horovod() -> Finding:
    """Check in a separate process whether an installed Horovod works with this torch."""
    if importlib.util.find_spec("horovod") is None:
        return judge_horovod(False, None)
    return judge_horovod(True, ask([sys.executable, "-c", _ASK_HOROVOD], _IMPORT_SECONDS))


def judge_horovod(installed: bool, answer: tuple[int, str] | None) -> Finding:
    """Return a finding from the output of a process that imported Horovod.

    Args:
        installed: whether Horovod is installed.
        answer: exit code and output of the process; None where it took too long.
    """
    fixes = ("hpctrain horovod build",)
    if not installed:
        return Finding("horovod", OK, "not installed")
    if answer is None:
        found = f"import horovod.torch takes more than {_IMPORT_SECONDS:.0f} s"
        return Finding("horovod", WARNING, found, fixes)
    code, output = answer
    lines = output.strip().splitlines() or [""]
    if code < 0:
        found = f"import horovod.torch crashes with {_signal(-code)}: built for another torch"
        return Finding("horovod", WARNING, found, fixes)
    try:
        facts = json.loads(lines[-1]) if code == 0 else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        return Finding(
            "horovod", WARNING, f"import horovod.torch fails: {printable(lines[-1])}", fixes
        )
    transports = [name for name in ("gloo", "mpi", "nccl") if facts.get(name)]
    built = ", ".join(transports) or "no transport"
    level = OK if {"gloo", "mpi"} & set(transports) else WARNING
    found = f"{facts.get('version')}, built with {built}"
    return Finding("horovod", level, found, () if level == OK else fixes)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def submitit() -> Finding:
    """Return a finding with the version of submitit, if it is installed."""
    try:
        return Finding("submitit", OK, importlib.metadata.version("submitit"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("submitit", OK, "not installed")
