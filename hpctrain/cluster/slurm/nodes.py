"""Nodes of a cluster: where their slurmd listens."""

import re
from collections.abc import Mapping

from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = ["slurmd_address"]

_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_PORT = re.compile(r"\bPort=(\d+)")
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
