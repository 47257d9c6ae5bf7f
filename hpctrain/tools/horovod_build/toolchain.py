"""Search for what a build needs: a C++ compiler, and optionally a CUDA toolkit and an MPI."""

import os
import re
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build.build_commands import ask

__all__ = ["Cuda", "Mpi", "check_compiler", "find_cuda", "find_mpi", "jobs"]

_SECONDS = 60.0
_BYTES_PER_COMPILER = 2 << 30
# Names that CMake tries, in its order (CMakeDetermineCXXCompiler.cmake).
_COMPILERS = ("c++", "CC", "g++", "clang++")
_MACROS = {14: 201402, 17: 201703, 20: 202002, 23: 202302}  # value of __cplusplus by standard
_FIRST_GCC = {17: 8, 20: 11, 23: 14}  # first GCC with that __cplusplus


def check_compiler(standard: int, env: Mapping[str, str]) -> None:
    """Check that make, Python's headers and a compiler for the C++ standard are installed.

    Args:
        standard: C++ standard, such as 20.
        env: environment with PATH, and CXX if the user chose a compiler.

    Raises:
        HpctrainError: one of them is missing; the error includes how to install it.
    """
    search_path = env.get("PATH")
    given = shlex.split(env.get("CXX", ""))
    names = [given[0]] if given else _COMPILERS
    compiler = next((path for name in names if (path := shutil.which(name, path=search_path))), "")
    expected = f"a C++ compiler and make, to build Horovod for C++{standard}"
    fixes = (
        "on Debian or Ubuntu: sudo apt-get install g++ make",
        "on a cluster: module load gcc",
    )
    if not compiler:
        found = f"found no C++ compiler: {', '.join(names)}"
        raise HpctrainError("HT912", found, expected, *fixes)
    if not shutil.which("make", path=search_path):
        raise HpctrainError("HT912", "found no make", expected, *fixes)
    macro = _MACROS[standard]
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        probe = Path(folder) / "probe.cc"
        probe.write_text(f"#include <string>\n#if __cplusplus < {macro}L\n#error old\n#endif\n")
        command = [compiler, *given[1:], f"-std=c++{standard}", "-fsyntax-only", str(probe)]
        answer = ask(command, env, _SECONDS)
    if answer is None or answer[0] != 0:
        version = (ask([compiler, "--version"], env, _SECONDS) or (0, "?"))[1].partition("\n")[0]
        gcc = f"GCC {_FIRST_GCC.get(standard, 0)} or newer"
        found = f"{compiler} ({version}) does not support C++{standard}"
        fix = f"export CXX=PATH CC=PATH of {gcc}"
        raise HpctrainError("HT912", found, gcc, "module load gcc", fix)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        fix = "on Debian or Ubuntu: sudo apt-get install python3-dev"
        raise HpctrainError(
            "HT912", f"found no {headers / 'Python.h'}", "the headers of this Python", fix
        )


@dataclass(frozen=True, slots=True)
class Cuda:
    """A CUDA toolkit.

    Attributes:
        home: folder with bin/nvcc and include/cuda_runtime.h.
        version: version of nvcc, such as "13.0".
    """

    home: Path
    version: str


def find_cuda(env: Mapping[str, str]) -> Cuda | None:
    """Find a toolkit: in $CUDA_HOME, in $CUDA_PATH, around nvcc on the PATH, in /usr/local/cuda."""
    nvcc = shutil.which("nvcc", path=env.get("PATH"))
    # nvcc may be a link to the nvcc of the toolkit, or a script that calls it.
    around = [Path(nvcc).parent.parent, Path(os.path.realpath(nvcc)).parent.parent] if nvcc else []
    given = [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    for home in (*given, *around, Path("/usr/local/cuda")):
        if (home / "include" / "cuda_runtime.h").is_file():
            answer = ask([str(home / "bin" / "nvcc"), "--version"], env, _SECONDS)
            found = re.search(r"release (\d+\.\d+)", answer[1]) if answer else None
            if found:
                return Cuda(home, found[1])
    return None


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI installation with its compilers.

    Attributes:
        kind: "openmpi", "mpich", "intelmpi", "mvapich", or "mpi" if it is unknown.
        version: version, such as "4.1.4"; "" if it is unknown.
        compilers: compiler for C++, and compiler for C if that exists.
    """

    kind: str
    version: str
    compilers: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.version}".strip()


_KINDS = (
    ("openmpi", r"open[- ]?mpi"),
    ("intelmpi", r"intel\(r\) mpi"),
    ("mvapich", r"mvapich"),
    ("mpich", r"mpich|hydra"),
)


def find_mpi(env: Mapping[str, str]) -> Mpi:
    """Find the MPI of $MPI_HOME, or else the MPI of the first mpirun on the PATH.

    Raises:
        HpctrainError: there is no MPI, or its compiler is missing.
    """
    path = env.get("PATH")
    home = env.get("MPI_HOME")
    mpirun = "" if home else shutil.which("mpirun", path=path) or ""
    answer = ask([mpirun, "--version"], env, _SECONDS) if mpirun else None
    kind = _kind(answer[1]) if answer else ""
    folders = [Path(home) / "bin"] if home else [Path(folder) for folder in (path or "").split(":")]
    if mpirun:
        folders.insert(0, Path(mpirun).parent)
    for folder in folders:
        # Debian can install several MPIs, and adds the kind to the names of their compilers.
        for ending in ("", f".{kind}"):
            compiler = folder / f"mpicxx{ending}"
            if os.access(compiler, os.X_OK) and compiler.is_file():
                found = _identify(compiler, ending, env)
                if not kind or found.kind == kind:
                    return found
    what = f"MPI_HOME={home}" if home else f"{mpirun or 'no mpirun on the PATH'}"
    raise HpctrainError(
        "HT911",
        f"found no mpicxx{f' of {kind}' if kind else ''} ({what})",
        "for --mpi: an MPI with its compiler",
        "on Debian or Ubuntu: sudo apt-get install libopenmpi-dev openmpi-bin",
        "on a cluster: module load openmpi",
        "export MPI_HOME=FOLDER",
    )


def _kind(text: str) -> str:
    """Return the kind of MPI that a text names; "" if it names no known MPI."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text.lower())), "")


def _identify(compiler: Path, ending: str, env: Mapping[str, str]) -> Mpi:
    """Find out to which MPI a compiler belongs: Open MPI's accepts --showme, the others' -v."""
    for_c = compiler.with_name(f"mpicc{ending}")
    compilers = (compiler, for_c) if for_c.is_file() else (compiler,)
    for option in ("--showme:version", "-v"):
        answer = ask([str(compiler), option], env, _SECONDS)
        if answer and answer[0] == 0 and (kind := _kind(answer[1])):
            version = re.search(r"\b(\d+\.\d+[\w.]*)", answer[1])
            return Mpi(kind, version[1] if version else "", compilers)
    return Mpi("mpi", "", compilers)


def jobs() -> int:
    """Return how many compilers may run at once: one for each usable core and 2 GiB of memory."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo") as file:
            found = re.search(r"MemAvailable: +(\d+) kB", file.read())
        free = int(found[1]) * 1024 if found else free
    except OSError:
        pass  # use the number of free pages instead
    return max(1, min(len(os.sched_getaffinity(0)), free // _BYTES_PER_COMPILER))
