"""Copies on each host's own disk: of the code, an environment, a data set. Pure bash text."""

import os
from collections.abc import Sequence

from hpctrain.jobs.quoting import quote
from hpctrain.jobs.spec import JobSpec

__all__ = ["removal", "staging"]

# The shell on each host gets the names as arguments, so that they stay text.
_COPY = """\
# Each host copies {content} to its own disk, once for all of its ranks.
# All users can write in /tmp, so an existing folder of that name is refused.
scratch=${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}/hpctrain-${{USER:-$UID}}-$job-${{SLURM_RESTART_COUNT:-0}}
each_host=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"
    --ntasks-per-node=1 --cpus-per-task=1)
# A name does not show who created a folder: only folders with the mark of a start are removed.
start_mark=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
# shellcheck disable=SC2016 # for the other hosts' shells
host_functions='
is_marked() {{ [ -O "$1" ] && [ ! -L "$1" ] && [ -f "$1/.start" ]; }}
remove() {{
    chmod -R u+rwX -- "$1" # only root could remove a read-only folder
    rm -rf -- "$1"/*       # the mark is removed last, in case of a kill
    rm -rf -- "$1"
}}'
remove_copies() {{
    cd "$SLURM_SUBMIT_DIR"
    # shellcheck disable=SC2016 # for the other hosts' shells
    "${{each_host[@]}}" bash -c "$host_functions"'
        if is_marked "$1" && [ "$(cat "$1/.start")" = "$2" ]; then remove "$1"; fi
    ' remove "$scratch" "$start_mark" || true
}}
trap remove_copies EXIT
# shellcheck disable=SC2016 # for the other hosts' shells
if ! "${{each_host[@]}}" --kill-on-bad-exit=1 bash -c "$host_functions"'
    set -euo pipefail
    umask 077
    for old in "${{1%-*}}"-*; do # of a start that was killed
        case ${{old#"${{1%-*}}-"}} in *[!0-9]* | "") continue ;; esac
        if [ "$old" != "$1" ] && is_marked "$old" && ! remove "$old"; then
            printf "%s is of an earlier start and cannot be removed\\n" "$old" >&2
        fi
    done
    mkdir -- "$1"
    printf %s "$2" >"$1/.start"
{steps}
' stage "$scratch" "$start_mark" {arguments}; then
    echo "a host could not copy {content} to $scratch: see the messages above" >&2
    exit 1
fi
export HPCTRAIN_SCRATCH=$scratch"""

_CODE = """\
    mkdir -- "$1/code"
    tar -C "$3" --exclude=./runs --exclude=./.git --exclude=./.venv -cf - . |
        tar -C "$1/code" -xf -"""

_ENVIRONMENT = """\
    mkdir -- "$1/environment"
    tar -C "$1/environment" --force-local -xf "$4"
    if [ ! -d "$1/environment/bin" ]; then
        printf "%s has no bin/ at its top: tar -C ENVIRONMENT -cf FILE.tar .\\n" "$4" >&2
        exit 1
    fi
    # conda-pack requires this.
    if [ -x "$1/environment/bin/conda-unpack" ]; then
        "$1/environment/bin/python" "$1/environment/bin/conda-unpack"
    fi"""

# Links become files, as their targets may be on a remote disk. Modes are not copied, as read-only
# copies could not be removed.
_DATA = """\
    if [ ! -d "$5" ]; then
        printf "%s is no folder on %s\\n" "$5" "$(uname -n)" >&2
        exit 1
    fi
    mkdir -- "$1/data" "$1/data/$6"
    cp -RL --no-preserve=mode -- "$5/." "$1/data/$6"/"""

# --data searches for a name there first.
_DATA_FOLDER = """
export HPCTRAIN_DATA=$scratch/data"""

_REMOVE = """\
trap - EXIT
remove_copies"""


def staging(spec: JobSpec) -> str:
    """Return the step that copies on all hosts before the ranks start; empty without copies."""
    copies = [(path, content, step) for path, content, step in _copies(spec) if path]
    if not copies:
        return ""
    arguments = [spec.stage_code, spec.stage_environment]
    if spec.stage_data:
        arguments += [spec.stage_data, os.path.basename(spec.stage_data.rstrip("/"))]
    text = _COPY.format(
        content=" and ".join(content for _, content, _ in copies),
        steps="\n".join(step for _, _, step in copies),
        arguments=" ".join(map(quote, arguments)),
    )
    return text + (_DATA_FOLDER if spec.stage_data else "")


def _copies(spec: JobSpec) -> Sequence[tuple[str, str, str]]:
    """Return what may be copied: source, name, and the lines that copy."""
    return (
        (spec.stage_code, "code", _CODE),
        (spec.stage_environment, "environment", _ENVIRONMENT),
        (spec.stage_data, "data", _DATA),
    )


def removal(spec: JobSpec) -> str:
    """Return the lines that remove the copies after the ranks: nothing runs after a requeue."""
    return _REMOVE if any(path for path, _, _ in _copies(spec)) else ""
