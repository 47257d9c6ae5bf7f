"""Build, cache and installation of a Horovod that fits the installed torch.

Horovod's last release, 0.28.1, does not compile against torch 2.1 or later, as it requires C++14.
pip fetches its source package. hpctrain changes a few lines, compiles it once for each combination
of versions, and keeps the wheel in the cache.
"""

import contextlib
import importlib.util
import platform
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from hpctrain.cluster import env_vars
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.tools.horovod_build import cache, installed, source, toolchain
from hpctrain.tools.horovod_build.build_commands import PrintLine
from hpctrain.tools.horovod_build.torch_facts import Torch, ask_torch
from hpctrain.tools.horovod_build.wheel_build import Plan, make

__all__ = ["build", "decide", "key"]

# Version of the recipe: increase it when wheels of an earlier hpctrain must no longer be used.
_RECIPE = 3


def build(
    cuda: bool | None, mpi: bool, wheel_only: bool, env: Mapping[str, str], print_line: PrintLine
) -> Path | None:
    """Build the wheel or find it in the cache, install it, and test it with two ranks.

    Args:
        cuda: whether to build for GPUs with NCCL; None to choose by torch and the machine.
        mpi: whether to build with MPI as well.
        wheel_only: whether to skip the installation and the test.
        env: environment of this process.
        print_line: function that prints one line for each step.

    Returns:
        Path of the wheel; None if the installed Horovod fits and the cache has no wheel of it.

    Raises:
        UsageError: the machine or its torch does not support such a build.
        HpctrainError: a requirement is missing, or a step failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise HpctrainError(
            "HT910",
            f"{sys.executable} has no pip",
            "pip, to download and install",
            f"{sys.executable} -m ensurepip",
            "uv pip install pip",
        )
    # Horovod's build reads Horovod's variables too. Of them, keep only the NCCL that the user set.
    env = {
        name: value
        for name, value in env_vars.scrubbed(env).items()
        if not name.startswith("HOROVOD_") or name.startswith("HOROVOD_NCCL_")
    }
    torch = ask_torch(env)
    plan = decide(torch, cuda, mpi, env, print_line)
    place = cache.folder(key(plan), env)
    if not wheel_only and _fits(plan, place.name, env, print_line):
        return cache.find(place)
    with _ended_by_signals(), contextlib.ExitStack() as stack:
        wheel = cache.find(place)
        if wheel is None:
            stack.enter_context(cache.locked(place, print_line))
            # Another process may have built it while this one waited.
            wheel = cache.find(place) or _make(plan, place, env, print_line)
        else:
            print_line(f"found {wheel}")
        if not wheel_only:
            _install(wheel, plan, env, print_line)
    return wheel


def decide(
    torch: Torch, cuda: bool | None, mpi: bool, env: Mapping[str, str], print_line: PrintLine
) -> Plan:
    """Decide what to build: by default for GPUs if torch and this machine support them.

    Raises:
        UsageError: --cuda is given, but torch has no CUDA, or no toolkit of the same major version.
        HpctrainError: --mpi is given, and no MPI with a compiler exists.
    """
    toolkit = None if cuda is False else toolchain.find_cuda(env)
    built = f"is built with CUDA {torch.cuda}" if torch.cuda else "is no CUDA build"
    found = f"torch {torch.version} {built}, nvcc is {toolkit.version if toolkit else 'missing'}"
    if not torch.cuda or not toolkit or toolkit.version.split(".")[0] != torch.cuda.split(".")[0]:
        if cuda:
            raise UsageError(
                "HT911",
                found,
                "for --cuda: a CUDA toolkit with the CUDA of torch",
                "module load cuda",
                "export CUDA_HOME=FOLDER",
                "hpctrain horovod build --cpu",
            )
        toolkit = None
    plan = Plan(torch, toolkit, toolchain.find_mpi(env) if mpi else None)
    chosen = f" ({found})" if cuda is None else ""
    device = f"on {'GPUs over NCCL' if toolkit else 'CPUs'}{chosen}"
    over = f"gloo and {plan.mpi}, {plan.mpi.compilers[0]}" if plan.mpi else "gloo"
    print_line(
        f"Horovod {source.VERSION} for torch {torch.version}, {device}; communication over {over}"
    )
    return plan


def key(plan: Plan) -> str:
    """Return a folder name made of all versions and options that a wheel depends on."""
    parts = (
        f"{source.VERSION}-{_RECIPE}",
        f"torch{plan.torch.version}",
        f"{sys.implementation.cache_tag}",
        platform.machine(),
        "".join(platform.libc_ver()),
        "abi1" if plan.torch.cxx11_abi else "abi0",
        f"cuda{plan.cuda.version}" if plan.cuda else "cpu",
        f"{plan.mpi.kind}{plan.mpi.version}" if plan.mpi else "nompi",
    )
    return re.sub(r"[^\w.+-]", "_", "-".join(parts))


def _fits(plan: Plan, wheel_key: str, env: Mapping[str, str], print_line: PrintLine) -> bool:
    """Check whether the installed Horovod is this build, or another with its features."""
    version = installed.version()
    if not version or installed.key() not in (wheel_key, ""):
        return False
    facts, output = installed.try_out(env)
    missing = _missing(facts, plan)
    if facts and not missing:
        print_line(f"Horovod {version} is installed and works: {_described(facts)}")
        return True
    what = f"has no {', '.join(missing)}" if facts else f"does not work:{output}"
    print_line(f"the installed Horovod {version} {what}")
    return False


def _missing(facts: Mapping[str, object], plan: Plan) -> list[str]:
    """Return the features that the plan needs and Horovod lacks."""
    features = {"gloo": True, "mpi": plan.mpi is not None, "nccl": plan.cuda is not None}
    return [name for name, needed in features.items() if needed and not facts.get(name)]


def _described(facts: Mapping[str, object]) -> str:
    over = ", ".join(name for name in ("gloo", "mpi", "nccl") if facts.get(name))
    return f"built with {over}; two ranks computed a sum over gloo"


def _make(plan: Plan, place: Path, env: Mapping[str, str], print_line: PrintLine) -> Path:
    """Build in a temporary folder, and keep the folder with its log if the build fails."""
    work = Path(tempfile.mkdtemp(prefix="hpctrain-horovod-"))
    try:
        wheel = cache.store(make(plan, env, work, print_line), place)
    except HpctrainError:
        if not (work / "log").exists():
            shutil.rmtree(work, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    print_line(f"built {wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return wheel


def _install(wheel: Path, plan: Plan, env: Mapping[str, str], print_line: PrintLine) -> None:
    print_line(f"installing it for {sys.executable}")
    with tempfile.TemporaryDirectory(prefix="hpctrain-horovod-") as folder:
        installed.install(wheel, env, Path(folder) / "log", print_line)
    facts, output = installed.try_out(env)
    missing = _missing(facts, plan)
    if not facts or missing:
        found = f"has no {', '.join(missing)}" if facts else f"does not work:{output}"
        raise HpctrainError(
            "HT918",
            f"the Horovod of {wheel} {found}",
            "two ranks of this machine that compute a sum",
            f"rm -r {wheel.parent}, and build it again",
        )
    print_line(f"installed Horovod {facts['version']}, {_described(facts)}")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, so that compilers end and the folder is removed."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    # Signals that nohup ignores stay ignored.
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
