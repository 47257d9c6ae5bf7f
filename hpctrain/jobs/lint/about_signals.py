"""Rules on the end of a job: its signal, the shell's trap, the requeue."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.directives import signal_request
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.units import slurm_seconds

__all__ = ["RULES"]

_LEAST_SECONDS = 60
# Signals that bash survives without a trap.
_HARMLESS = frozenset(("CHLD", "CONT", "URG", "WINCH"))
_REQUEUES = re.compile(r"\bscontrol\s+requeue\b")
# squeue, sacct, scontrol show job, but not scontrol show hostnames.
_CHECKS_STATE = re.compile(r"(?m)^(?!\s*#).*\b(squeue|sacct|scontrol\s+show(?!\s+host)|JobState)\b")


def _signals(script: LintedScript) -> Iterator[Found]:
    """Yield signals that come at a wrong time, or do not reach the one for whom they are.

    Source: sbatch(1), --signal: it may come up to 60 s earlier.
    """
    option, limit = script.options.get("signal"), slurm_seconds(script.value("time"))
    request = signal_request(option.value) if option else None
    if not option or not request:
        return
    to_shell, name, seconds = request
    when = f"the signal comes {seconds} s before the end"
    if limit and seconds >= limit:
        fixes = ("type a longer --time", "type fewer seconds after @")
        yield option.line, "no-time-to-train", f"{when} of a job of {limit} s", *fixes
    if seconds < _LEAST_SECONDS:
        fix = f"type --signal={shown(option.value.partition('@')[0])}@120"
        yield option.line, "no-time-to-save", f"{when}: too late to save", fix
    line, body = script.traps.get(name, (0, ""))
    trap = line if body not in ("", "-") else 0
    # A script that is sourced may set traps, and a program in another language handlers.
    sources = any(
        one.sources_with_arguments
        or (one.argv[0] in (".", "source") and one.argv[-1].endswith(".sh"))
        for one in script.launches
    )
    if trap and not to_shell:
        reason = f"the signal goes to the steps, so the trap in line {trap} never runs"
        yield option.line, "signal-not-to-shell", reason, f"type --signal=B:{shown(option.value)}"
    elif to_shell and script.launches and not sources:
        yield from _to_shell(script, option.line, name, trap)


def _to_shell(script: LintedScript, line: int, name: str, trap: int) -> Iterator[Found]:
    """Yield what the batch shell does wrong with its signal: bash(1), SIGNALS and exec."""
    run = next((one for one in script.launches if one.supervised), None)
    replacing = next((one for one in script.launches if one.replaces_shell), None)
    once = "type exec hpctrain run --once -- {} in the last line, without the trap"
    starts = [one for one in script.launches if (one.by or one.trains) and one.kind != "small"]
    late = [one for one in starts if one.line > trap]
    if run:
        # A trap may pass the signal on to a program in the background.
        passed_on = trap and script.shell.in_background
        if not replacing and name not in _HARMLESS and not passed_on:
            command = run.text if run.by == "hpctrain run" else "hpctrain run …"
            reason = f"bash gets {name}, and hpctrain run does not: the run cannot save"
            yield run.line, "run-without-exec", reason, f"type exec {command} in the last line"
    elif replacing and trap:
        reason = f"exec ends the shell, and with it its trap in line {trap}"
        fix = f'type {replacing.text} & and wait "$!" in the place of exec'
        yield replacing.line, "trap-lost", reason, fix, once.format(replacing.text)
    elif trap and late and not script.opaque and not script.shell.in_background:
        reason = f"bash runs its trap for {name} only when this has ended, which is too late"
        loop = 'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done'
        fix = f"start it in the background and wait: COMMAND & ranks=$!; {loop}"
        yield late[-1].line, "trap-waits", reason, fix, once.format(late[-1].text)
    elif not replacing and name not in _HARMLESS and not {name, "EXIT"} & script.traps.keys():
        others = shown(", ".join(sorted(script.traps)))
        hint = f" (there are traps for {others})" if others else ""
        reason = f"no trap for {name}{hint}: it ends the batch shell, and with it the job"
        fix = "type exec hpctrain run SCRIPT in the last line: it handles the signal"
        yield line, "signal-without-trap", reason, fix, "leave out B:"


def _end(script: LintedScript) -> Iterator[Found]:
    """Yield a job that ends before its step, and a requeue that overwrites or revives.

    Source: sbatch(1), --open-mode; scontrol(1), requeue.
    """
    # Tested with 22.05: the step does not start, and the job is COMPLETED.
    last = script.launches[-1] if script.launches else None
    waits = {"wait", "fg", "sleep", "tail"} & {one.argv[0] for one in script.launches}
    if last and last.command.background and last.by in ("srun", "hpctrain run") and not waits:
        reason = "the script and the job end here: no command waits for the background process"
        yield last.line, "no-wait", reason, "type wait in the last line"
    calls = [one for one in script.launches if one.argv[:2] == ["scontrol", "requeue"]]
    option, mode = script.options.get("requeue"), script.value("open-mode")
    again = [one.line for one in calls]
    again += [line for line, body in script.traps.values() if _REQUEUES.search(body)]
    # Without any #SBATCH line the options are elsewhere.
    line = option.line if option else min(again, default=0) if script.options else 0
    if line and mode[:1] not in ("a", "A") and script.value("output") != "/dev/null":
        reason = "a job that is requeued overwrites its log, so that earlier output is lost"
        yield line, "log-truncated", reason, "type #SBATCH --open-mode=append"
    # With traps for other signals alone, a function or a branch is not for the end by scancel.
    spared = script.traps and not {"TERM", "EXIT", "CONT"} & script.traps.keys()
    lines = [one.line for one in calls if not (spared and one.command.conditional)]
    trap, body = script.traps.get("TERM", (0, ""))
    lines += [trap] if _REQUEUES.search(body) else []
    for line in lines if not _CHECKS_STATE.search(script.text) else ():
        reason = "a job that was cancelled is started again, as its state is not checked first"
        state = 'scontrol show job -o "$SLURM_JOB_ID" | grep -qE "JobState=(RUNNING|SIGNALING) "'
        fix = f'if {state}; then scontrol requeue "$SLURM_JOB_ID"; fi'
        yield line, "requeue-revives", reason, fix


#: Functions that yield what is wrong with a script.
RULES = (_end, _signals)
