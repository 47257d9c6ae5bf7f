"""End of a job: exit status file, requeue, command to continue. Pure bash text."""

from hpctrain.jobs.spec import JobSpec

__all__ = ["ending"]

_EXIT_STATUS = """\
if [ -s "$HPCTRAIN_EXIT_STATUS_FILE" ]; then
    code_in_file=$(sed -n 's/.*"code": *\\([0-9]*\\).*/\\1/p' "$HPCTRAIN_EXIT_STATUS_FILE")
    # A code of 0 does not cover failures after the session. An incomplete file is ignored.
    if [ "${{code_in_file:-0}}" != 0 ]; then code=$code_in_file; fi
elif [ "$code" != 0 ] && [ -e "$HPCTRAIN_STOP_FILE" ]; then
    code=75 # stopped before the first step
elif [ "$code" = $((128 + $(kill -l USR1))) ] || [ "$code" = $((128 + $(kill -l USR2))) ]; then
    code=75 # stopped by a signal while the ranks were still importing
fi
{traps}
rm -f "$HPCTRAIN_STOP_FILE" "$HPCTRAIN_EXIT_STATUS_FILE"
# Done, failed, or given up (76): the end.
if [ "$code" != 75 ]; then exit "$code"; fi"""

_REQUEUE = """\
# The job was stopped. A job that is no longer RUNNING (or SIGNALING, while Slurm sends a signal) is
# not requeued here: a cancelled job must not restart, and Slurm requeues a preempted job itself.
if output=$(scontrol show job --oneliner "$job" 2>&1); then
    state=$(sed -n "s/^JobId=$SLURM_JOB_ID .* JobState=\\([A-Z_]*\\) Reason=.*/\\1/p" <<<"$output")
    if [ "$state" != RUNNING ] && [ "$state" != SIGNALING ]; then
        echo "job $job is ${{state:-unknown}}: this script does not requeue it"
        echo "its checkpoints are in $HPCTRAIN_RUN_DIR"
        exit 75
    fi
    {limit}# The last command, as a requeue ends this script. `incomplete` excludes a job that was
    # just cancelled.
    {else_}if output=$(scontrol requeue incomplete "$job" 2>&1); then
        sleep 60
        output="scontrol requeue was accepted, but the job continues"
    fi
fi
echo "job $job was stopped and could not be requeued: $output\""""

_LIMIT = """\
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {limit} ]; then
        code=76
        output="it was restarted ${{SLURM_RESTART_COUNT:-0}} times, and the limit is {limit}"
    """

_NO_REQUEUE = """\
echo "job $job was stopped, and requeueing is switched off\""""

_CONTINUE = """\
echo "its checkpoints are in $HPCTRAIN_RUN_DIR; to continue, with the same sbatch options:"
# Slurm deletes the script some minutes after the end of the job.
script=$runs/job-$job.sh
if ! scontrol write batch_script "$SLURM_JOB_ID" "$script" >/dev/null 2>&1; then
    script=THE_SCRIPT
fi
quoted_arguments=$(printf ' %q' {array}"$script" "${{hpctrain_arguments[@]}}")
echo "    HPCTRAIN_RUN_DIR=${{HPCTRAIN_RUN_DIR@Q}} sbatch$quoted_arguments --resume"
exit "$code\""""


def ending(spec: JobSpec) -> str:
    """Return the lines from the end of the ranks to the end of the script."""
    traps = "trap - TERM"
    if spec.signal_seconds and spec.signal != "TERM":
        traps = f"trap '' {spec.signal}\n{traps}"
    command = _CONTINUE.format(array='"--array=$SLURM_ARRAY_TASK_ID" ' if spec.indices else "")
    return f"{_EXIT_STATUS.format(traps=traps)}\n\n{_after(spec)}\n{command}"


def _after(spec: JobSpec) -> str:
    if not spec.requeue:
        return _NO_REQUEUE
    limited = spec.max_restarts is not None
    limit = _LIMIT.format(limit=spec.max_restarts) if limited else ""
    return _REQUEUE.format(limit=limit, else_="el" if limited else "")
