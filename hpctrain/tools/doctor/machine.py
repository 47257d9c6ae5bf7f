"""Checks of this machine and this process, made before the rendezvous.

A check returns a Finding, or the text of what it found where nothing is wrong; an empty text is not
shown.
"""

import importlib
import os
import platform
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hpctrain._version import __version__
from hpctrain.cluster import commands, env_vars, system, visible_gpus
from hpctrain.cluster.launchers import Start
from hpctrain.cluster.texts import first_line
from hpctrain.errors import HpctrainError, StartError, UsageError
from hpctrain.process import file_limit
from hpctrain.rendezvous import interfaces
from hpctrain.tools.doctor.report import Finding, finding
from hpctrain.tools.doctor.storage import check_directory
from hpctrain.tools.horovod_build import wheel

if TYPE_CHECKING:
    import torch

_GIB = 2**30
_HOROVOD_SECONDS = 90.0  # for a cold cache: a package has many small files
_ASK_HOROVOD = """
import importlib.util, sys
if importlib.util.find_spec("horovod") is None:
    sys.exit(print("not installed"))
import horovod, horovod.torch as hvd
built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
found = f"{horovod.__version__}, built with {', '.join(built) or 'no transport'}"
patched = getattr(horovod, "mended_by_hpctrain", 0) >= int(sys.argv[1])
if not patched:
    found += ", not by hpctrain horovod build: a rank may hang when another one dies"
print(found)
sys.exit(not (patched and {"gloo", "mpi"} & set(built)))
"""
_INFINIBAND = Path("/sys/class/infiniband")
# What InfiniBand verbs register at least, and what Docker gives the shared memory; both in bytes.
_LOCKED_BYTES = _DOCKER_SHARED_BYTES = 2**26


def examine(
    start: Start, run: Path, undo: ExitStack
) -> "tuple[dict[str, str], list[Finding], torch.device | None]":
    """Check this machine and this process.

    Only the first rank of each host checks what all ranks of the host share.

    Args:
        start: start of this process.
        run: run directory.
        undo: stack that receives callbacks to restore the environment and the limits.

    Returns:
        Facts for people, by subject; warnings and problems; and the device of this rank, None where
        it can have none.
    """
    world, own = start.world, interfaces.reachable()
    module, about_torch = import_torch()
    # Choose the device before other code starts CUDA.
    device, about_gpus = check_gpus(module, start, os.environ, undo)
    cores, on_host = len(system.cores()), os.cpu_count() or 1
    results: dict[str, str | Finding] = {
        "host": start.rendezvous_point.host,
        "system": platform.platform(),
        "launcher": world.launcher,
        "python": f"{platform.python_version()}, {sys.executable}, hpctrain {__version__}",
        "network": ", ".join(f"{interfaces.interface_of(one)} {one}" for one in own)
        or "loopback only",
        "torch": about_torch,
        **about_gpus,
        "cores": check_cores(cores, on_host, world.local_world_size or 1, os.environ),
        "open files": check_open_files(world.world_size, undo),
        "locked memory": check_locked_memory(),
    }
    if world.local_rank == 0:
        if module is not None:  # or Horovod fails for the same reason
            results["horovod"] = check_horovod()
        results["run directory"] = check_directory(run)
        results["shared memory"] = check_shared_memory()
    if start.waste is not None:
        results["start"] = Finding.of("start", start.waste, "warning")
    facts = {subject: one for subject, one in results.items() if isinstance(one, str) and one}
    findings = [one for one in results.values() if isinstance(one, Finding)]
    return facts, findings, device


# --- torch, GPUs, Horovod


def import_torch() -> tuple[ModuleType | None, str | Finding]:
    """Import torch; return the module, or None where that fails, and what was found."""
    try:
        torch = importlib.import_module("torch")
        cuda, hip = torch.version.cuda, torch.version.hip
        build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU build"
        version, folder = str(torch.__version__), os.path.dirname(str(torch.__file__))
    except Exception as error:  # a broken installation may raise any error
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return None, finding("torch.missing", python=sys.executable)
        text = f"{type(error).__name__}: {first_line(error)}"
        return None, finding("torch.broken", python=sys.executable, error=text)
    from hpctrain.process import device

    try:
        device.check_torch(version, folder)
    except UsageError as error:
        return torch, Finding.of("torch", error)
    return torch, f"{version}, {build}"


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
    except HpctrainError as error:
        return None, {"GPUs": Finding.of("GPUs", error)}
    except RuntimeError as failure:  # from CUDA
        unusable = StartError("HT615.gpu-unusable", reason=first_line(failure))
        return None, {"GPUs": Finding.of("GPUs", unusable)}
    if chosen.type == "cpu" and (unused := device.passed_over(env)):
        return chosen, {"GPUs": Finding.of("GPUs", unused, "warning")}
    count = torch.cuda.device_count() if chosen.type == "cuda" else 0
    why = device.no_gpu_reason([]) if here and not count else ("", ())
    of_job = start.allocation.gpus if start.allocation else None
    results = {"GPUs": check_count(here, shown, count, of_job, why)}
    # Each rank tries its own GPU, and a process alone all that it sees.
    tried = [chosen.index] if count and start.world.world_size > 1 else range(count)
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
    if not here and not count:
        return "none on this machine: training on the CPU"
    job = f"the job has {of_job}, " if of_job is not None else ""
    variable = f"{shown.source} shows {len(shown.names)}, " if shown else ""
    counts = f"{here} here, {job}{variable}torch finds {count}"
    if shown and not shown.names:
        return f"{counts}: hidden on purpose, training on the CPU"
    expected = min(here, len(shown.names)) if shown else of_job or here
    # Device files do not count slices of one GPU, or devices that a container passes in.
    if count >= expected:
        return counts
    if count:
        return finding("GPUs.some-missing", counts=counts, expected=expected)
    return finding("GPUs.all-missing", counts=counts, reason=why[0], fixes=why[1])


def try_gpu(torch: ModuleType, index: int) -> str | Finding:
    """Compute on a GPU, which fails where torch has no code for it or where it is broken."""
    facts = torch.cuda.get_device_properties(index)
    arch = facts.gcnArchName if torch.version.hip else f"sm_{facts.major}{facts.minor}"
    gpu = f"{facts.name}, {facts.total_memory / _GIB:.0f} GiB, {arch}"
    try:
        torch.ones(1, device=f"cuda:{index}").add(1).item()
    except RuntimeError as failure:
        built, error = " ".join(torch.cuda.get_arch_list()) or "no GPU", first_line(failure)
        found = f"{gpu}: {error}; torch has code for {built}"
        return finding("GPU {index}.fails", index=index, found=found, arch=arch)
    return gpu


def check_horovod() -> str | Finding:
    """Check in a separate process whether an installed Horovod works with this torch."""
    # -P: the folder in which the user types this may have a horovod of its own.
    command = [sys.executable, "-P", "-c", _ASK_HOROVOD, str(wheel.RECIPE)]
    try:
        # With a launcher's variables, the process could take itself for one of the ranks.
        done = commands.run(command, _HOROVOD_SECONDS, env_vars.scrubbed(os.environ))
    except commands.NoAnswerError as error:
        return finding("horovod.fails", reason=f"import horovod.torch: {error}")
    lines = (done.stdout.strip() or done.stderr).splitlines() or ["import horovod.torch fails"]
    if done.returncode < 0:
        lines = [f"import horovod.torch crashes: {signal.strsignal(-done.returncode)}"]
    return finding("horovod.fails", reason=lines[-1]) if done.returncode else lines[-1]


# --- limits


def check_open_files(world_size: int, undo: ExitStack) -> str | Finding:
    """Raise the limit on open files as the Session does; return an empty text if that works."""
    try:
        undo.callback(file_limit.make_room(world_size))
    except HpctrainError as error:
        return Finding.of("open files", error)
    return ""


def check_locked_memory() -> str | Finding:
    """Check whether InfiniBand may lock enough memory."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY or soft >= _LOCKED_BYTES or not any(_INFINIBAND.glob("*")):
        return ""
    return finding("locked memory.low", kib=soft // 1024)


def check_cores(cores: int, on_host: int, ranks: int, env: Mapping[str, str]) -> str | Finding:
    """Check whether the requested threads fit the cores.

    Args:
        cores: number of cores that the process may run on.
        on_host: number of cores of the host.
        ranks: number of ranks on this host.
        env: environment variables, for OMP_NUM_THREADS and MKL_NUM_THREADS.
    """
    usable, most = f"{cores} of {on_host} may be used", min(cores, max(on_host // ranks, 1))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # OpenMP also accepts a list with a number for each nesting level.
        threads = env.get(name, "").partition(",")[0].strip()[:9]
        if threads.isascii() and threads.isdecimal():
            usable += f", {name}={threads}"
            if int(threads) > most:
                usable += f", {ranks} ranks on this host" if ranks > 1 else ""
                values = {"usable": usable, "name": name, "threads": threads}
                return finding("cores.too-many-threads", max_threads=most, **values)
    return finding("cores.one", usable=usable) if cores == 1 < on_host else usable


def check_shared_memory() -> str | Finding:
    """Check whether the shared memory of Linux has room for the batches of loader workers."""
    if not system.COMPLETE:
        return ""
    folder = system.shared_folder()
    size, _, free = shutil.disk_usage(folder) if "shm" in folder else (0, 0, 0)
    if free >= _DOCKER_SHARED_BYTES and size > _DOCKER_SHARED_BYTES:
        return ""
    return finding("shared memory.small", free=free / _GIB, size=size / _GIB)
