"""The interface to Slurm: no other package runs Slurm's commands.

A cluster may have no Slurm, a container may lack its commands, and a busy controller may answer
late. These cases are normal: a run never fails. The result is empty or `None` where that is enough
for all callers, else `NoAnswerError`.
"""

from hpctrain.cluster.commands import NoAnswerError
from hpctrain.cluster.slurm.accounting import Ended, accounts, ended, largest_memory, qualities
from hpctrain.cluster.slurm.asking import absent
from hpctrain.cluster.slurm.het_parts import hosts_of_parts, ids_of_parts, of_all_parts
from hpctrain.cluster.slurm.job_list import QueuedJob, jobs
from hpctrain.cluster.slurm.job_state import (
    ENDED,
    FORGOTTEN,
    SIGNAL_EARLY,
    JobState,
    Request,
    end_time,
    hosts_left,
    is_label,
    job_state,
    requested,
    step_is_active,
)
from hpctrain.cluster.slurm.partitions import (
    Partition,
    excludable,
    exclude,
    node_names,
    partitions,
    slurmd_address,
)
from hpctrain.cluster.slurm.submission import (
    Answer,
    batch_script,
    cancel,
    requeue,
    requeue_unended,
    requeues_preempted,
    sbatch,
    signal_batch,
)

__all__ = [
    "ENDED",
    "FORGOTTEN",
    "SIGNAL_EARLY",
    "Answer",
    "Ended",
    "JobState",
    "NoAnswerError",
    "Partition",
    "QueuedJob",
    "Request",
    "absent",
    "accounts",
    "batch_script",
    "cancel",
    "end_time",
    "ended",
    "excludable",
    "exclude",
    "hosts_left",
    "hosts_of_parts",
    "ids_of_parts",
    "is_label",
    "job_state",
    "jobs",
    "largest_memory",
    "node_names",
    "of_all_parts",
    "partitions",
    "qualities",
    "requested",
    "requeue",
    "requeue_unended",
    "requeues_preempted",
    "sbatch",
    "signal_batch",
    "slurmd_address",
    "step_is_active",
]
