"""The description of a start of ranks, and of a program that makes starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The fields of World that each launcher's variables have; the others are null in the files.
BASICS = ("rank", "world_size", "local_rank")
LOCAL = (*BASICS, "local_world_size")
PLACE = (*LOCAL, "node_rank", "num_nodes")
KNOWN = {
    "slurm": (*PLACE, "hosts"),
    "hpctrain": (*PLACE, "hosts"),
    "torchrun": PLACE,
    "none": PLACE,
    "horovodrun": LOCAL,
    "openmpi": (*LOCAL, "num_nodes"),
    "hydra": LOCAL,
    "submitit": (*BASICS, "node_rank", "num_nodes"),
    "env": BASICS,
    "prterun": ("rank",),
}


@dataclass(frozen=True)
class Start:
    """One start of ranks.

    Attributes:
        name: of the file, and the last argument of train.py.
        launcher: that `hpctrain.detect` must return.
        layout: the host of each rank, by rank.
        hosts: the hosts by node rank, if not in the order of the layout.
        how: the command line, if it is not a line of the program's texts.
        where: the shell or script that it is typed in, if not that of the program.
        through_ssh: whether it enters another host by the script in place of ssh.
        known: the fields of World in the variables, if not those of KNOWN.
        local_ranks: by rank, if a launcher does not number the ranks of a host by rank.
        simulated: whether all ranks are on one host, but the variables show several.
    """

    name: str
    launcher: str
    layout: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    how: str = ""
    where: str = ""
    through_ssh: bool = False
    known: tuple[str, ...] = ()
    local_ranks: tuple[int, ...] = ()
    simulated: bool = False

    def world(self, rank: int) -> dict[str, Any]:
        """Return all fields of a rank's World."""
        true = place(self.layout, self.hosts or tuple(dict.fromkeys(self.layout)), rank)
        if self.local_ranks:
            true["local_rank"] = self.local_ranks[rank]
        if self.launcher == "none":
            true["world_size"] = 1
        return true

    def known_world(self, rank: int) -> dict[str, Any]:
        """Return the fields of a rank's World that the launcher's variables have."""
        known = self.known or KNOWN[self.launcher]
        return {name: true if name in known else None for name, true in self.world(rank).items()}


@dataclass(frozen=True)
class Program:
    """A script, and the starts that it makes.

    Attributes:
        name: of its folder.
        script: the commands.
        starts: what they start.
        typed: the command that runs the script, `sbatch … job.sh` or `salloc … bash job.sh`; ""
            for a script that is typed line by line.
        host: where it is typed: the login host of a cluster, or a separate host.
        needs: the parts without which it cannot run.
        files: other files in its folder.
    """

    name: str
    script: str
    starts: tuple[Start, ...]
    typed: str = ""
    host: str = "login"
    needs: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_background(self) -> bool:
        """Return whether the command ends before the ranks have run."""
        return self.typed.startswith("sbatch") or self.name == "submitit-slurm"

    def how(self, start: Start) -> str:
        """Return the command line of a start as a person types it, and where."""
        parts = [start.how or self._line(start)]
        if start.where:
            parts.append(start.where)
        if self.typed.startswith("sbatch"):
            parts.append(f"in the script that was submitted with: {self.typed}")
        elif self.typed.startswith("salloc"):
            parts.append(f"on the login host, in the shell of: {self.typed}")
        else:
            parts.append(f"on {self.host}")
        how = "    ".join(parts)
        if start.through_ssh:
            how += "; ssh is a script there, which enters the other host of the test cluster"
        return how

    def _line(self, start: Start) -> str:
        """Return the line that makes a start, without its name."""
        mark = re.compile(rf"(train\.py) {re.escape(start.name)}(?![\w-])")
        lines = [
            line.strip()
            for text in (self.script, *self.files.values())
            for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines()
        ]
        (line,) = (mark.sub(r"\1", line) for line in lines if mark.search(line))
        return line


def place(layout: Sequence[str], hosts: Sequence[str], rank: int) -> dict[str, Any]:
    """Return all fields of World for one rank of a layout."""
    host = layout[rank]
    return {
        "rank": rank,
        "world_size": len(layout),
        "local_rank": layout[:rank].count(host),
        "local_world_size": layout.count(host),
        "node_rank": hosts.index(host),
        "num_nodes": len(hosts),
        "hosts": list(hosts),
    }
