"""Partitions and nodes of a cluster, and which nodes a job can do without."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.hostlist import compress
from hpctrain.cluster.slurm.asking import ask

_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_EXCLUDED = re.compile(r"\bExcNodeList=(\S+)")
_PORT = re.compile(r"\bPort=(\d+)")
# States of sinfo(1) in which a node runs jobs, or will.
_USABLE = re.compile(r"(alloc|mix|idle|comp|plan|resv|reserved)", re.ASCII)
_COMMON_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)


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

    Returns:
        The partitions; none if Slurm is absent or does not answer.
    """
    try:
        output = ask(["sinfo", "--noheader", "--format=%P|%l|%D|%a|%G"], env)
    except NoAnswerError:
        return []
    rows = []
    answer = [line.split("|", 4) for line in output.splitlines()]
    for name, limit, nodes, up, gres in (columns for columns in answer if len(columns) == 5):
        gpus = ",".join(
            entry.partition("(")[0] for entry in gres.split(",") if entry.startswith("gpu")
        )
        rows.append(Partition(name.rstrip("*"), name.endswith("*"), limit, nodes, gpus, up == "up"))
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
    hosts: Sequence[str], needed: int, partition: str, env: Mapping[str, str]
) -> list[str]:
    """Return the hosts that a job can leave out: one, or a tenth of its partition if that is more.

    Args:
        hosts: names of hosts, the most important ones first.
        needed: number of hosts of the job, which have to be left.
        partition: partition of the job; empty for the default one.
        env: environment of the command.

    Raises:
        NoAnswerError: Slurm does not answer.
    """
    argv = ["sinfo", "--noheader", "--Node", "--format=%P %N %t"]
    rows = [row.split() for row in ask(argv, env).splitlines()]
    states = {
        row[1]: row[2]
        for row in rows
        if len(row) == 3
        and (row[0].rstrip("*") == partition or (not partition and row[0].endswith("*")))
    }
    left_out = [host for host in hosts if host in states][: max(1, len(states) // 10)]
    usable = {node for node, state in states.items() if _USABLE.match(state)}
    while left_out and len(usable.difference(left_out)) < needed:
        left_out.pop()
    return left_out


def exclude(label: str, hosts: Sequence[str], env: Mapping[str, str]) -> None:
    """Add hosts to those that a waiting job leaves out.

    Raises:
        NoAnswerError: the job does not wait, or Slurm does not answer.
    """
    shown = ask(["scontrol", "show", "job", "--oneliner", label], env)
    found = _EXCLUDED.search(shown)
    before = [found[1]] if found and found[1] != "(null)" else []
    names = ",".join([*before, compress(hosts)])
    ask(["scontrol", "update", f"JobId={label}", f"ExcNodeList={names}"], env)
