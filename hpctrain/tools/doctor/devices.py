"""Checks of the GPUs: torch finds them and has code for them, and the driver is new enough."""

import re
import warnings
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING

from hpctrain.cluster import visible_gpus
from hpctrain.cluster.launchers import Start
from hpctrain.cluster.texts import printable
from hpctrain.errors import UsageError
from hpctrain.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from hpctrain.tools.doctor.subprocesses import ask

if TYPE_CHECKING:
    import torch

__all__ = ["choose", "examine", "judge_architecture", "judge_driver", "judge_gpus", "nvidia_driver"]

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)\Z")
_MAX_CUDA = re.compile(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)")
_DRIVER = re.compile(r"(?:KMD|Driver) Version:\s*([\d.]+)")


def choose(
    start: Start, env: MutableMapping[str, str], undo: ExitStack
) -> "tuple[torch.device | None, Finding | None]":
    """Return the device of this rank as a Session chooses it, or a finding with the error."""
    from hpctrain.process import device

    try:
        device.take_slice(start.world, env, undo)
        return device.choose(start.world, start.allocation, env), None
    except UsageError as error:
        return None, Finding("GPUs", PROBLEM, error.found, error.fixes)
    except RuntimeError as error:  # from CUDA
        fix = "look at nvidia-smi: the GPU may be in use by another process, or broken"
        return None, Finding("GPUs", PROBLEM, printable(str(error).partition("\n")[0]), (fix,))


def examine(
    torch: ModuleType | None,
    shown: visible_gpus.Visible | None,
    of_job: int | None,
    refused: Finding | None,
) -> list[Finding]:
    """Check this machine's GPUs, and whether torch can use them.

    Args:
        torch: torch module; None where it cannot be imported.
        shown: GPUs that the environment shows to this process; None without such a variable.
        of_job: number of GPUs of the scheduler's job on this host; None where unknown.
        refused: finding that `choose` returned, or None.
    """
    here = visible_gpus.here()
    driver = nvidia_driver() if here else None
    count = 0
    why: tuple[str, tuple[str, ...]] = ("", ())
    if torch is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if here and not count:
            from hpctrain.process import device

            why = device.no_gpu_reason([str(warning.message) for warning in caught])
    found = [refused or judge_gpus(len(here), shown, count, of_job, why)]
    if torch is not None and driver and torch.version.cuda:
        found.append(judge_driver(*driver, torch.version.cuda))
    if torch is not None:
        built = torch.cuda.get_arch_list() if count else []
        for index in range(count):
            found.append(_architecture(torch, index, built))
    return found


def judge_gpus(
    here: int,
    shown: visible_gpus.Visible | None,
    count: int,
    of_job: int | None = None,
    why: tuple[str, tuple[str, ...]] = ("", ()),
) -> Finding:
    """Return a finding on whether torch finds the GPUs that it should find.

    Args:
        here: number of GPUs of this machine.
        shown: GPUs that the environment shows to this process; None without such a variable.
        count: number of GPUs that torch finds.
        of_job: number of GPUs of the scheduler's job on this host; None where unknown.
        why: reason why torch finds none, and the fixes.
    """
    hidden = f", {shown.source} shows {len(shown.names)}" if shown else ""
    found = f"{here} here{hidden}, torch finds {count}"
    if not here and not count:
        if of_job:
            found = f"the job has {of_job} on this host, none here"
            fixes = ("in a container: apptainer exec --nv", "in a container: docker run --gpus all")
            return Finding("GPUs", PROBLEM, found, fixes)
        return Finding("GPUs", OK, "none on this machine: training on the CPU")
    if shown and not shown.names:
        return Finding("GPUs", OK, f"{found}: hidden on purpose, training on the CPU")
    if not count:
        return Finding("GPUs", PROBLEM, f"{found}: {printable(why[0])}", why[1])
    expected = min(here, len(shown.names)) if shown else of_job or here
    # Device files do not count slices of one GPU, or devices that a container passes in.
    if count < expected:
        fix = "nvidia-smi (rocm-smi for AMD's), which shows whether one of them has failed"
        return Finding("GPUs", WARNING, f"{found}, {expected} expected", (fix,))
    return Finding("GPUs", OK, found)


def _architecture(torch: ModuleType, index: int, built: Sequence[str]) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    own = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        own = str(getattr(properties, "gcnArchName", own)).partition(":")[0]
    found = judge_architecture(own, built)
    name = f"{printable(properties.name)}, {properties.total_memory / 2**30:.0f} GiB: {found.found}"
    return Finding(f"GPU {index}", found.level, name, found.fixes)


def judge_architecture(own: str, built: Sequence[str]) -> Finding:
    """Return a finding on whether a build of torch has code that a GPU can run.

    A binary runs on GPUs of its own major version with the same or a later minor version. The
    driver compiles PTX for any later GPU. Code with the suffix a runs on its own GPU alone, and
    code with the suffix f on its own family alone. Source: "GPU Compilation" in the documentation
    of nvcc.

    Args:
        own: architecture of the GPU, such as "sm_90" or "gfx90a".
        built: architectures that `torch.cuda.get_arch_list()` returns.
    """
    if own in built:
        return Finding("GPU", OK, f"{own}, and torch has code for it")
    major, minor = _numbers(own)
    for entry in built:
        kind, its_major, its_minor, suffix = _parts(entry)
        if not kind or major < 0:
            continue
        same = its_major == major and its_minor <= minor
        if kind == "sm" and same and (suffix != "a" or its_minor == minor):
            return Finding("GPU", OK, f"{own}, which runs torch's code for {entry}")
        if kind == "compute" and not suffix and (its_major, its_minor) <= (major, minor):
            return Finding("GPU", OK, f"{own}, for which the driver compiles torch's {entry}")
    return Finding(
        "GPU",
        PROBLEM,
        f"{own}, but this torch has code for {', '.join(built) or 'no GPU'} only",
        (
            "install a torch that was built for this GPU: another CUDA build, an older torch for "
            "an older GPU, a newer one for a newer GPU",
        ),
    )


def _parts(entry: str) -> tuple[str, int, int, str]:
    match = _ARCHITECTURE.match(entry)
    return (match[1], int(match[2]), int(match[3]), match[4]) if match else ("", -1, -1, "")


def _numbers(own: str) -> tuple[int, int]:
    return _parts(own)[1:3]


def nvidia_driver() -> tuple[str, tuple[int, int] | None] | None:
    """Return NVIDIA's driver version and the newest CUDA that it supports; None without one."""
    answer = ask(["nvidia-smi"])
    if answer is None or answer[0] != 0:
        return None
    return read_driver(answer[1])


def read_driver(text: str) -> tuple[str, tuple[int, int] | None] | None:
    """Read both versions from the head of nvidia-smi's table; None where it is no such table."""
    driver, cuda = _DRIVER.search(text), _MAX_CUDA.search(text)
    if driver is None:
        return None
    return driver[1], (int(cuda[1]), int(cuda[2])) if cuda else None


def judge_driver(driver: str, newest: tuple[int, int] | None, built: str) -> Finding:
    """Return a finding on whether the driver supports the CUDA that torch was built with.

    Within one major version an older driver supports a newer CUDA. Source: "Minor Version
    Compatibility" in NVIDIA's CUDA Compatibility guide.

    Args:
        driver: version of the driver.
        newest: newest CUDA version that the driver reports; None where unknown.
        built: CUDA version of torch, such as "12.8".
    """
    if newest is None:
        return Finding("driver", OK, f"NVIDIA {driver}")
    found = f"NVIDIA {driver}, made for CUDA up to {newest[0]}.{newest[1]}"
    if built.partition(".")[0].isdecimal() and newest[0] < int(built.partition(".")[0]):
        return Finding(
            "driver",
            PROBLEM,
            f"{found}, but torch was built with CUDA {built}",
            (f"install a torch for CUDA {newest[0]}.x", "ask for a newer driver"),
        )
    return Finding("driver", OK, found)
