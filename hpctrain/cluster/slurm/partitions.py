"""Partitions and nodes of a cluster, and which nodes a job can do without."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.hostlist import compress
from hpctrain.cluster.slurm.asking import ask, count
from hpctrain.cluster.slurm.job_state import Request, requested

_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_PORT = re.compile(r"\bPort=(\d+)")
# States of sinfo(1) in which a node runs jobs, or will.
_USABLE = re.compile(r"(alloc|mix|idle|comp|plan|resv|reserved)", re.ASCII)
_COLUMNS = 7  # of sinfo in `excludable`
_COMMON_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Partition:
    """The nodes of one kind in a partition.

    Attributes:
        name: name of the partition, without the star of the default partition.
        default: whether jobs without a partition run here.
        limit: longest run time in Slurm's format, or "infinite".
        nodes: number of nodes.
        gpus: GPUs of each node, such as gpu:a100:4; empty for none.
        up: whether jobs may run here.
        cpus, memory: CPUs, and megabytes of memory, of each node.
    """

    name: str
    default: bool
    limit: str
    nodes: int
    gpus: str
    up: bool
    cpus: int
    memory: int

    @property
    def size(self) -> str:
        """The nodes in words."""
        return f"{self.nodes} nodes of {self.cpus} CPUs and {self.memory} MB"


def node_names(partition: str, env: Mapping[str, str]) -> str:
    """Return the nodes of a partition as a Slurm host list; empty if Slurm does not answer.

    Args:
        partition: name of the partition; empty for all nodes.
        env: environment of the command.
    """
    chosen = [f"--partition={partition}"] if partition else []
    try:
        return ask(["sinfo", "--noheader", "--format=%N", *chosen], env).strip().replace("\n", ",")
    except NoAnswerError:
        return ""


def partitions(env: Mapping[str, str]) -> list[Partition]:
    """Return all partitions visible to the user; one entry for each kind of node in a partition.

    Returns:
        The partitions; none if Slurm is absent or does not answer.
    """
    try:
        output = ask(["sinfo", "--noheader", "--exact", "--format=%P|%l|%D|%a|%c|%m|%G"], env)
    except NoAnswerError:
        return []
    rows = []
    answer = [line.split("|", 6) for line in output.splitlines()]
    for name, limit, nodes, up, cpus, memory, gres in (one for one in answer if len(one) == 7):
        gpus = ",".join(
            entry.partition("(")[0] for entry in gres.split(",") if entry.startswith("gpu")
        )
        plain, size = name.rstrip("*"), (count(cpus), count(memory))
        rows.append(Partition(plain, name != plain, limit, count(nodes), gpus, up == "up", *size))
    return rows


def slurmd_address(node: str, env: Mapping[str, str]) -> tuple[str, int]:
    """Return address and port at which slurmd of a node listens.

    Args:
        node: name of the node.
        env: environment of the commands.

    Raises:
        NoAnswerError: Slurm does not answer, or does not know the node.
    """
    shown = ask(["scontrol", "show", "node", "--oneliner", node], env)
    address = _ADDRESS.search(shown)
    # Only a node with a port of its own shows it.
    port = _PORT.search(shown) or _COMMON_PORT.search(ask(["scontrol", "show", "config"], env))
    if address is None or port is None:
        raise NoAnswerError(f"scontrol: no answer that can be read: {shown[:200]!r}")
    return address[1], int(port[1])


def excludable(
    nodes: Sequence[str],
    needed: int,
    partition: str,
    env: Mapping[str, str],
    request: Request | None = None,
    like: Sequence[str] = (),
) -> list[str]:
    """Return the nodes that a job can do without: one, or a tenth of its partition if that is more.

    Args:
        nodes: names of nodes, the most important ones first.
        needed: number of nodes of the job, which have to be left.
        partition: partition of the job; empty for the default one.
        env: environment of the command.
        request: what the job asks for; a node that it requires is kept.
        like: nodes that the job has had. Only nodes that are as large count as left.

    Raises:
        NoAnswerError: Slurm does not answer.
    """
    request = request or Request()
    argv = ["sinfo", "--noheader", "--Node", "--format=%P %N %t %c %m %G %f"]
    rows = [row.split() for row in ask(argv, env).splitlines()]
    known = {
        row[1]: row
        for row in rows
        if len(row) == _COLUMNS
        and (row[0].rstrip("*") == partition or (not partition and row[0].endswith("*")))
    }
    had = [_Kind.of(known[node]) for node in like if node in known]
    left = {
        node
        for node, row in known.items()
        if _USABLE.match(row[2])
        and node not in request.excluded
        and (not had or any(_Kind.of(row).fits(one, bool(request.constraint)) for one in had))
    }
    chosen = [node for node in nodes if node in known and node not in request.required]
    chosen = chosen[: max(1, len(known) // 10)]
    while chosen and len(left.difference(chosen)) < needed:
        chosen.pop()
    return chosen


@dataclass(frozen=True, slots=True)
class _Kind:
    """CPUs, megabytes of memory, GPUs and features of a node."""

    cpus: int
    memory: int
    gpus: str
    features: frozenset[str]

    @classmethod
    def of(cls, row: Sequence[str]) -> "_Kind":
        """Return the kind of a node from its row of sinfo; a number that is unknown is 0."""
        return cls(count(row[3]), count(row[4]), row[5], frozenset(row[6].split(",")))

    def fits(self, other: "_Kind", features: bool) -> bool:
        """Return whether a job with a node of the other kind could have this one instead."""
        return (
            self.cpus >= other.cpus
            and self.memory >= other.memory
            and self.gpus == other.gpus
            and (not features or self.features >= other.features)
        )


def exclude(
    label: str,
    nodes: Sequence[str],
    like: Sequence[str],
    partition: str,
    env: Mapping[str, str],
) -> tuple[list[str], list[str]]:
    """Add nodes to those that a waiting job does not get, as far as it can start without them.

    Args:
        label: label of the job.
        nodes: names of nodes, the most important ones first.
        like: nodes that the job has had.
        partition: partition of the job.
        env: environment of the commands.

    Returns:
        The nodes that were added, and those that the job requires.

    Raises:
        NoAnswerError: the job does not wait, or Slurm does not answer.
    """
    request = requested(label, env)
    chosen = excludable(nodes, len(like), partition, env, request, like)
    if chosen:
        names = compress(sorted({*request.excluded, *chosen}))
        ask(["scontrol", "update", f"JobId={label}", f"ExcNodeList={names}"], env)
    return chosen, [node for node in nodes if node in request.required]
