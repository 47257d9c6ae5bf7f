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
    output = ask(["sinfo", "--noheader", "--format=%P|%l|%D|%a|%G"], env)
    rows = []
    for line in output.splitlines():
        columns = line.split("|", 4)
        if len(columns) != 5:
            raise NoAnswerError(f"sinfo: no answer that can be read: {line[:200]!r}")
        name, limit, nodes, up, gres = columns
        gpus = ",".join(
            entry.partition("(")[0] for entry in gres.split(",") if entry.startswith("gpu")
        )
        rows.append(Partition(name.rstrip("*"), name.endswith("*"), limit, nodes, gpus, up == "up"))
    return rows
