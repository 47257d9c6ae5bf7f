"""Checks of Python, torch and other software: installed, and compatible with each other."""

import importlib
import importlib.util
import platform
import shutil
import signal
import sys
from types import ModuleType

from hpctrain._version import __version__
from hpctrain.cluster.texts import printable
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.subprocesses import ask
from hpctrain.tools.horovod_build import wheel

__all__ = ["horovod", "import_torch", "judge_horovod", "judge_torch", "python", "slurm"]

_IMPORT_SECONDS = 90.0  # for a cold cache: a package has many small files
_UNMENDED = 3  # exit code
_ASK_HOROVOD = """
import sys, horovod, horovod.torch as hvd
built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
print(f"{horovod.__version__}, built with {', '.join(built) or 'no transport'}")
if not {"gloo", "mpi"} & set(built):
    sys.exit(1)
sys.exit(0 if getattr(horovod, "mended_by_hpctrain", 0) >= int(sys.argv[1]) else int(sys.argv[2]))
"""


def python() -> Finding:
    """Return a finding with the versions of Python and hpctrain."""
    kind = "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    found = f"{platform.python_version()}, {sys.executable} ({kind}), hpctrain {__version__}"
    return Finding("python", OK, found)


def import_torch() -> tuple[ModuleType | None, Finding]:
    """Import torch; return the module, or None where that fails, with a finding."""
    try:
        torch = importlib.import_module("torch")
        return torch, Finding("torch", OK, f"{torch.__version__}, {_build(torch)}")
    except Exception as error:  # a broken installation may raise any error
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, judge_torch("" if missing else f"{type(error).__name__}: {error}")


def _build(torch: ModuleType) -> str:
    """Return what torch was built with: `CUDA 12.8, NCCL 2.27.3`, `CPU build`."""
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU build"
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return build
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{build}, {'RCCL' if hip else 'NCCL'} {version}"


def judge_torch(error: str) -> Finding:
    """Return the finding about a torch that cannot be imported.

    Args:
        error: error of the import; empty where torch is not installed.
    """
    expected = "a torch that this Python can import"
    if not error:
        fix = f"{sys.executable} -m pip install torch"
        return Finding("torch", PROBLEM, "not installed for this Python", expected, (fix,))
    found = f"import torch fails: {printable(' '.join(error.split()))}"
    fixes = (
        f"{sys.executable} -m pip install --force-reinstall torch",
        "try without LD_LIBRARY_PATH: env -u LD_LIBRARY_PATH hpctrain doctor",
    )
    return Finding("torch", PROBLEM, found, expected, fixes)


def horovod() -> Finding:
    """Check in a separate process whether an installed Horovod works with this torch."""
    if importlib.util.find_spec("horovod") is None:
        return Finding("horovod", OK, "not installed")
    command = [sys.executable, "-c", _ASK_HOROVOD, str(wheel.RECIPE), str(_UNMENDED)]
    return judge_horovod(ask(command, _IMPORT_SECONDS))


def judge_horovod(answer: tuple[int, str] | None) -> Finding:
    """Return a finding from the output of a process that imported Horovod.

    Args:
        answer: exit code and output of the process; None where it took too long.
    """
    if answer is None:
        found = f"import horovod.torch takes more than {_IMPORT_SECONDS:.0f} s"
    elif answer[0] < 0:
        found = f"import horovod.torch crashes: {signal.strsignal(-answer[0])}"
    else:
        found = printable((answer[1].splitlines() or ["import horovod.torch fails"])[-1])
        if answer[0] == 0:
            return Finding("horovod", OK, found)
        if answer[0] == _UNMENDED:
            found += ", not by hpctrain horovod build: a rank may hang when another one dies"
    expected = "a Horovod that was built for this torch, with gloo or MPI"
    return Finding("horovod", WARNING, found, expected, ("hpctrain horovod build",))


def slurm() -> Finding:
    """Return a finding with the version of Slurm."""
    if not shutil.which("srun"):
        return Finding("Slurm", OK, "not installed")
    answer = ask(["srun", "--version"]) or (1, "no answer")
    found = printable(answer[1].partition("\n")[0])[:200]
    return Finding("Slurm", OK, found if answer[0] == 0 else f"srun --version fails: {found}")
