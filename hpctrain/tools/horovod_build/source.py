"""Horovod's source package: fetched by pip, and changed where it does not fit a newer torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError

__all__ = ["VERSION", "Patch", "apply", "patches"]

#: The release that is built, the last one there is.
VERSION = "0.28.1"

_TOP = "CMakeLists.txt"
_TORCH = "horovod/torch/CMakeLists.txt"
_FIND_TORCH = "cmake/Modules/FindPytorch.cmake"
_FIND_NCCL = "cmake/Modules/FindNCCL.cmake"
_CUDA_KERNELS = "horovod/common/ops/cuda/CMakeLists.txt"
_WAIT = "horovod/torch/mpi_ops_v2.cc"
_YIELD = "std::this_thread::yield();"


@dataclass(frozen=True, slots=True)
class Patch:
    """A text to be replaced wherever it stands in a file; it has to be there.

    Attributes:
        file: its path in the source package.
        old: what stands there.
        new: what shall stand there.
    """

    file: str
    old: str
    new: str


def patches(
    standard: int, cuda: bool, mpi: Sequence[Path] = (), nccl: Path | None = None
) -> list[Patch]:
    """What to change for a build.

    Args:
        standard: the C++ standard that torch's headers demand.
        cuda: whether Horovod is built for GPUs.
        mpi: MPI's compilers, for C++ and for C; the one for C may be missing.
        nccl: the folder with include/nccl.h and lib/libnccl.so.2; None to have CMake find NCCL.
    """
    changes = [
        Patch(_TOP, "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {standard})"),
        Patch(_TORCH, "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {standard})"),
        # Its own flags hold debugging symbols as well: three times the size, and more minutes.
        Patch(
            _TOP,
            'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO '
            '"${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
            'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
        ),
        # Python 3.12 has no distutils any more.
        Patch(
            _TORCH,
            "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
            "import sysconfig; print(sysconfig.get_path('include'))",
        ),
        Patch(
            "horovod/runner/js_run.py",
            "from distutils.spawn import find_executable",
            "from shutil import which as find_executable",
        ),
        *_mistakes(),
        *_sleep_while_waiting(),
    ]
    if cuda:
        # CUDA 13's headers need C++17, which nvcc knows since CUDA 11.
        old = "set(CMAKE_CUDA_STANDARD 11)"
        changes.append(Patch(_CUDA_KERNELS, old, "set(CMAKE_CUDA_STANDARD 17)"))
        if nccl:
            # CMake does not find it by itself: NVIDIA's wheel has no libnccl.so.
            include = f'set(NCCL_INCLUDE_DIR "{nccl / "include"}")\n'
            library = f'set(NCCL_LIBRARY "{nccl / "lib" / "libnccl.so.2"}")\n'
            search = "find_path(NCCL_INCLUDE_DIR\n"
            changes.append(Patch(_FIND_NCCL, search, include + library + search))
    else:
        changes += _without_gpu()
    if mpi:
        # Else CMake takes the first wrapper that it finds, which may be another MPI's.
        names = zip(("CXX", "C"), mpi, strict=False)
        lines = "".join(f'set(MPI_{name}_COMPILER "{path}")\n    ' for name, path in names)
        search = "find_package(MPI ${MPI_REQUIRED})"
        changes.append(Patch(_TOP, search, lines + search))
    return changes


def _mistakes() -> list[Patch]:
    """What is wrong in this release over gloo; `hpctrain.backends.horovod` asks for the mark."""
    return [
        # Of the process set of all ranks, it loses the interface: gloo then takes the one of the
        # host's own name, which on many hosts is 127.0.1.1.
        Patch(
            "horovod/common/gloo/gloo_context.cc",
            "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
            "  device_attr.iface = gloo_iface_ = global_context.gloo_iface_;\n"
            "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        ),
        # A list that never gets a size: the stall inspector finds no rank in it.
        Patch(
            "horovod/common/gloo/gloo_controller.cc",
            "global_ranks_.reserve(size_);",
            "global_ranks_.resize(size_);",
        ),
        Patch(
            "horovod/__init__.py",
            "__version__ = '0.28.1'",
            "__version__ = '0.28.1'\nmended_by_hpctrain = True",
        ),
    ]


def _sleep_while_waiting() -> list[Patch]:
    """Let a rank that waits for an exchange sleep after the first moments.

    Horovod yields until the end, and takes and gives back Python's lock each time: where ranks have
    less than a core each, that is most of the machine's time.
    """
    wait = "void WaitAndClear(int handle) {\n"
    sleep = "std::this_thread::sleep_for(std::chrono::microseconds(50));"
    return [
        Patch(_WAIT, wait, f"{wait}  int checks = 0;\n"),
        Patch(_WAIT, _YIELD, f"if (++checks < 200) {_YIELD} else {sleep}"),
    ]


def _without_gpu() -> list[Patch]:
    """Horovod has no switch for a CPU build beside a CUDA or ROCm torch with its compiler."""
    return [
        *(
            Patch(
                _FIND_TORCH,
                f"print(True if ((torch.version.{version} is not None) "
                f"and ({name}_HOME is not None)) else False)",
                "print(False)",
            )
            for version, name in (("cuda", "CUDA"), ("hip", "ROCM"))
        ),
        Patch(_TOP, "check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)", "if(FALSE)"),
    ]


def apply(changes: Sequence[Patch], folder: Path) -> None:
    """Change the extracted source package.

    Raises:
        HpctrainError: the text to be replaced is not there: not the release that this knows.
    """
    for change in changes:
        file = folder / change.file
        text = file.read_text() if file.is_file() else ""
        if change.old not in text:
            raise HpctrainError(
                f"Horovod's {change.file} has no {change.old!r}",
                f"the source package of Horovod {VERSION} as it was released",
                "pip cache remove horovod, and see where pip finds it: pip config list",
            )
        file.write_text(text.replace(change.old, change.new))
