"""What has to be there to compile: a C++ compiler, CUDA's and MPI's where they are wanted."""

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
from hpctrain.tools.horovod_build.commands import ask

__all__ = ["Cuda", "Mpi", "check_compiler", "find_cuda", "find_mpi", "jobs"]

_SECONDS = 60.0
_BYTES_PER_COMPILER = 2 << 30
# What CMake tries, the first ones first (CMakeDetermineCXXCompiler.cmake).
_COMPILERS = ("c++", "CC", "g++", "clang++")
_MACROS = {14: 201402, 17: 201703, 20: 202002, 23: 202302}  # __cplusplus of a standard
_FIRST_GCC = {17: 8, 20: 11, 23: 14}  # the first GCC with that __cplusplus


def check_compiler(standard: int, env: Mapping[str, str]) -> None:
    """See that there is a compiler that knows the standard, make, and Python's headers.

    Args:
        standard: of C++, such as 20.
        env: with PATH, and CXX where a person chose a compiler.

    Raises:
        HpctrainError: something is missing; it says what to install.
    """
    path = env.get("PATH")
    given = shlex.split(env.get("CXX", ""))
    names = [given[0]] if given else _COMPILERS
    compiler = next((one for name in names if (one := shutil.which(name, path=path))), "")
    expected = f"a C++ compiler and make, to build Horovod for C++{standard}"
    fix = "on Debian or Ubuntu: sudo apt-get install g++ make; on a cluster: module load gcc"
    if not compiler:
        raise HpctrainError(f"found no C++ compiler: {', '.join(names)}", expected, fix)
    if not shutil.which("make", path=path):
        raise HpctrainError("found no make", expected, fix)
    macro = _MACROS[standard]
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        probe = Path(folder) / "probe.cc"
        probe.write_text(f"#include <string>\n#if __cplusplus < {macro}L\n#error old\n#endif\n")
        command = [compiler, *given[1:], f"-std=c++{standard}", "-fsyntax-only", str(probe)]
        answer = ask(command, env, _SECONDS)
    if answer is None or answer[0] != 0:
        version = (ask([compiler, "--version"], env, _SECONDS) or (0, "?"))[1].partition("\n")[0]
        gcc = f"GCC {_FIRST_GCC.get(standard, 0)} or newer"
        fix = f"module load gcc, or CXX=PATH CC=PATH of {gcc}"
        raise HpctrainError(f"{compiler} ({version}) knows no C++{standard}", gcc, fix)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        fix = "on Debian or Ubuntu: sudo apt-get install python3-dev"
        raise HpctrainError(f"found no {headers / 'Python.h'}", "the headers of this Python", fix)


@dataclass(frozen=True, slots=True)
class Cuda:
    """A CUDA toolkit.

    Attributes:
        home: its folder, with bin/nvcc and include/cuda_runtime.h.
        version: nvcc's, such as "13.0".
    """

    home: Path
    version: str


def find_cuda(env: Mapping[str, str]) -> Cuda | None:
    """The toolkit of $CUDA_HOME, of $CUDA_PATH, of nvcc on the PATH, or /usr/local/cuda."""
    nvcc = shutil.which("nvcc", path=env.get("PATH"))
    # nvcc may be a link or a script that calls the one of the toolkit.
    beside = [Path(nvcc).parent.parent, Path(os.path.realpath(nvcc)).parent.parent] if nvcc else []
    given = [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    for home in (*given, *beside, Path("/usr/local/cuda")):
        if (home / "include" / "cuda_runtime.h").is_file():
            answer = ask([str(home / "bin" / "nvcc"), "--version"], env, _SECONDS)
            found = re.search(r"release (\d+\.\d+)", answer[1]) if answer else None
            if found:
                return Cuda(home, found[1])
    return None


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI with its compilers.

    Attributes:
        kind: "openmpi", "mpich", "intelmpi", "mvapich", or "mpi" where it does not say.
        version: such as "4.1.4"; "" where it does not say.
        compilers: for C++, and for C where that is there.
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
    """The MPI of $MPI_HOME, else the one whose mpirun is first on the PATH.

    Raises:
        HpctrainError: there is none, or its compiler is missing.
    """
    path = env.get("PATH")
    home = env.get("MPI_HOME")
    mpirun = "" if home else shutil.which("mpirun", path=path) or ""
    said = ask([mpirun, "--version"], env, _SECONDS) if mpirun else None
    kind = _kind(said[1]) if said else ""
    folders = [Path(home) / "bin"] if home else [Path(one) for one in (path or "").split(":")]
    if mpirun:
        folders.insert(0, Path(mpirun).parent)
    for folder in folders:
        # Debian has several MPIs side by side, and names their compilers so.
        for ending in ("", f".{kind}"):
            compiler = folder / f"mpicxx{ending}"
            if os.access(compiler, os.X_OK) and compiler.is_file():
                found = _identify(compiler, ending, env)
                if not kind or found.kind == kind:
                    return found
    what = f"MPI_HOME={home}" if home else f"{mpirun or 'no mpirun on the PATH'}"
    raise HpctrainError(
        f"found no mpicxx{f' of {kind}' if kind else ''} ({what})",
        "for --mpi: an MPI with its compiler",
        "on Debian or Ubuntu: sudo apt-get install libopenmpi-dev openmpi-bin; "
        "on a cluster: module load openmpi; else MPI_HOME=FOLDER",
    )


def _kind(text: str) -> str:
    """Which MPI calls itself so; "" where none is known."""
    return next((kind for kind, words in _KINDS if re.search(words, text.lower())), "")


def _identify(compiler: Path, ending: str, env: Mapping[str, str]) -> Mpi:
    """What MPI a compiler belongs to: Open MPI's knows --showme, the others' know -v."""
    beside = compiler.with_name(f"mpicc{ending}")
    compilers = (compiler, beside) if beside.is_file() else (compiler,)
    for option in ("--showme:version", "-v"):
        answer = ask([str(compiler), option], env, _SECONDS)
        if answer and answer[0] == 0 and (kind := _kind(answer[1])):
            version = re.search(r"\b(\d+\.\d+[\w.]*)", answer[1])
            return Mpi(kind, version[1] if version else "", compilers)
    return Mpi("mpi", "", compilers)


def jobs() -> int:
    """How many compilers at once: one a core that may be used, and two gigabytes for each."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo") as file:
            found = re.search(r"MemAvailable: +(\d+) kB", file.read())
        free = int(found[1]) * 1024 if found else free
    except OSError:
        pass  # then what is free at once has to do
    return max(1, min(len(os.sched_getaffinity(0)), free // _BYTES_PER_COMPILER))
