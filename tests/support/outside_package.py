"""An installed package outside of hpctrain, which adds a launcher and a backend."""

import textwrap

# All that such a package needs; docs/architecture.md shows the same.
CODE = """
from hpctrain.cluster.launchers.base import Launcher


class MapleLauncher(Launcher):
    name = "maple"
    reason = "before Slurm, whose steps start its agents"
    before = "slurm"
    marks = ("MAPLE_RANK",)
    inside = frozenset({"slurm"})
    variables = {
        "rank": ("MAPLE_RANK",),
        "world_size": ("MAPLE_SIZE",),
        "local_rank": ("MAPLE_LOCAL_RANK",),
        "local_world_size": ("MAPLE_LOCAL_SIZE",),
    }
    starts = ("MAPLE_JOB",)
"""
BACKEND = """
from hpctrain.backends.ddp import DDP


class CountingDDP(DDP):
    name = "counting"
    sums = 0

    def sum(self, tensor):
        self.sums += 1
        return super().sum(tensor)
"""
ENTRY_POINTS = """
[hpctrain.launchers]
maple = maple_launcher:MapleLauncher

[hpctrain.backends]
counting = maple_backend:CountingDDP
"""


def install(folder, entry_points=ENTRY_POINTS, launcher=CODE, backend=BACKEND):
    """Make the files that pip would unpack into a folder of `sys.path`; return the folder."""
    info = folder / "maple_tools-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: maple-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
    (folder / "maple_launcher.py").write_text(launcher)
    (folder / "maple_backend.py").write_text(backend)
    return folder


def environ(rank, size):
    """Return the variables of the launcher for one rank, all on one host."""
    names = ("MAPLE_RANK", "MAPLE_LOCAL_RANK", "MAPLE_SIZE", "MAPLE_LOCAL_SIZE")
    values = (rank, rank, size, size)
    return {"MAPLE_JOB": "12"} | dict(zip(names, map(str, values), strict=True))
