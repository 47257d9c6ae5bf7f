"""Checks of the GPUs: torch finds those that it should find, and each one computes."""

from collections.abc import MutableMapping
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

__all__ = ["examine", "judge_count", "try_gpu"]

_LOOK = "nvidia-smi (rocm-smi for AMD's), which shows whether one has failed or is in use"


def examine(
    torch: ModuleType | None, start: Start, env: MutableMapping[str, str], undo: ExitStack
) -> "tuple[torch.device | None, list[Finding]]":
    """Choose the device of this rank as a Session does, and check the GPUs.

    Args:
        torch: torch module; None where it cannot be imported.
        start: start of this process.
        env: environment variables; may be changed.
        undo: stack that receives callbacks to restore `env`.

    Returns:
        The device, None where the rank can have none; and the findings.
    """
    here, shown = len(visible_gpus.here()), visible_gpus.visible(env)
    of_job = start.allocation.gpus if start.allocation else None
    found = _driver() if here else []
    if torch is None:
        return None, [Finding("GPUs", OK, f"{here} here, none tried without torch"), *found]
    from hpctrain.process import device

    try:
        device.take_slice(start.world, env, undo)
        chosen = device.choose(start.world, start.allocation, env)
    except UsageError as error:
        return None, [*found, Finding.of("GPUs", error)]
    except RuntimeError as error:  # from CUDA
        refused = Finding("GPUs", PROBLEM, _first_line(error), "a GPU that starts", (_LOOK,))
        return None, [*found, refused]
    on_gpu = chosen.type == "cuda"
    count = torch.cuda.device_count() if on_gpu else 0
    why = device.no_gpu_reason([]) if here and not count else ("", ())
    found.append(judge_count(here, shown, count, of_job, why))
    # Each rank tries its own GPU, and a process alone all that it sees.
    tried = range(count) if start.world.world_size == 1 else [chosen.index] if on_gpu else []
    return chosen, [*found, *(try_gpu(torch, index) for index in tried)]


def _first_line(text: object) -> str:
    return printable(str(text).partition("\n")[0])


def _driver() -> list[Finding]:
    """Return a finding with the version of NVIDIA's driver; none without an answer."""
    answer = ask(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if answer is None or answer[0] != 0:
        return []
    return [Finding("driver", OK, f"NVIDIA {_first_line(answer[1])}")]


def judge_count(
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
    found = f"{here} here, "
    found += f"the job has {of_job}, " if of_job is not None else ""
    found += f"{shown.source} shows {len(shown.names)}, " if shown else ""
    found += f"torch finds {count}"
    if not here and not count:
        return Finding("GPUs", OK, "none on this machine: training on the CPU")
    if shown and not shown.names:
        return Finding("GPUs", OK, f"{found}: hidden on purpose, training on the CPU")
    expected = min(here, len(shown.names)) if shown else of_job or here
    # Device files do not count slices of one GPU, or devices that a container passes in.
    if count >= expected:
        return Finding("GPUs", OK, found)
    if count:
        return Finding("GPUs", WARNING, found, f"{expected} GPUs", (_LOOK,))
    return Finding(
        "GPUs", PROBLEM, f"{found}: {printable(why[0])}", "GPUs that torch finds", why[1]
    )


def try_gpu(torch: ModuleType, index: int) -> Finding:
    """Compute on a GPU, which fails where torch has no code for it or where it is broken."""
    properties = torch.cuda.get_device_properties(index)
    own = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        own = str(properties.gcnArchName).partition(":")[0]
    found = f"{printable(properties.name)}, {properties.total_memory / 2**30:.0f} GiB, {own}"
    try:
        torch.ones(1, device=f"cuda:{index}").add(1).item()
    except RuntimeError as error:
        built = " ".join(torch.cuda.get_arch_list()) or "no GPU"
        return Finding(
            f"GPU {index}",
            PROBLEM,
            f"{found}: {_first_line(error)}; torch has code for {built}",
            "a GPU that computes with this torch",
            (f"install a torch that was built for {own}", _LOOK),
        )
    return Finding(f"GPU {index}", OK, found)
