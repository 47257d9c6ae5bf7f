"""Nodes of a cluster: where their slurmd listens, and which of them a job can do without."""

import re
from collections.abc import Mapping, Sequence

from hpctrain.cluster.hostlist import compress
from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = ["excludable", "exclude", "slurmd_address"]

_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_EXCLUDED = re.compile(r"\bExcNodeList=(\S+)")
_PORT = re.compile(r"\bPort=(\d+)")
# States of sinfo(1) in which a node runs jobs, or will.
_USABLE = re.compile(r"(alloc|mix|idle|comp|plan|resv|reserved)", re.ASCII)
_COMMON_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)


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
