"""Checks of this machine and this process, made before the rendezvous.

A check returns a Finding, or the text of what it found where nothing is wrong; an empty text is not
shown.
"""

import importlib
import os
import platform
import resource
import signal
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hpctrain._version import __version__
from hpctrain.cluster import visible_gpus
from hpctrain.cluster.launchers import Start
from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.process import file_limit
from hpctrain.rendezvous import interfaces
from hpctrain.tools.doctor.report import Finding, problem, warning
from hpctrain.tools.doctor.storage import ask, check_directory
from hpctrain.tools.horovod_build import wheel

if TYPE_CHECKING:
    import torch

__all__ = ["Machine", "examine"]

_GIB = 2**30
_HOROVOD_SECONDS = 90.0  # for a cold cache: a package has many small files
# Exit codes of the process that imports Horovod.
_UNFIXED, _NOT_INSTALLED = 3, 4
_ASK_HOROVOD = """
import importlib.util, sys
if importlib.util.find_spec("horovod") is None:
    sys.exit(int(sys.argv[3]))
import horovod, horovod.torch as hvd
built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
print(f"{horovod.__version__}, built with {', '.join(built) or 'no transport'}")
if not {"gloo", "mpi"} & set(built):
    sys.exit(1)
sys.exit(0 if getattr(horovod, "mended_by_hpctrain", 0) >= int(sys.argv[1]) else int(sys.argv[2]))
"""
_SMI = "nvidia-smi (rocm-smi for AMD's), which shows whether one has failed or is in use"
_SHARED = "/dev/shm"  # noqa: S108 — this path is only read
_INFINIBAND = Path("/sys/class/infiniband")
# What InfiniBand verbs register at least, and what Docker gives /dev/shm; both in bytes.
_LOCKED_BYTES = _DOCKER_SHARED_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank has found out about its own machine.

    Attributes:
        findings: warnings and problems.
        facts: texts for people, by subject; with `host`.
        has_torch: whether torch can be imported.
        device: device of this rank; None where it can have none.
    """

    findings: list[Finding]
    facts: dict[str, str]
    has_torch: bool
    device: "torch.device | None"


def examine(start: Start, run: Path, env: MutableMapping[str, str], undo: ExitStack) -> Machine:
    """Check this machine and this process.

    Only the first rank of each host checks what all ranks of the host share.

    Args:
        start: start of this process.
        run: run directory.
        env: environment variables; may be changed.
        undo: stack that receives callbacks to restore `env` and the limits of this process.
    """
    world = start.world
    module, about_torch = import_torch()
    # Choose the device before other code starts CUDA.
    device, about_gpus = check_gpus(module, start, env, undo)
    cores, on_host = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    results: dict[str, str | Finding] = {
        "host": start.rendezvous_point.host,
        "system": platform.platform(),
        "launcher": world.launcher,
        "python": f"{platform.python_version()}, {sys.executable}, hpctrain {__version__}",
        "torch": about_torch,
        **about_gpus,
        "cores": check_cores(cores, on_host, world.local_world_size or 1, env),
        "open files": check_open_files(world.world_size, undo),
        "locked memory": check_locked_memory(
            soft, os.path.isdir(_INFINIBAND) and any(_INFINIBAND.iterdir())
        ),
    }
    if world.local_rank == 0:
        if module is not None:  # or Horovod fails for the same reason
            results["horovod"] = check_horovod()
        results["network"] = check_network(start.rendezvous_point.interface)
        results["run directory"] = check_directory(run)
        results[_SHARED] = check_shared_memory(*_shared_memory())
    if start.waste is not None:
        results["start"] = Finding.of("start", start.waste, stops=False)
    found = [replace(r, ranks=(world.rank,)) for r in results.values() if isinstance(r, Finding)]
    facts = {name: r for name, r in results.items() if isinstance(r, str) and r}
    return Machine(found, facts, module is not None, device)


# --- torch, GPUs, Horovod


def import_torch() -> tuple[ModuleType | None, str | Finding]:
    """Import torch; return the module, or None where that fails, and what was found."""
    try:
        torch = importlib.import_module("torch")
        cuda, hip = torch.version.cuda, torch.version.hip
        build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU build"
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            version = ".".join(map(str, torch.cuda.nccl.version()))
            build += f", {'RCCL' if hip else 'NCCL'} {version}"
        return torch, f"{torch.__version__}, {build}"
    except Exception as error:  # a broken installation may raise any error
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return None, broken_torch("" if missing else f"{type(error).__name__}: {error}")


def broken_torch(error: str) -> Finding:
    """Return the finding about a torch that cannot be imported; without an error, a missing one."""
    pip, expected = f"{sys.executable} -m pip install", "a torch that this Python can import"
    if not error:
        return problem("torch", "not installed for this Python", expected, f"{pip} torch")
    found = f"import torch fails: {printable(' '.join(error.split()))}"
    path = "try without LD_LIBRARY_PATH: env -u LD_LIBRARY_PATH hpctrain doctor"
    return problem("torch", found, expected, f"{pip} --force-reinstall torch", path)


def check_gpus(
    torch: ModuleType | None, start: Start, env: MutableMapping[str, str], undo: ExitStack
) -> "tuple[torch.device | None, dict[str, str | Finding]]":
    """Choose the device of this rank as a Session does, and check the GPUs.

    Args:
        torch: torch module; None where it cannot be imported.
        start: start of this process.
        env: environment variables; may be changed.
        undo: stack that receives callbacks to restore `env`.

    Returns:
        The device, None where the rank can have none; and what was found, by subject.
    """
    here, shown = len(visible_gpus.here()), visible_gpus.visible(env)
    if torch is None:
        return None, {"GPUs": f"{here} here, none tried without torch"}
    from hpctrain.process import device

    try:
        device.take_slice(start.world, env, undo)
        chosen = device.choose(start.world, start.allocation, env)
    except UsageError as error:
        return None, {"GPUs": Finding.of("GPUs", error)}
    except RuntimeError as error:  # from CUDA
        return None, {"GPUs": problem("GPUs", _first_line(error), "a GPU that starts", _SMI)}
    on_gpu = chosen.type == "cuda"
    count = torch.cuda.device_count() if on_gpu else 0
    why = device.no_gpu_reason([]) if here and not count else ("", ())
    of_job = start.allocation.gpus if start.allocation else None
    results = {"GPUs": check_count(here, shown, count, of_job, why)}
    # Each rank tries its own GPU, and a process alone all that it sees.
    tried = range(count) if start.world.world_size == 1 else [chosen.index] if on_gpu else []
    return chosen, {**results, **{f"GPU {index}": try_gpu(torch, index) for index in tried}}


def check_count(
    here: int,
    shown: visible_gpus.Visible | None,
    count: int,
    of_job: int | None = None,
    why: tuple[str, tuple[str, ...]] = ("", ()),
) -> str | Finding:
    """Check whether torch finds the GPUs that it should find.

    Args:
        here: number of GPUs of this machine.
        shown: GPUs that the environment shows to this process; None without such a variable.
        count: number of GPUs that torch finds.
        of_job: number of GPUs of the scheduler's job on this host; None where unknown.
        why: reason why torch finds none, and the fixes.
    """
    found = f"{here} here, "
    found += f"the job has {of_job}, " if of_job is not None else ""
    found += f"{shown.source} shows {len(shown.names)}, " if shown else ""
    found += f"torch finds {count}"
    if not here and not count:
        return "none on this machine: training on the CPU"
    if shown and not shown.names:
        return f"{found}: hidden on purpose, training on the CPU"
    expected = min(here, len(shown.names)) if shown else of_job or here
    # Device files do not count slices of one GPU, or devices that a container passes in.
    if count >= expected:
        return found
    if count:
        return warning("GPUs", found, f"{expected} GPUs", _SMI)
    return problem("GPUs", f"{found}: {printable(why[0])}", "GPUs that torch finds", *why[1])


def try_gpu(torch: ModuleType, index: int) -> str | Finding:
    """Compute on a GPU, which fails where torch has no code for it or where it is broken."""
    properties = torch.cuda.get_device_properties(index)
    own = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        own = str(properties.gcnArchName).partition(":")[0]
    found = f"{printable(properties.name)}, {properties.total_memory / _GIB:.0f} GiB, {own}"
    try:
        torch.ones(1, device=f"cuda:{index}").add(1).item()
    except RuntimeError as error:
        built = " ".join(torch.cuda.get_arch_list()) or "no GPU"
        found += f": {_first_line(error)}; torch has code for {built}"
        expected, fix = "a GPU that computes with this torch", f"install a torch built for {own}"
        return problem(f"GPU {index}", found, expected, fix, _SMI)
    return found


def check_horovod() -> str | Finding:
    """Check in a separate process whether an installed Horovod works with this torch."""
    # -P: the folder in which the user types this may have a horovod of its own.
    codes = map(str, (wheel.RECIPE, _UNFIXED, _NOT_INSTALLED))
    return about_horovod(ask([sys.executable, "-P", "-c", _ASK_HOROVOD, *codes], _HOROVOD_SECONDS))


def about_horovod(answer: tuple[int, str] | None) -> str | Finding:
    """Return what the output of a process that imported Horovod means; None: it took too long."""
    if answer is None:
        found = f"import horovod.torch takes more than {_HOROVOD_SECONDS:.0f} s"
    elif answer[0] == _NOT_INSTALLED:
        return "not installed"
    elif answer[0] < 0:
        found = f"import horovod.torch crashes: {signal.strsignal(-answer[0])}"
    else:
        found = printable((answer[1].splitlines() or ["import horovod.torch fails"])[-1])
        if answer[0] == 0:
            return found
        if answer[0] == _UNFIXED:
            found += ", not by hpctrain horovod build: a rank may hang when another one dies"
    expected = "a Horovod that was built for this torch, with gloo or MPI"
    return warning("horovod", found, expected, "hpctrain horovod build")


# --- limits and network


def check_open_files(world_size: int, undo: ExitStack) -> str | Finding:
    """Raise the limit on open files as the Session does; return an empty text if that works."""
    try:
        undo.callback(file_limit.make_room(world_size))
    except UsageError as error:
        return Finding.of("open files", error)
    return ""


def check_locked_memory(soft: int, infiniband: bool) -> str | Finding:
    """Check whether InfiniBand may lock enough memory.

    Args:
        soft: soft limit in bytes.
        infiniband: whether the host has InfiniBand devices.
    """
    if not infiniband or soft == resource.RLIM_INFINITY or soft >= _LOCKED_BYTES:
        return ""
    found, slurm = f"{soft // 1024} KiB (ulimit -l)", "LimitMEMLOCK=infinity of slurmd"
    fixes = (
        "ulimit -l unlimited",
        f"if that is refused: {slurm}",
        "docker run --ulimit memlock=-1 …",
    )
    return warning("locked memory", found, "no limit, for InfiniBand", *fixes)


def check_cores(cores: int, on_host: int, ranks: int, env: Mapping[str, str]) -> str | Finding:
    """Check whether the requested threads fit the cores.

    Args:
        cores: number of cores that the process may run on.
        on_host: number of cores of the host.
        ranks: number of ranks on this host.
        env: environment variables, for OMP_NUM_THREADS and MKL_NUM_THREADS.
    """
    found = f"{cores} of {on_host} may be used"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # OpenMP also accepts a list with a number for each nesting level.
        first = env.get(name, "").partition(",")[0].strip()[:9]
        if not (first.isascii() and first.isdecimal()):
            continue
        found += f", {name}={first}"
        most = min(cores, max(on_host // ranks, 1))
        if int(first) > most:
            found += f", {ranks} ranks on this host" if ranks > 1 else ""
            fixes = f"export {name}={most}", f"under Slurm: srun --cpus-per-task={first}"
            expected = f"at most {most} threads, so that each has a core"
            return warning("cores", found, expected, *fixes)
    if cores == 1 < on_host:
        fixes = "srun --cpus-per-task=N", "mpirun --bind-to none"
        return warning("cores", found, "cores for loader workers as well", *fixes)
    return found


def _shared_memory() -> tuple[int, int]:
    try:
        facts = os.statvfs(_SHARED)
    except OSError:
        return 0, 0
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def check_shared_memory(size: int, free: int) -> str | Finding:
    """Check whether /dev/shm has room for the batches of loader workers.

    Args:
        size, free: size and free space of /dev/shm in bytes; 0 where it does not exist.
    """
    if free >= _DOCKER_SHARED_BYTES and size > _DOCKER_SHARED_BYTES:
        return ""
    found = f"{free / _GIB:.1f} of {size / _GIB:.1f} GiB free"
    remove = f"rm {_SHARED}/torch_* {_SHARED}/nccl-*, where their processes have ended"
    docker = "docker run --shm-size=8g …", "docker run --ipc=host …"
    return warning(_SHARED, found, "some GiB, for the batches of loader workers", remove, *docker)


def check_network(chosen: str | None) -> str | Finding:
    """Return the network interfaces; the ranks use the first one that connects them.

    Args:
        chosen: interface from the environment; None without one.
    """
    if chosen is not None:
        try:
            return f"{chosen} {interfaces.address_on(chosen)}, as set"
        except UsageError as error:
            return Finding.of("network", error)
    own = [f"{interfaces.interface_of(one)} {one}" for one in interfaces.reachable()]
    return ", ".join(own) or "loopback only: no other host can be reached"


def _first_line(text: object) -> str:
    return printable(str(text).partition("\n")[0])
