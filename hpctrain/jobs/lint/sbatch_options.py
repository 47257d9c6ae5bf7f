"""Options of sbatch as data, and lookup of their names as in getopt_long(3)."""

from hpctrain.cluster.texts import nearest

__all__ = ["ALIASES", "SHORT", "SRUN_ONLY", "VALUED", "long_names", "similar"]

# sbatch --help and getopt's own lists of 22.05; those of later releases from their sbatch(1).
_VALUED = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint
container container-id container-image container-mounts container-name container-workdir context
core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep
licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nodefile
nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode
output partition power prefer priority profile qos reservation segment signal sockets-per-node
switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes
wckey wrap
"""
_FLAGS = """
consolidate-segments container-mount-home container-readonly container-remap-root
container-writable contiguous exclusive get-user-env help hold ignore-pbs nice
no-container-mount-home no-container-remap-root no-kill no-requeue oom-kill-step overcommit
oversubscribe parsable propagate quiet reboot requeue resv-ports spread-job spread-segments stepmgr
test-only usage use-min-nodes verbose version wait
"""
#: Long names of the options that need a value.
VALUED = frozenset(_VALUED.split())
#: Other names of the same option, also of srun.
ALIASES = {"cluster": "clusters", "tasks": "ntasks", "tasks-per-node": "ntasks-per-node"}
_NAMES = sorted({*VALUED, *_FLAGS.split(), *ALIASES})

_SHORT = """
a:array A:account b:begin B:extra-node-info c:cpus-per-task C:constraint d:dependency D:chdir
e:error F:nodefile G:gpus h:help H:hold i:input J:job-name k:no-kill L:licenses m:distribution
M:clusters n:ntasks N:nodes o:output O:overcommit p:partition q:qos Q:quiet s:oversubscribe
S:core-spec t:time v:verbose V:version w:nodelist W:wait x:exclude
"""
#: The long names of the short options.
SHORT = dict(pair.split(":") for pair in _SHORT.split())

#: Options that srun has and sbatch refuses.
SRUN_ONLY = """
accel-bind bcast cpu-bind cpu_bind exact kill-on-bad-exit label mpi multi-prog overlap pty
unbuffered task-prolog task-epilog
"""


def long_names(given: str) -> list[str]:
    """Return the option for a long name or for the beginning of one, as getopt does.

    The list is empty for an unknown name, and has several for an ambiguous beginning.
    """
    names = [given] if given in _NAMES else [one for one in _NAMES if one.startswith(given)]
    return list(dict.fromkeys(ALIASES.get(name, name) for name in names))


def similar(given: str) -> list[str]:
    """Return the option that a misspelt name may mean.

    The list is empty if none is near: the option may be one of a plugin of the site (spank(7)).
    """
    return [ALIASES.get(name, name) for name in [nearest(given, _NAMES, cutoff=0.8)] if name]
