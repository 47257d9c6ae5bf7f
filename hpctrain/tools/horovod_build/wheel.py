"""The wheel: pip fetches the source package and the tools, and builds; a cache keeps the wheel."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.cluster import env_vars, memory, system
from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build.plan import Plan, check_compiler, check_toolkit, cxx_standard

__all__ = ["RECIPE", "VERSION", "PrintLine", "excerpt", "get", "patch", "pip", "place", "run"]

#: Release of Horovod to build, which is the last one.
VERSION = "0.28.1"
#: Version of the recipe: increase it when wheels of an earlier hpctrain must no longer be used.
RECIPE = 5
# Horovod's setup.py imports Horovod, so the build needs its run-time requirements as well. Its
# CMake files are older than CMake 4.
_TOOLS = (
    *("setuptools>=70.1,<81", "wheel", "packaging", "cmake>=3.24,<4"),
    *("cloudpickle", "psutil", "pyyaml", "cffi>=1.4"),
)
_SECONDS_BETWEEN_LINES = 30.0
_PERCENT = re.compile(r"\[ *(\d+)%\]")  # progress that CMake's makefiles print
_ERROR = re.compile(r"\b(fatal )?error\b:|CMake Error|^ERROR: ", re.IGNORECASE)
_ERROR_LINES = 8
_BYTES_PER_COMPILER = 2 << 30
# Horovod needs them, and other headers no longer include them since GCC 13 and 14.
_HEADERS = "-include cstdint -include stdexcept -include string"

#: Function that prints one line for the user.
PrintLine = Callable[[str], None]


def place(plan: Plan, env: Mapping[str, str]) -> Path:
    """Return the folder for the wheel of a plan, below $HPCTRAIN_CACHE or ~/.cache/hpctrain.

    Its name is made of all versions and options that a wheel depends on.
    """
    parts = (
        f"{VERSION}-{RECIPE}",
        f"torch{plan.torch.version}",
        f"{sys.implementation.cache_tag}",
        platform.machine(),
        "".join(platform.libc_ver()),
        f"cuda{plan.cuda.version}" if plan.cuda else "cpu",
        f"mpi{zlib.crc32(f'{plan.mpi} {plan.mpi_flags}'.encode()):08x}" if plan.mpi else "nompi",
    )
    cache = env.get(env_vars.CACHE) or os.path.expanduser("~/.cache/hpctrain")
    return Path(cache).absolute() / "horovod" / re.sub(r"[^\w.+-]", "_", "-".join(parts))


def get(plan: Plan, env: Mapping[str, str], print_line: PrintLine) -> Path:
    """Return the wheel of the cache, or build it.

    Raises:
        HpctrainError: a requirement is missing, the cache cannot be written, or a step failed.
    """
    folder = place(plan, env)
    if wheel := next(folder.glob("horovod-*.whl"), None):
        print_line(f"found {wheel}")
        return wheel
    standard = cxx_standard(plan.torch.include)
    check_compiler(standard, env)
    if plan.cuda is not None:
        check_toolkit(plan.cuda, env)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HpctrainError("HT916.cannot-write-cache", folder=folder, error=error) from None
    return _build(plan, standard, folder, env, print_line)


def _build(
    plan: Plan, standard: int, folder: Path, env: Mapping[str, str], print_line: PrintLine
) -> Path:
    """Build in a temporary folder, which stays with its log if the build fails."""
    work = Path(tempfile.mkdtemp(prefix="hpctrain-horovod-"))
    try:
        built = _compile(plan, standard, env, work, print_line)
        # Of two builds at once, the later one replaces the wheel.
        wheel = folder / built.name
        unfinished = folder / f".unfinished-{os.getpid()}"
        try:
            shutil.copyfile(built, unfinished)
            unfinished.replace(wheel)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise HpctrainError(
                "HT916.cannot-copy-wheel", folder=folder, error=error, wheel=built
            ) from None
    except HpctrainError:
        raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    print_line(f"built {wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return wheel


def _compile(
    plan: Plan, standard: int, env: Mapping[str, str], work: Path, print_line: PrintLine
) -> Path:
    """Fetch tools and source, patch, and compile; return the path of the wheel in `work`."""
    log, tools, wheels = work / "log", work / "tools", work / "wheels"
    env = _environment(plan, env, tools)
    print_line(f"downloading the build tools and the source package of Horovod {VERSION}")
    # pip runs the package's setup.py for its metadata, with the build tools in `env`.
    source = ("--no-deps", "--no-build-isolation", "--no-binary", "horovod", "-d", str(work))
    for words in (
        ("install", "-q", "--target", str(tools), *_TOOLS),
        ("download", "-q", *source, f"horovod=={VERSION}"),
    ):
        if code := run(pip(*words), env, log, print_line):
            raise HpctrainError("HT913.download-failed", code=code, excerpt=excerpt(log), log=log)
    for archive in work.glob("horovod-*.tar.gz"):
        shutil.unpack_archive(archive, work)
    folder = work / f"horovod-{VERSION}"
    patch(folder, plan, standard, env)
    print_line(f"compiling for C++{standard} with {env['MAKEFLAGS']}: some minutes")
    # Without -v, pip hides the progress of the compilers.
    options = ("-v", "--no-deps", "--no-build-isolation", "-w", str(wheels))
    code = run(pip("wheel", *options, str(folder)), env, log, print_line)
    wheel = next(wheels.glob("*.whl"), None)
    if code != 0 or wheel is None:
        raise HpctrainError("HT915.build-failed", code=code, excerpt=excerpt(log), log=log)
    return wheel


def patch(folder: Path, plan: Plan, standard: int, env: Mapping[str, str]) -> None:
    """Apply the changes of `patches.toml` to the extracted source package.

    Raises:
        HpctrainError: a file does not contain the text to replace, so it is another release.
    """
    # Use torch's NCCL, unless the user set one of Horovod's documented HOROVOD_NCCL_* variables.
    own_nccl = any(name.startswith("HOROVOD_NCCL_") for name in env)
    builds = {
        None: True,
        "cpu": plan.cuda is None,
        "cuda": plan.cuda is not None,
        "nccl": plan.cuda is not None and plan.torch.nccl is not None and not own_nccl,
        "mpi": bool(plan.mpi),
    }
    values = {"recipe": RECIPE, "standard": standard, "nccl": plan.torch.nccl, "mpi": plan.mpi}
    text = Path(__file__).with_name("patches.toml").read_text()
    for change in tomllib.loads(text)["patch"]:
        if not builds[change.get("only")]:
            continue
        file, old, new = folder / change["file"], change["old"], change["new"]
        for name, value in values.items():
            new = new.replace(f"@{name}@", str(value))
        content = file.read_text() if file.is_file() else ""
        if old not in content:
            raise HpctrainError("HT914.modified-source", change=change)
        file.write_text(content.replace(old, new))


def _environment(plan: Plan, env: Mapping[str, str], tools: Path) -> dict[str, str]:
    """Return the environment of the build.

    Source: docs/install.rst of Horovod.
    """
    dropped = ("PIP_USER", "PIP_TARGET")
    changed = {k: v for k, v in env.items() if not k.startswith("CMAKE_") and k not in dropped}
    changed |= {
        "PYTHONPATH": ":".join(filter(None, (str(tools), env.get("PYTHONPATH")))),
        "PATH": f"{tools / 'bin'}:{env.get('PATH', os.defpath)}",
        "CXXFLAGS": f"{_HEADERS} {env.get('CXXFLAGS', '')}".strip(),
        "CMAKE_GENERATOR": "Unix Makefiles",
        # A variable, because later releases of pip, which always build so, have no such option.
        "PIP_USE_PEP517": "1",
        "MAKEFLAGS": f"-j{_jobs()}",
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


def _jobs() -> int:
    """Return how many compilers may run at once: one for each usable core and 2 GiB of memory."""
    free = memory.available() or _BYTES_PER_COMPILER
    return max(1, min(len(system.cores()), free // _BYTES_PER_COMPILER))


def pip(*arguments: str) -> list[str]:
    """Return a command line that runs the pip of this Python."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def run(command: list[str], env: Mapping[str, str], log: Path, print_line: PrintLine) -> int:
    """Run a program to its end with its output in the log, and return its exit code.

    Every 30 s it prints the elapsed time and the compiled percentage.
    """
    begun = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while True:
                try:
                    return process.wait(_SECONDS_BETWEEN_LINES)
                except subprocess.TimeoutExpired:
                    done = _PERCENT.findall(log.read_text(errors="replace"))
                    compiled = f", {done[-1]} % compiled" if done else ""
                    print_line(f"  {time.monotonic() - begun:.0f} s{compiled}")
        finally:
            process.terminate()


def excerpt(log: Path) -> str:
    """Return lines of a log to show: from its first error on, or else the last ones."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    shown = lines[first:][:_ERROR_LINES] or lines[-_ERROR_LINES:]
    return "".join(f"\n    {line[:300]}" for line in shown)
