"""Rules on the end of a job: its signal, the shell's trap, the requeue."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.bash import read
from hpctrain.jobs.lint.findings import Finding, shown
from hpctrain.jobs.lint.job import Job
from hpctrain.jobs.lint.launches import Launch, launches
from hpctrain.jobs.lint.units import seconds, signal_request
from hpctrain.jobs.lint.variables import Variables

__all__ = ["RULES"]

_LEAST_LEAD = 60
# Signals that bash survives without a trap.
_HARMLESS = frozenset(("CHLD", "CONT", "URG", "WINCH"))


def signal(job: Job) -> Iterator[Finding]:
    """Find signals that do not reach a trap in time (sbatch(1), --signal; bash(1), SIGNALS)."""
    asked = job.options.get("signal")
    request = signal_request(asked.value) if asked else None
    # A script that is sourced may set traps, and a program in another language handlers.
    if not asked or not request or not job.commands or _sources(job):
        return
    to_shell, name, _ = request
    traps = [trap for trap in job.traps if name in trap.signals and not trap.ignores]
    trapped = any(name in trap.signals or "EXIT" in trap.signals for trap in job.traps)
    replaced = next((one for one in job.commands if one.replaces_shell and _main(one)), None)
    if not to_shell:
        if traps:
            yield Finding(
                asked.line,
                "signal-not-to-shell",
                f"--signal={shown(asked.value)} goes to the steps and not to the batch shell, so "
                f"its trap in line {traps[0].command.line} never runs",
                (f"type --signal=B:{shown(asked.value)}",),
            )
    elif replaced and traps:
        yield Finding(
            replaced.command.line,
            "trap-lost",
            f"exec puts {shown(replaced.argv[0])} in the place of the shell, and of its trap in "
            f"line {traps[0].command.line}",
            (f'type {shown(" ".join(replaced.argv))} & and wait "$!" in the place of exec',),
        )
    elif not trapped and not replaced and name not in _HARMLESS:
        others = sorted({one for trap in job.traps for one in trap.signals})
        there = f" (there are traps for {shown(', '.join(others))})" if others else ""
        yield Finding(
            asked.line,
            "signal-without-trap",
            f"no trap for {name}{there}: it ends the batch shell, and with it the job",
            (f"type trap 'touch \"$HPCTRAIN_STOP_FILE\"' {name} before the start", "leave out B:"),
        )
    elif traps:
        yield from _waits(job, name)


def _sources(job: Job) -> bool:
    """Check whether the script sources one that may set traps: with arguments, or a .sh."""
    return any(
        one.argv[0] in (".", "source") and (len(one.argv) > 2 or one.argv[-1].endswith(".sh"))
        for one in job.commands
    )


def _main(one: Launch) -> bool:
    return not one.command.function and not one.command.substituted


def _waits(job: Job, name: str) -> Iterator[Finding]:
    """Find a program for which bash waits in the foreground, so that its trap runs too late."""
    starts = [one for one in job.commands if (one.by or one.trains) and one.kind != "small"]
    if job.opaque or any(one.command.background or one.command.function for one in starts):
        return
    first = min(t.command.line for t in job.traps if name in t.signals)
    starts = [one for one in starts if one.command.line > first and _main(one)]
    if starts:
        last = starts[-1]
        yield Finding(
            last.command.line,
            "trap-waits",
            f"bash runs its trap for {name} only when {shown(last.argv[0])} has ended, so the "
            "signal comes too late",
            (
                'start it in the background and wait: COMMAND & ranks=$!; while kill -0 "$ranks" '
                '2>/dev/null; do wait "$ranks"; done',
            ),
        )


def no_wait(job: Job) -> Iterator[Finding]:
    """Find a script that ends while its step runs in the background, which ends the job.

    Source: sbatch(1). Tested with 22.05: the step does not start, and the job is COMPLETED.
    """
    if not job.commands:
        return
    last = job.commands[-1]
    if last.by == "srun" and last.command.background and _main(last):
        words = {word for one in job.commands for word in one.argv[:1]}
        if not words & {"wait", "fg", "sleep", "tail"}:
            yield Finding(
                last.command.line,
                "no-wait",
                "the script ends here, and with it the job: nobody waits for what & has started",
                ("type wait in the last line",),
            )


def lead(job: Job) -> Iterator[Finding]:
    """Find a signal that is sent too early or too late to save.

    sbatch(1), --signal: SECONDS before the end of the time, and up to 60 s earlier.
    """
    asked, time = job.options.get("signal"), job.options.get("time")
    request = signal_request(asked.value) if asked else None
    if not asked or not request:
        return
    limit = seconds(time.value) if time else None
    if limit is not None and request[2] >= limit:
        yield Finding(
            asked.line,
            "no-time-to-train",
            f"the signal comes {request[2]} s before the end of a job of {limit:.0f} s: at once",
            ("type a longer --time", "type fewer seconds after @"),
        )
    elif request[2] < _LEAST_LEAD:
        yield Finding(
            asked.line,
            "no-time-to-save",
            f"the signal comes {request[2]} s before the end: too late to save",
            (f"type --signal={shown(asked.value.partition('@')[0])}@120",),
        )


def truncated_log(job: Job) -> Iterator[Finding]:
    """Find a log that a requeued job truncates, which is the default (sbatch(1), --open-mode)."""
    asked = job.options.get("requeue")
    calls = [one for one in job.commands if one.argv[:2] == ["scontrol", "requeue"]]
    # Without any #SBATCH line the options are elsewhere.
    known = calls and job.options.directives
    line = asked.line if asked else calls[0].command.line if known else 0
    mode, output = job.options.value("open-mode").lower(), job.options.value("output")
    if line and not mode.startswith("a") and output != "/dev/null":
        yield Finding(
            line,
            "log-truncated",
            "a job that is requeued empties its log, and with it what was said before",
            ("type #SBATCH --open-mode=append",),
        )


def revived(job: Job) -> Iterator[Finding]:
    """Find a requeue that also restarts a cancelled job (scontrol(1), requeue)."""
    asks = any(
        one.argv[0] in ("squeue", "sacct") or one.argv[:2] == ["scontrol", "show"]
        for one in job.commands
        if "hostnames" not in one.argv
    )
    if asks or "JobState" in job.text:
        return
    harmless = _only_at_a_signal(job)
    for one in job.commands:
        if one.argv[:2] == ["scontrol", "requeue"] and one.command.function not in harmless:
            yield _revived(one.command.line)
    for trap in job.traps:
        if "TERM" in trap.signals and re.search(r"\bscontrol\s+requeue\b", trap.body):
            yield _revived(trap.command.line)


def _only_at_a_signal(job: Job) -> set[str]:
    """Return the functions that only run as the trap of a signal that no cancelled job gets."""
    signals: dict[str, set[str]] = {}
    for trap in job.traps:
        shell = read(trap.body)
        for one in launches(shell, Variables(shell)):
            signals.setdefault(one.argv[0], set()).update(trap.signals)
    called = {one.argv[0] for one in job.commands}
    return {
        name
        for name, names in signals.items()
        if name not in called and not names & {"TERM", "EXIT", "CONT"}
    }


def _revived(line: int) -> Finding:
    return Finding(
        line,
        "requeue-revives",
        "a job that was cancelled is started again, as nobody asks for its state first",
        (
            'if scontrol show job -o "$SLURM_JOB_ID" | grep -qE "JobState=(RUNNING|SIGNALING) "; '
            'then scontrol requeue "$SLURM_JOB_ID"; fi',
        ),
    )


RULES = (signal, no_wait, lead, truncated_log, revived)
