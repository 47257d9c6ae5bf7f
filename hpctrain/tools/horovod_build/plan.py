"""The plan of a build: the torch that Horovod has to fit, and the parts of the machine it uses."""

import json
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import commands
from hpctrain.errors import HpctrainError, UsageError

__all__ = [
    "Cuda",
    "Plan",
    "Torch",
    "ask_torch",
    "check_compiler",
    "check_toolkit",
    "cxx_standard",
    "decide",
]

_SECONDS = 60.0
_IMPORT_SECONDS = 180.0  # on a file system with many small files and a cold cache
_ASK = """
import importlib.util, json, os, torch
nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "include": os.path.join(os.path.dirname(torch.__file__), "include"),
    "nccl": list(nccl.submodule_search_locations)[0] if nccl else None,
}))
"""
# What CMake compiles and links first, too.
_KERNEL = """
#include <cuda_runtime.h>
__global__ void kernel() {}
int main() { kernel<<<1, 1>>>(); return cudaDeviceSynchronize(); }
"""
_REQUIRED = re.compile(r"__cplusplus\s*<\s*20(\d\d)\d\dL")
_NEWEST_REQUIRED = 20


@dataclass(frozen=True, slots=True)
class Torch:
    """Facts of torch on which a build depends.

    Attributes:
        version: full version, such as "2.15.0+cu132".
        cuda: version of CUDA with which torch was built; None in other builds.
        include: folder with torch's headers.
        nccl: folder of the Python package with torch's NCCL; None if it is not installed.
    """

    version: str
    cuda: str | None
    include: str
    nccl: str | None


@dataclass(frozen=True, slots=True)
class Cuda:
    """A CUDA toolkit: its folder with bin/nvcc, and its version, such as "13.0"."""

    home: Path
    version: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Versions and options of one build.

    Attributes:
        torch: torch that the build has to fit.
        cuda: CUDA toolkit for NCCL on GPUs; None for a CPU build.
        mpi: compiler of the MPI that Horovod supports in addition to gloo; "" for gloo alone.
        mpi_flags: flags of that compiler, which name the folders of the MPI.
    """

    torch: Torch
    cuda: Cuda | None = None
    mpi: str = ""
    mpi_flags: str = ""


def ask_torch(env: Mapping[str, str]) -> Torch:
    """Return the facts of the torch that is installed for this Python.

    Raises:
        HpctrainError: torch is missing, or its import fails.
    """
    try:
        done = commands.run([sys.executable, "-P", "-c", _ASK], _IMPORT_SECONDS, env)
        return Torch(**json.loads(done.stdout.strip().splitlines()[-1]))
    except commands.NoAnswerError as error:
        reason = str(error)
    except (ValueError, TypeError, IndexError):
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise HpctrainError("HT910.no-torch", reason=reason, python=sys.executable)


def decide(torch: Torch, cuda: bool | None, mpi: bool, env: Mapping[str, str]) -> Plan:
    """Decide what to build: by default for GPUs if torch and this machine support them.

    Raises:
        UsageError: --cuda is given, but torch has no CUDA, or no toolkit of the same major version.
        HpctrainError: --mpi is given, and there is no compiler of an MPI.
    """
    toolkit = None if cuda is False else _find_cuda(env)
    if not torch.cuda or not toolkit or toolkit.version.split(".")[0] != torch.cuda.split(".")[0]:
        nvcc = toolkit.version if toolkit else "not found"
        if cuda and not torch.cuda:
            raise UsageError("HT911.torch-without-cuda", torch=torch, nvcc=nvcc)
        if cuda:
            raise UsageError("HT911.no-matching-cuda", torch=torch, nvcc=nvcc)
        toolkit = None
    return Plan(torch, toolkit, *(_find_mpi(env) if mpi else ()))


def _find_cuda(env: Mapping[str, str]) -> Cuda | None:
    """Find a toolkit: in $CUDA_HOME, in $CUDA_PATH, around nvcc on the PATH, in /usr/local/cuda."""
    nvcc = shutil.which("nvcc", path=env.get("PATH"))
    around = str(Path(nvcc).resolve().parent.parent) if nvcc else None
    for home in (env.get("CUDA_HOME"), env.get("CUDA_PATH"), around, "/usr/local/cuda"):
        output = _output([f"{home}/bin/nvcc", "--version"], env) if home else ""
        if home and (found := re.search(r"release (\d+\.\d+)", output)):
            return Cuda(Path(home), found[1])
    return None


def _find_mpi(env: Mapping[str, str]) -> tuple[str, str]:
    """Find the compiler of an MPI, in $MPI_HOME or else on the PATH, and its flags."""
    home = env.get("MPI_HOME")
    path = f"{home}/bin" if home else env.get("PATH")
    if compiler := shutil.which("mpicxx", path=path):
        return compiler, _output([compiler, "-show"], env)
    raise HpctrainError("HT911.no-mpicxx", place=f"MPI_HOME={home}" if home else "the PATH")


def _output(command: list[str], env: Mapping[str, str]) -> str:
    """Return the output of a command; "" if it is missing or fails."""
    try:
        done = commands.run(command, _SECONDS, {**env, "LC_ALL": "C"})
    except commands.NoAnswerError:
        return ""
    return "" if done.returncode else done.stdout


def cxx_standard(include: str) -> int:
    """Return the C++ standard that torch's headers require, such as 17.

    The headers refuse older standards with `#error`. If they name none, the newest standard that
    any torch requires is returned.
    """
    try:
        header = Path(include, "ATen", "ATen.h").read_text(errors="replace")
    except OSError:
        return _NEWEST_REQUIRED
    return max(map(int, _REQUIRED.findall(header)), default=_NEWEST_REQUIRED)


def check_compiler(standard: int, env: Mapping[str, str]) -> None:
    """Check that make, and a compiler for the C++ standard with Python's headers, are installed.

    Raises:
        HpctrainError: one of them is missing; the error includes how to install it.
    """
    # Names that CMake tries, in its order (CMakeDetermineCXXCompiler.cmake).
    names = shlex.split(env.get("CXX", ""))[:1] or ["c++", "CC", "g++", "clang++"]
    path = env.get("PATH")
    compiler = next((found for name in names if (found := shutil.which(name, path=path))), "")
    if not compiler:
        reason = f"no C++ compiler ({', '.join(names)}) on the PATH"
    elif not shutil.which("make", path=path):
        reason = "no make on the PATH"
    else:
        with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
            probe = Path(folder) / "probe.cc"
            probe.write_text("#include <Python.h>\n#include <string>\n")
            flags = [f"-std=c++{standard}", "-fsyntax-only", f"-I{sysconfig.get_path('include')}"]
            lines = _refusal([compiler, *flags, str(probe)], env)
        if not lines:
            return
        reason = f"{compiler} does not compile C++{standard}: {lines[0]}"
    raise HpctrainError("HT912.cannot-compile", reason=reason, standard=standard)


def _refusal(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the output of a compiler that fails or does not answer; empty if it succeeds."""
    try:
        done = commands.run(list(command), _SECONDS, env)
    except commands.NoAnswerError as error:
        return [str(error)]
    output = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
    return output if done.returncode else []


def check_toolkit(cuda: Cuda, env: Mapping[str, str]) -> None:
    """Check that a CUDA toolkit compiles and links a kernel: CMake finds that out minutes later.

    Raises:
        HpctrainError: it lacks a part, such as the headers, or its nvcc refuses the C++ compiler.
    """
    host = ["-ccbin", env["CUDAHOSTCXX"]] if env.get("CUDAHOSTCXX") else []
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        probe = Path(folder) / "probe.cu"
        probe.write_text(_KERNEL)
        command = [str(cuda.home / "bin" / "nvcc"), *host, "-o", f"{folder}/probe", str(probe)]
        lines = _refusal(command, env)
    if not lines:
        return
    reason = next((line for line in lines if "error" in line.lower()), lines[0])
    raise HpctrainError("HT911.incomplete-cuda", home=cuda.home, reason=reason)
