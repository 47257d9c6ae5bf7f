"""Launcher that starts the ranks of a program, forwards their output, and ends them.

`agent` starts the ranks of one host: `rank_environment` makes the environment of each, `cores`
divides the cores, `stores` offers what programs without a session expect from their launcher,
`supervisor` starts the ranks and waits for them, `rank_output` forwards their output with the rank
in front, and `guard` ends the ranks if this process is killed. `in_slurm` starts an agent on each
host of a job, `attempts` starts the ranks again after a failure, and `joined_rank` makes a rank of
a process that srun or mpirun has started. This package never imports torch.
"""

from typing import TYPE_CHECKING

from hpctrain._lazy import lazy

if TYPE_CHECKING:
    from hpctrain.launch.spawning import spawn

__all__ = ["spawn"]

if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = lazy(__name__, {"spawning": ("spawn",)})
