"""End of a job: exit status file, requeue, command to continue. Pure bash text."""

from hpctrain.jobs.spec import JobSpec

__all__ = ["ending"]

_EXIT_STATUS = """\
if [ -s "$HPCTRAIN_EXIT_STATUS_FILE" ]; then
    said=$(sed -n 's/.*"code": *\\([0-9]*\\).*/\\1/p' "$HPCTRAIN_EXIT_STATUS_FILE")
    # 0 does not cover what a rank did after its session; a file that is cut off is not used.
    if [ "${{said:-0}}" != 0 ]; then code=$said; fi
elif [ "$code" != 0 ] && [ -e "$HPCTRAIN_STOP_FILE" ]; then
    code=75 # stopped before the first step
elif [ "$code" = $((128 + $(kill -l USR1))) ] || [ "$code" = $((128 + $(kill -l USR2))) ]; then
    code=75 # the same, by a signal to the ranks while they still imported
fi
{traps}
rm -f "$HPCTRAIN_STOP_FILE" "$HPCTRAIN_EXIT_STATUS_FILE"
# Done, failed, or given up (76): the end.
if [ "$code" != 75 ]; then exit "$code"; fi"""

_REQUEUE = """\
# Stopped. A cancelled job would come back to life, and one that Slurm has taken away for another
# it requeues itself: both are no longer RUNNING (or SIGNALING, while a signal is under way).
if shown=$(scontrol show job --oneliner "$job" 2>&1); then
    state=$(sed -n "s/^JobId=$SLURM_JOB_ID .* JobState=\\([A-Z_]*\\) Reason=.*/\\1/p" <<<"$shown")
    if [ "$state" != RUNNING ] && [ "$state" != SIGNALING ]; then
        echo "job $job is ${{state:-not this one}}: not requeued from here"
        echo "its checkpoints are in $HPCTRAIN_RUN_DIR"
        exit 75
    fi
    {most}# Last of all, as it ends this script. One that was cancelled just now is complete.
    {else_}if shown=$(scontrol requeue incomplete "$job" 2>&1); then
        sleep 60
        shown="scontrol requeue was accepted, but the job goes on"
    fi
fi
echo "job $job was stopped and could not be requeued: $shown\""""

_MOST = """\
if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {most} ]; then
        code=76
        shown="it was started again ${{SLURM_RESTART_COUNT:-0}} times, of {most} that it may be"
    """

_NO_REQUEUE = """\
echo "job $job was stopped, and is not one to be requeued\""""

_GO_ON = """\
echo "its checkpoints are in $HPCTRAIN_RUN_DIR; to go on, with the options of sbatch that it had:"
# Slurm forgets it some minutes after the end.
script=$runs/job-$job.sh
if ! scontrol write batch_script "$SLURM_JOB_ID" "$script" >/dev/null 2>&1; then
    script=THE_SCRIPT
fi
words=$(printf ' %q' {array}"$script" "${{hpctrain_arguments[@]}}")
echo "    HPCTRAIN_RUN_DIR=${{HPCTRAIN_RUN_DIR@Q}} sbatch$words --resume"
exit "$code\""""


def ending(spec: JobSpec) -> str:
    """Return the lines from the end of the ranks to the end of the script."""
    traps = "trap - TERM"
    if spec.lead and spec.signal != "TERM":
        traps = f"trap '' {spec.signal}\n{traps}"
    go_on = _GO_ON.format(array='"--array=$SLURM_ARRAY_TASK_ID" ' if spec.indices else "")
    return f"{_EXIT_STATUS.format(traps=traps)}\n\n{_after(spec)}\n{go_on}"


def _after(spec: JobSpec) -> str:
    if not spec.requeue:
        return _NO_REQUEUE
    capped = spec.max_restarts is not None
    most = _MOST.format(most=spec.max_restarts) if capped else ""
    return _REQUEUE.format(most=most, else_="el" if capped else "")
