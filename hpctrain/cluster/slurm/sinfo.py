"""The partitions of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = ["Partition", "partitions"]


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of the cluster.

    Attributes:
        name: name of the partition, without the star of the default partition.
        default: whether jobs without a partition run here.
        limit: longest run time in Slurm's format, or "infinite".
        nodes: number of nodes.
        gpus: GPUs of each node, such as gpu:a100:4; empty for none.
        up: whether jobs may run here.
    """

    name: str
    default: bool
    limit: str
    nodes: str
    gpus: str
    up: bool


def partitions(env: Mapping[str, str]) -> list[Partition]:
    """Return all partitions visible to the user; one entry for each kind of node in a partition.

    Raises:
        NoAnswerError: Slurm is absent or did not answer.
    """
    said = ask(["sinfo", "--noheader", "--format=%P|%l|%D|%a|%G"], env)
    found = []
    for line in said.splitlines():
        words = line.split("|", 4)
        if len(words) != 5:
            raise NoAnswerError(f"sinfo: no answer that can be read: {line[:200]!r}")
        name, limit, nodes, up, gres = words
        gpus = ",".join(one.partition("(")[0] for one in gres.split(",") if one.startswith("gpu"))
        found.append(
            Partition(name.rstrip("*"), name.endswith("*"), limit, nodes, gpus, up == "up")
        )
    return found
