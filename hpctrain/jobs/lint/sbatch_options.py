"""Options of sbatch as data, and lookup of their names as in getopt_long(3)."""

from hpctrain.cluster.texts import nearest

__all__ = ["KINDS", "SHORT", "SRUN_ONLY", "long_name", "similar"]

# sbatch --help and getopt's own lists of 22.05; those of later releases from their sbatch(1).
_BY_KIND = {
    "required": """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint
container context core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution error exclude export export-file extra-node-info gid gpu-bind
gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name
kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket open-mode output partition power prefer priority profile qos reservation signal
sockets-per-node switches thread-spec threads-per-core time time-min tmp uid
wait-all-nodes wckey wrap container-id extra segment tres-bind tres-per-task
container-image container-mounts container-workdir container-name
""",
    "optional": "exclusive get-user-env nice no-kill parsable propagate oom-kill-step resv-ports",
    "none": """
contiguous help hold ignore-pbs no-requeue overcommit oversubscribe quiet reboot requeue
spread-job test-only usage use-min-nodes verbose version wait stepmgr consolidate-segments
spread-segments container-mount-home no-container-mount-home container-writable
container-readonly container-remap-root no-container-remap-root
""",
}
# Other names of the same option.
_ALIASES = {
    "cluster": "clusters",
    "ntasks-per-tres": "ntasks-per-gpu",
    "tasks": "ntasks",
    "tasks-per-node": "ntasks-per-node",
}
#: Whether a long option has an argument: "required", "optional" (after =) or "none".
KINDS = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}
_NAMES = sorted({*KINDS, *_ALIASES})

_SHORT = """
a:array A:account b:begin B:extra-node-info c:cpus-per-task C:constraint d:dependency D:chdir
e:error F:nodefile G:gpus h:help H:hold i:input J:job-name k:no-kill L:licenses m:distribution
M:clusters n:ntasks N:nodes o:output O:overcommit p:partition q:qos Q:quiet s:oversubscribe
S:core-spec t:time v:verbose V:version w:nodelist W:wait x:exclude
"""
#: The long names of the short options.
SHORT = dict(pair.split(":") for pair in _SHORT.split())

#: Options that srun has and sbatch refuses, and old ones, with what to type instead.
SRUN_ONLY = {
    "accel-bind": "srun --accel-bind=…",
    "bcast": "srun --bcast=…",
    "cpu-bind": "srun --cpu-bind=…",
    "cpu_bind": "srun --cpu-bind=…",
    "exact": "srun --exact …",
    "kill-on-bad-exit": "srun --kill-on-bad-exit=1 …",
    "label": "srun --label …",
    "mpi": "srun --mpi=…",
    "multi-prog": "srun --multi-prog …",
    "overlap": "srun --overlap …",
    "pty": "srun --pty …",
    "unbuffered": "srun --unbuffered …",
    "task-prolog": "srun --task-prolog=…",
    "task-epilog": "srun --task-epilog=…",
    "share": "#SBATCH --oversubscribe",
    "workdir": "#SBATCH --chdir=…",
}


def long_name(given: str) -> str | None:
    """Return the option for a long name or an unambiguous beginning of it, as getopt does.

    Args:
        given: name without the hyphens.
    """
    if given in _ALIASES or given in KINDS:
        return _ALIASES.get(given, given)
    meant = {_ALIASES.get(name, name) for name in _NAMES if given and name.startswith(given)}
    return meant.pop() if len(meant) == 1 else None


def similar(given: str) -> list[str]:
    """Return the names that a misspelt name may mean.

    The list is empty if no name is near: the option may be one of a plugin of the site (spank(7)).
    """
    ahead = [name for name in _NAMES if given and name.startswith(given)]
    return ahead or [name for name in [nearest(given, _NAMES, cutoff=0.8)] if name]
