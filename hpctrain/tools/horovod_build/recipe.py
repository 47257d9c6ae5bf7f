"""Makes the wheel: build tools, source package, changes, compilation."""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build import source, toolchain
from hpctrain.tools.horovod_build.commands import Say, run
from hpctrain.tools.horovod_build.torch_facts import Torch, cxx_standard

__all__ = ["Plan", "make", "pip"]

# Horovod's setup.py imports Horovod, which needs what it needs when it runs. Its CMake files are
# from before CMake 4.
_TOOLS = (
    *("setuptools>=70.1,<81", "wheel", "packaging", "cmake>=3.24,<4"),
    *("cloudpickle", "psutil", "pyyaml", "cffi>=1.4"),
)
_ERROR = re.compile(r"\b(fatal )?error\b:|CMake Error|^ERROR: ", re.IGNORECASE)
_ERROR_LINES = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be built.

    Attributes:
        torch: the torch that it has to fit.
        cuda: the toolkit for NCCL on GPUs; None for a CPU build.
        mpi: what Horovod shall be able to talk over besides gloo; None for gloo alone.
    """

    torch: Torch
    cuda: toolchain.Cuda | None
    mpi: toolchain.Mpi | None


def pip(*arguments: str) -> list[str]:
    """The command line of this Python's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def make(plan: Plan, env: Mapping[str, str], work: Path, say: Say) -> Path:
    """Build the wheel.

    Args:
        plan: what to build.
        env: with a person's settings of pip and of the compiler.
        work: an empty folder for all that comes up; `log` in it has what the programs said.
        say: told each step.

    Returns:
        The wheel, in `work`.

    Raises:
        HpctrainError: what is missing or failed.
    """
    standard = cxx_standard(plan.torch.include)
    env = {name: value for name, value in env.items() if name not in ("PIP_USER", "PIP_TARGET")}
    toolchain.check_compiler(standard, env)
    log, tools = work / "log", work / "tools"
    say("fetching the build tools, for this build alone")
    _fetch(pip("install", "-q", "--target", str(tools), *_TOOLS), env, log, say)
    env = _environment(plan, env, tools)
    folder = _source(plan, standard, env, work, say)
    say(f"compiling for C++{standard} with {env['MAKEFLAGS']}: some minutes")
    wheels = work / "wheels"
    # -v, or pip keeps to itself how far the compilers are.
    options = ["-v", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    code = run(pip("wheel", *options, str(folder)), env, log, say)
    wheel = next(wheels.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise _failed(f"the build of Horovod ended with exit code {code}", log)
    return wheel


def _source(plan: Plan, standard: int, env: Mapping[str, str], work: Path, say: Say) -> Path:
    """The folder with Horovod's source, changed as this build needs it."""
    say(f"fetching the source package of Horovod {source.VERSION}")
    # pip calls the package's setup.py for its metadata, with the tools that are there.
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
    wanted = f"horovod=={source.VERSION}"
    _fetch(pip("download", "-q", *options, "-d", str(work), wanted), env, work / "log", say)
    archive = next(work.glob("horovod-*.tar.gz"), None)
    if archive is None:
        raise _failed(f"pip left no source package of {wanted}", work / "log")
    shutil.unpack_archive(archive, work)
    folder = work / f"horovod-{source.VERSION}"
    compilers = plan.mpi.compilers if plan.mpi else ()
    # Torch's, unless a person named one as Horovod's documentation says.
    nccl = None if any(name.startswith("HOROVOD_NCCL_") for name in env) else plan.torch.nccl
    source.apply(source.patches(standard, plan.cuda is not None, compilers, nccl), folder)
    return folder


def _fetch(command: list[str], env: Mapping[str, str], log: Path, say: Say) -> None:
    """Let pip download something."""
    code = run(command, env, log, say)
    if code != 0:
        raise _failed(
            f"pip could not fetch what the build needs: exit code {code}",
            log,
            "a package index that pip reaches",
            "on a cluster: hpctrain horovod build --wheel-only on a login node; with a proxy or a "
            "mirror: export HTTPS_PROXY=URL, pip config set global.index-url URL; ",
        )


def _environment(plan: Plan, env: Mapping[str, str], tools: Path) -> dict[str, str]:
    """What the build reads; source: docs/install.rst of Horovod."""
    changed = {name: value for name, value in env.items() if not name.startswith("CMAKE_")}
    changed |= {
        "PYTHONPATH": ":".join(filter(None, (str(tools), env.get("PYTHONPATH")))),
        "PATH": f"{tools / 'bin'}:{env.get('PATH', os.defpath)}",
        # GCC 13 no longer brings <cstdint> with other headers, and Horovod's gloo relies on it.
        "CXXFLAGS": f"-include cstdint {env.get('CXXFLAGS', '')}".strip(),
        "CMAKE_GENERATOR": "Unix Makefiles",
        # As later releases of pip always build; a variable, for those have no such option.
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


def _failed(found: str, log: Path, expected: str = "", fix: str = "") -> HpctrainError:
    """With the first lines of the log that name an error, else with its last ones."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    shown = lines[first:][:_ERROR_LINES] or lines[-_ERROR_LINES:]
    said = "".join(f"\n    {line[:300]}" for line in shown)
    return HpctrainError(f"{found}{said}", expected, f"{fix}the whole log is {log}")
