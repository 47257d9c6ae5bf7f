"""Copies on each host's own disk: of the code, of an environment. Pure bash text."""

from hpctrain.jobs.quoting import word
from hpctrain.jobs.spec import JobSpec

__all__ = ["removal", "staging"]

# The shell on each host gets the names as arguments, so that they stay text.
_COPY = """\
# Each host copies {what} to its own disk, once for all of its ranks.
# /tmp is everybody's: a folder of that name that is not ours is refused.
scratch=${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}/hpctrain-${{USER:-$UID}}-$job-${{SLURM_RESTART_COUNT:-0}}
each_host=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"
    --ntasks-per-node=1 --cpus-per-task=1)
remove_copies() {{
    cd "$SLURM_SUBMIT_DIR"
    "${{each_host[@]}}" rm -rf -- "$scratch" || true
}}
trap remove_copies EXIT
# shellcheck disable=SC2016 # for the other hosts' shells
if ! "${{each_host[@]}}" --kill-on-bad-exit=1 bash -c '
    set -euo pipefail
    umask 077
    for old in "${{1%-*}}"-*; do # of a start that was killed
        if [ "$old" != "$1" ] && [ -O "$old" ] && [ ! -L "$old" ]; then rm -rf -- "$old"; fi
    done
    mkdir -- "$1"
{steps}
' stage "$scratch" {arguments}; then
    echo "a host could not copy {what} to $scratch: the lines above say why" >&2
    exit 1
fi
export HPCTRAIN_SCRATCH=$scratch"""

_CODE = """\
    mkdir -- "$1/code"
    tar -C "$2" --exclude=./runs --exclude=./.git --exclude=./.venv -cf - . |
        tar -C "$1/code" -xf -"""

_ENVIRONMENT = """\
    mkdir -- "$1/environment"
    tar -C "$1/environment" --force-local -xf "$3"
    if [ ! -d "$1/environment/bin" ]; then
        printf "%s has no bin/ at its top: tar -C ENVIRONMENT -cf FILE.tar .\\n" "$3" >&2
        exit 1
    fi
    # As conda-pack wants it.
    if [ -x "$1/environment/bin/conda-unpack" ]; then
        "$1/environment/bin/python" "$1/environment/bin/conda-unpack"
    fi"""

_REMOVE = """\
trap - EXIT
remove_copies"""


def staging(spec: JobSpec) -> str:
    """One step that copies on all hosts, over before the ranks start; nothing without copies."""
    if not (spec.stage_code or spec.stage_environment):
        return ""
    what = " and ".join(
        name
        for name, given in (("code", spec.stage_code), ("environment", spec.stage_environment))
        if given
    )
    steps = [_CODE] * bool(spec.stage_code) + [_ENVIRONMENT] * bool(spec.stage_environment)
    arguments = [word(spec.stage_code), word(spec.stage_environment)]
    return _COPY.format(what=what, steps="\n".join(steps), arguments=" ".join(arguments))


def removal(spec: JobSpec) -> str:
    """What removes the copies when the ranks have ended, as nothing comes after a requeue."""
    return _REMOVE if spec.stage_code or spec.stage_environment else ""
