"""The GPUs that the variables of CUDA, MIG and ROCm make visible; read without torch.

Sources: "Environment Variables" in the CUDA C++ Programming Guide, NVIDIA's Multi-Instance GPU
User Guide ("Device Enumeration"), and "GPU isolation techniques" in ROCm's documentation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.job import Allocation
from hpctrain.cluster.texts import listed
from hpctrain.errors import ContradictionError, UsageError

__all__ = ["CUDA", "Visible", "check_rocm", "here", "idle", "own_slice", "visible"]

CUDA = "CUDA_VISIBLE_DEVICES"
# ROCR filters first, for the whole process. HIP's indices count the remaining GPUs, and HIP also
# reads CUDA's variable.
_ROCR = "ROCR_VISIBLE_DEVICES"
_HIP = ("HIP_VISIBLE_DEVICES", CUDA)
# CUDA stops at the first invalid entry. Slurm writes NoDevFiles if there is no GPU.
_NO_DEVICE = ("-1", "NoDevFiles")


@dataclass(frozen=True, slots=True)
class Visible:
    """The GPUs that a variable lists, in its order.

    Attributes:
        names: indices or UUIDs; empty if the variable hides all GPUs.
        source: name of the variable.
    """

    names: tuple[str, ...]
    source: str


def visible(env: Mapping[str, str], *variables: str) -> Visible | None:
    """Return the GPUs in the first variable that is set; None if none of them is set.

    Args:
        env: environment of the process.
        variables: names of the variables (default: those of HIP, CUDA and ROCR).
    """
    for source in variables or (*_HIP, _ROCR):
        if source in env:
            names: list[str] = []
            for entry in env[source].split(","):
                if not entry.strip() or entry.strip() in _NO_DEVICE:
                    break
                names.append(entry.strip())
            return Visible(tuple(names), source)
    return None


def here() -> list[str]:
    """Return the indices of this machine's GPUs, found by their device files."""
    nvidia = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    # Each topology node is a CPU or a GPU; only GPUs have SIMD units. Source: amdkfd in Linux.
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    amd = sum("simd_count 0\n" not in _read(node) for node in nodes)
    return sorted(nvidia, key=int) or [str(index) for index in range(amd)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return "simd_count 0\n"


def idle(
    launcher: str, job: Allocation | None, nodes: Mapping[str, tuple[int, int]]
) -> UsageError | None:
    """Return a warning if ranks see more GPUs than they use; None if no GPU is known to be idle.

    Args:
        launcher: name of the launcher.
        job: job of the scheduler.
        nodes: for each node the number of its ranks, each of which uses one GPU, and the largest
            number of GPUs that one of them sees.
    """
    # Of several GPUs, tasks may see separate ones (--gpus-per-task=2). A single one was chosen.
    in_step = job.gpus if job and job.gpus and launcher == "slurm" else 0
    counts = {
        node: (max(seen, in_step if seen > 1 else 0), ranks)
        for node, (ranks, seen) in nodes.items()
    }
    counts = {node: (gpus, ranks) for node, (gpus, ranks) in counts.items() if gpus > ranks}
    if not counts:
        return None
    gpus, ranks = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    most, fewest = max(gpus for gpus, _ in counts.values()), min(r for _, r in counts.values())
    if launcher == "slurm":
        fix = f"#SBATCH --ntasks-per-node={most}, without --ntasks"
    elif launcher in ("none", "hpctrain"):
        fix = "hpctrain run --nproc-per-node auto SCRIPT"
    else:
        fix = f"start {most} ranks on each node"
    visible = ",".join(map(str, range(fewest)))
    values = {"idle": gpus - ranks, "gpus": gpus, "nodes": listed(list(counts))}
    return UsageError("HT120.idle-gpus", fix=fix, visible=visible, **values)


def own_slice(env: Mapping[str, str], local_rank: int) -> str | None:
    """Return the MIG slice of a rank if several are visible; None with one slice or without any.

    CUDA uses only the first slice that the variable lists. So each rank needs its own slice before
    CUDA starts.

    Raises:
        UsageError: there are more ranks than slices, or slices together with whole GPUs.
    """
    devices = visible(env, CUDA)
    names = devices.names if devices else ()
    slices = [name for name in names if name.startswith("MIG-")]
    if len(names) < 2 or not slices:
        return None
    if len(slices) < len(names):
        raise ContradictionError("HT114.slices-and-gpus", env=env, slices=",".join(slices))
    if local_rank >= len(slices):
        raise UsageError("HT113.too-few-slices", local_rank=local_rank, slices=len(slices))
    return slices[local_rank]


def check_rocm(env: Mapping[str, str]) -> None:
    """Refuse variables that together hide GPUs from ROCm, which prints no warning.

    Raises:
        ContradictionError: HIP's variable has an index that ROCR's variable hides, or the two
            variables that HIP reads are different.
    """
    first, second = (visible(env, name) for name in _HIP)
    if first and second and first.names != second.names:
        raise ContradictionError("HT114.hip-and-cuda-differ", env=env)
    rocr, hip = visible(env, _ROCR), visible(env, *_HIP)
    if rocr is None or hip is None:
        return
    # float accepts any number of digits; int does not.
    gpus, selected = len(rocr.names), env[hip.source]
    for index in filter(str.isdecimal, hip.names):
        if float(index) >= gpus:
            raise ContradictionError(
                "HT114.hidden-by-rocr", env=env, hip=hip, selected=selected, index=index, gpus=gpus
            )
