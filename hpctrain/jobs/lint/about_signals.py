"""Rules on the end of a job: its signal, the shell's trap, the requeue."""

import re
from collections.abc import Iterator

from hpctrain.jobs.lint.bash import read
from hpctrain.jobs.lint.launches import Launch, launches
from hpctrain.jobs.lint.lint_finding import LintFinding, shown
from hpctrain.jobs.lint.linted_script import LintedScript
from hpctrain.jobs.lint.option_values import seconds, signal_request
from hpctrain.jobs.lint.variables import Variables

__all__ = ["RULES"]

_LEAST_SECONDS = 60
# `hpctrain run` handles the signal, and gives the program the name of a stop file.
_RUN_ONCE = "type exec hpctrain run --once -- {command} in the last line, without the trap"
# Signals that bash survives without a trap.
_HARMLESS = frozenset(("CHLD", "CONT", "URG", "WINCH"))


def signal(script: LintedScript) -> Iterator[LintFinding]:
    """Find signals that do not reach a trap in time (sbatch(1), --signal; bash(1), SIGNALS)."""
    option = script.options.get("signal")
    request = signal_request(option.value) if option else None
    # A script that is sourced may set traps, and a program in another language handlers.
    if not option or not request or not script.commands or _sources(script):
        return
    to_shell, name, _ = request
    traps = [trap for trap in script.traps if name in trap.signals and not trap.ignores]
    trapped = any(name in trap.signals or "EXIT" in trap.signals for trap in script.traps)
    replaced = next(
        (launch for launch in script.commands if launch.replaces_shell and _main(launch)), None
    )
    run = next((launch for launch in script.commands if launch.supervised), None)
    if not to_shell:
        if traps:
            yield LintFinding(
                option.line,
                "signal-not-to-shell",
                f"--signal={shown(option.value)} goes to the steps and not to the batch shell, so "
                f"its trap in line {traps[0].command.line} never runs",
                (f"type --signal=B:{shown(option.value)}",),
            )
    elif run is not None:
        # A trap may pass the signal on to a program in the background.
        passed_on = traps and (run.command.background or run.command.function)
        if not replaced and not passed_on and name not in _HARMLESS:
            yield _without_exec(run, name)
    elif replaced and traps:
        yield LintFinding(
            replaced.command.line,
            "trap-lost",
            f"exec puts {shown(replaced.argv[0])} in the place of the shell, and of its trap in "
            f"line {traps[0].command.line}",
            (
                f'type {shown(" ".join(replaced.argv))} & and wait "$!" in the place of exec',
                _RUN_ONCE.format(command=shown(" ".join(replaced.argv))),
            ),
        )
    elif not trapped and not replaced and name not in _HARMLESS:
        others = sorted({signal for trap in script.traps for signal in trap.signals})
        hint = f" (there are traps for {shown(', '.join(others))})" if others else ""
        yield LintFinding(
            option.line,
            "signal-without-trap",
            f"no trap for {name}{hint}: it ends the batch shell, and with it the job",
            (
                "type exec hpctrain run SCRIPT in the last line: it handles the signal",
                "leave out B:",
            ),
        )
    elif traps:
        yield from _waits(script, name)


def _without_exec(run: Launch, name: str) -> LintFinding:
    command = shown(" ".join(run.argv)) if run.by == "hpctrain run" else "hpctrain run …"
    return LintFinding(
        run.command.line,
        "run-without-exec",
        f"bash gets {name}, and hpctrain run does not: the run cannot save before the end",
        (f"type exec {command} in the last line",),
    )


def _sources(script: LintedScript) -> bool:
    """Check whether the script sources one that may set traps: with arguments, or a .sh."""
    return any(
        launch.argv[0] in (".", "source")
        and (len(launch.argv) > 2 or launch.argv[-1].endswith(".sh"))
        for launch in script.commands
    )


def _main(launch: Launch) -> bool:
    return not launch.command.function and not launch.command.substituted


def _waits(script: LintedScript, name: str) -> Iterator[LintFinding]:
    """Find a program for which bash waits in the foreground, so that its trap runs too late."""
    starts = [
        launch
        for launch in script.commands
        if (launch.by or launch.trains) and launch.kind != "small"
    ]
    if script.opaque or any(
        launch.command.background or launch.command.function for launch in starts
    ):
        return
    first = min(t.command.line for t in script.traps if name in t.signals)
    starts = [launch for launch in starts if launch.command.line > first and _main(launch)]
    if starts:
        last = starts[-1]
        yield LintFinding(
            last.command.line,
            "trap-waits",
            f"bash runs its trap for {name} only when {shown(last.argv[0])} has ended, so the "
            "signal comes too late",
            (
                'start it in the background and wait: COMMAND & ranks=$!; while kill -0 "$ranks" '
                '2>/dev/null; do wait "$ranks"; done',
                _RUN_ONCE.format(command=shown(" ".join(last.argv))),
            ),
        )


def no_wait(script: LintedScript) -> Iterator[LintFinding]:
    """Find a script that ends while its step runs in the background, which ends the job.

    Source: sbatch(1). Tested with 22.05: the step does not start, and the job is COMPLETED.
    """
    if not script.commands:
        return
    last = script.commands[-1]
    is_launch = last.by in ("srun", "hpctrain run")
    if is_launch and last.command.background and _main(last):
        programs = {word for launch in script.commands for word in launch.argv[:1]}
        if not programs & {"wait", "fg", "sleep", "tail"}:
            yield LintFinding(
                last.command.line,
                "no-wait",
                "the script and the job end here: no command waits for the background process",
                ("type wait in the last line",),
            )


def signal_time(script: LintedScript) -> Iterator[LintFinding]:
    """Find a signal that is sent too early or too late to save.

    sbatch(1), --signal: SECONDS before the end of the time, and up to 60 s earlier.
    """
    option, time = script.options.get("signal"), script.options.get("time")
    request = signal_request(option.value) if option else None
    if not option or not request:
        return
    limit = seconds(time.value) if time else None
    if limit is not None and request[2] >= limit:
        yield LintFinding(
            option.line,
            "no-time-to-train",
            f"the signal comes {request[2]} s before the end of a job of {limit:.0f} s: at once",
            ("type a longer --time", "type fewer seconds after @"),
        )
    elif request[2] < _LEAST_SECONDS:
        yield LintFinding(
            option.line,
            "no-time-to-save",
            f"the signal comes {request[2]} s before the end: too late to save",
            (f"type --signal={shown(option.value.partition('@')[0])}@120",),
        )


def truncated_log(script: LintedScript) -> Iterator[LintFinding]:
    """Find a log that a requeued job truncates, which is the default (sbatch(1), --open-mode)."""
    option = script.options.get("requeue")
    calls = [launch for launch in script.commands if launch.argv[:2] == ["scontrol", "requeue"]]
    # Without any #SBATCH line the options are elsewhere.
    known = calls and script.options.directives
    line = option.line if option else calls[0].command.line if known else 0
    mode, output = script.options.value("open-mode").lower(), script.options.value("output")
    if line and not mode.startswith("a") and output != "/dev/null":
        yield LintFinding(
            line,
            "log-truncated",
            "a job that is requeued overwrites its log, so that earlier output is lost",
            ("type #SBATCH --open-mode=append",),
        )


def revived(script: LintedScript) -> Iterator[LintFinding]:
    """Find a requeue that also restarts a cancelled job (scontrol(1), requeue)."""
    checks_state = any(
        launch.argv[0] in ("squeue", "sacct") or launch.argv[:2] == ["scontrol", "show"]
        for launch in script.commands
        if "hostnames" not in launch.argv
    )
    if checks_state or "JobState" in script.text:
        return
    harmless = _only_at_a_signal(script)
    for launch in script.commands:
        if launch.argv[:2] == ["scontrol", "requeue"] and launch.command.function not in harmless:
            yield _revived(launch.command.line)
    for trap in script.traps:
        if "TERM" in trap.signals and re.search(r"\bscontrol\s+requeue\b", trap.body):
            yield _revived(trap.command.line)


def _only_at_a_signal(script: LintedScript) -> set[str]:
    """Return the functions that only run as the trap of a signal that no cancelled job gets."""
    signals: dict[str, set[str]] = {}
    for trap in script.traps:
        shell = read(trap.body)
        for launch in launches(shell, Variables(shell)):
            signals.setdefault(launch.argv[0], set()).update(trap.signals)
    called = {launch.argv[0] for launch in script.commands}
    return {
        name
        for name, names in signals.items()
        if name not in called and not names & {"TERM", "EXIT", "CONT"}
    }


def _revived(line: int) -> LintFinding:
    return LintFinding(
        line,
        "requeue-revives",
        "a job that was cancelled is started again, as the script does not check its state first",
        (
            'if scontrol show job -o "$SLURM_JOB_ID" | grep -qE "JobState=(RUNNING|SIGNALING) "; '
            'then scontrol requeue "$SLURM_JOB_ID"; fi',
        ),
    )


RULES = (signal, no_wait, signal_time, truncated_log, revived)
