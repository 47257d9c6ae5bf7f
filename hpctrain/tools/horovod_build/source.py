"""Changes to Horovod's source package, so that it compiles with a newer torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError

__all__ = ["VERSION", "Patch", "apply", "patches"]

#: Release of Horovod to build, which is the last one.
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
    """A text to replace at all its places in a file, where it must exist.

    Attributes:
        file: path of the file in the source package.
        old: text in the released file.
        new: text that replaces it.
    """

    file: str
    old: str
    new: str


def patches(
    standard: int, cuda: bool, mpi: Sequence[Path] = (), nccl: Path | None = None
) -> list[Patch]:
    """Return the changes for a build.

    Args:
        standard: C++ standard that torch's headers require.
        cuda: whether Horovod is built for GPUs.
        mpi: compilers of MPI, for C++ and for C; the one for C may be missing.
        nccl: folder with include/nccl.h and lib/libnccl.so.2; None to let CMake find NCCL.
    """
    changes = [
        Patch(_TOP, "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {standard})"),
        Patch(_TORCH, "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {standard})"),
        # The default flags add debug symbols: three times the size, and minutes more to compile.
        Patch(
            _TOP,
            'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO '
            '"${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
            'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
        ),
        # Python 3.12 no longer has distutils.
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
        *_fixes(),
        *_sleep_while_waiting(),
    ]
    if cuda:
        # CUDA 13's headers need C++17, which nvcc supports since CUDA 11.
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
        # Otherwise CMake uses the first wrapper that it finds, perhaps of another MPI.
        names = zip(("CXX", "C"), mpi, strict=False)
        lines = "".join(f'set(MPI_{name}_COMPILER "{path}")\n    ' for name, path in names)
        search = "find_package(MPI ${MPI_REQUIRED})"
        changes.append(Patch(_TOP, search, lines + search))
    return changes


def _fixes() -> list[Patch]:
    """Return fixes for errors of this release with gloo, and a mark of a patched Horovod.

    `hpctrain.backends.horovod` reads the mark.
    """
    return [
        # The process set of all ranks loses its network interface. gloo then uses the address of
        # the host name, which is 127.0.1.1 on many hosts.
        Patch(
            "horovod/common/gloo/gloo_context.cc",
            "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
            "  device_attr.iface = gloo_iface_ = global_context.gloo_iface_;\n"
            "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        ),
        # reserve() leaves the list empty, so the stall inspector finds no rank in it.
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
    """Return changes that let a rank sleep if it has waited for an exchange for some time.

    Horovod calls yield until the end of the exchange, and takes and releases Python's lock each
    time. If ranks have less than one core each, this uses most of the CPU time.
    """
    wait = "void WaitAndClear(int handle) {\n"
    sleep = "std::this_thread::sleep_for(std::chrono::microseconds(50));"
    return [
        Patch(_WAIT, wait, f"{wait}  int checks = 0;\n"),
        Patch(_WAIT, _YIELD, f"if (++checks < 200) {_YIELD} else {sleep}"),
    ]


def _without_gpu() -> list[Patch]:
    """Return the changes for a CPU build.

    Horovod has no option for it if a CUDA or ROCm torch and its compiler are installed.
    """
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
    """Apply the changes to the extracted source package.

    Raises:
        HpctrainError: a file does not contain the text to replace, so it is another release.
    """
    for change in changes:
        file = folder / change.file
        text = file.read_text() if file.is_file() else ""
        if change.old not in text:
            raise HpctrainError(
                "HT914",
                f"Horovod's {change.file} has no {change.old!r}",
                f"the source package of Horovod {VERSION} as it was released",
                "pip cache remove horovod, and check where pip finds it: pip config list",
            )
        file.write_text(text.replace(change.old, change.new))
