"""Build of the wheel: build tools, source package, changes, compilation."""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build import source, toolchain
from hpctrain.tools.horovod_build.build_commands import PrintLine, run
from hpctrain.tools.horovod_build.torch_facts import Torch, cxx_standard

__all__ = ["Plan", "make", "pip"]

# Horovod's setup.py imports Horovod, so the build needs its run-time requirements as well. Its
# CMake files are older than CMake 4.
_TOOLS = (
    *("setuptools>=70.1,<81", "wheel", "packaging", "cmake>=3.24,<4"),
    *("cloudpickle", "psutil", "pyyaml", "cffi>=1.4"),
)
_ERROR = re.compile(r"\b(fatal )?error\b:|CMake Error|^ERROR: ", re.IGNORECASE)
_ERROR_LINES = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Versions and options of one build.

    Attributes:
        torch: torch that the build has to fit.
        cuda: CUDA toolkit for NCCL on GPUs; None for a CPU build.
        mpi: MPI that Horovod supports in addition to gloo; None for gloo alone.
    """

    torch: Torch
    cuda: toolchain.Cuda | None
    mpi: toolchain.Mpi | None


def pip(*arguments: str) -> list[str]:
    """Return a command line that runs the pip of this Python."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def make(plan: Plan, env: Mapping[str, str], work: Path, print_line: PrintLine) -> Path:
    """Build the wheel.

    Args:
        plan: versions and options of the build.
        env: environment with the user's settings for pip and the compiler.
        work: empty folder for all files of the build; the programs' output goes to `log` in it.
        print_line: function that prints one line for each step.

    Returns:
        Path of the wheel, in `work`.

    Raises:
        HpctrainError: a requirement is missing, or a step failed.
    """
    standard = cxx_standard(plan.torch.include)
    env = {name: value for name, value in env.items() if name not in ("PIP_USER", "PIP_TARGET")}
    toolchain.check_compiler(standard, env)
    log, tools = work / "log", work / "tools"
    print_line("downloading the build tools, for this build only")
    _fetch(pip("install", "-q", "--target", str(tools), *_TOOLS), env, log, print_line)
    env = _environment(plan, env, tools)
    folder = _source(plan, standard, env, work, print_line)
    print_line(f"compiling for C++{standard} with {env['MAKEFLAGS']}: some minutes")
    wheels = work / "wheels"
    # Without -v, pip hides the progress of the compilers.
    options = ["-v", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    code = run(pip("wheel", *options, str(folder)), env, log, print_line)
    wheel = next(wheels.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise _failed("HT915", f"the build of Horovod ended with exit code {code}", log)
    return wheel


def _source(
    plan: Plan, standard: int, env: Mapping[str, str], work: Path, print_line: PrintLine
) -> Path:
    """Fetch Horovod's source, apply the changes of this build, and return the folder."""
    print_line(f"downloading the source package of Horovod {source.VERSION}")
    # pip runs the package's setup.py for its metadata, with the build tools in `env`.
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
    requirement = f"horovod=={source.VERSION}"
    _fetch(
        pip("download", "-q", *options, "-d", str(work), requirement), env, work / "log", print_line
    )
    archive = next(work.glob("horovod-*.tar.gz"), None)
    if archive is None:
        raise _failed("HT914", f"pip downloaded no source package of {requirement}", work / "log")
    shutil.unpack_archive(archive, work)
    folder = work / f"horovod-{source.VERSION}"
    compilers = plan.mpi.compilers if plan.mpi else ()
    # Use torch's NCCL, unless the user set one of Horovod's documented HOROVOD_NCCL_* variables.
    nccl = None if any(name.startswith("HOROVOD_NCCL_") for name in env) else plan.torch.nccl
    source.apply(source.patches(standard, plan.cuda is not None, compilers, nccl), folder)
    return folder


def _fetch(command: list[str], env: Mapping[str, str], log: Path, print_line: PrintLine) -> None:
    """Run a pip command that downloads packages."""
    code = run(command, env, log, print_line)
    if code != 0:
        raise _failed(
            "HT913",
            f"pip could not download the packages for the build: exit code {code}",
            log,
            "a package index that pip can reach",
            "on a cluster: hpctrain horovod build --wheel-only on a login node",
            "with a proxy: export HTTPS_PROXY=URL",
            "with a mirror: pip config set global.index-url URL",
        )


def _environment(plan: Plan, env: Mapping[str, str], tools: Path) -> dict[str, str]:
    """Return the environment of the build.

    Source: docs/install.rst of Horovod.
    """
    changed = {name: value for name, value in env.items() if not name.startswith("CMAKE_")}
    changed |= {
        "PYTHONPATH": ":".join(filter(None, (str(tools), env.get("PYTHONPATH")))),
        "PATH": f"{tools / 'bin'}:{env.get('PATH', os.defpath)}",
        # Horovod's gloo needs <cstdint>, which other headers no longer include since GCC 13.
        "CXXFLAGS": f"-include cstdint {env.get('CXXFLAGS', '')}".strip(),
        "CMAKE_GENERATOR": "Unix Makefiles",
        # A variable, because later releases of pip, which always build so, have no such option.
        "PIP_USE_PEP517": "1",
        "MAKEFLAGS": f"-j{toolchain.jobs()}",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if plan.mpi else "HOROVOD_WITHOUT_MPI": "1",
    }
    if plan.cuda:
        home = str(plan.cuda.home)
        changed |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": home, "CUDA_HOME": home}
        changed["PATH"] = f"{plan.cuda.home / 'bin'}:{changed['PATH']}"
    return changed


def _failed(code: str, found: str, log: Path, expected: str = "", *fixes: str) -> HpctrainError:
    """Make an error that shows the log from its first error line on, or else its last lines."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    shown = lines[first:][:_ERROR_LINES] or lines[-_ERROR_LINES:]
    excerpt = "".join(f"\n    {line[:300]}" for line in shown)
    return HpctrainError(
        code, f"{found}{excerpt}", expected, *fixes, f"look at the whole log: {log}"
    )
