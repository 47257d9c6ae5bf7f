"""The partitions of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = ["Partition", "partitions"]


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition.

    Attributes:
        name: without the star of the default one.
        default: whether jobs go there that name none.
        limit: longest time, as Slurm writes it, or "infinite".
        nodes: how many.
        gpus: what each node has, such as gpu:a100:4; empty for none.
        up: whether jobs may run there.
    """

    name: str
    default: bool
    limit: str
    nodes: str
    gpus: str
    up: bool


def partitions(env: Mapping[str, str]) -> list[Partition]:
    """All partitions that the user may see; one for each kind of node in it.

    Raises:
        NoAnswerError: Slurm is absent, or did not answer.
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
