"""Rules on the end of a job: its signal, the shell's trap, the requeue."""

import re
from collections import defaultdict
from collections.abc import Iterator

from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.lint_finding import Found, shown
from hpctrain.jobs.lint.linted_script import LintedScript, Trap
from hpctrain.jobs.lint.option_values import seconds, signal_request

_LEAST_SECONDS = 60
# Signals that bash survives without a trap.
_HARMLESS = frozenset(("CHLD", "CONT", "URG", "WINCH"))
_REQUEUES = re.compile(r"\bscontrol\s+requeue\b")
# squeue, sacct, scontrol show job, but not scontrol show hostnames.
_CHECKS_STATE = re.compile(r"\b(squeue|sacct|scontrol\s+show(?!\s+host)|JobState)\b")


def _to_shell(script: LintedScript) -> tuple[int, str] | None:
    """Return line and name of a signal to the batch shell alone; None if there is none.

    A script that is sourced may set traps, and a program in another language handlers.
    """
    option = script.options.get("signal")
    request = signal_request(option.value) if option else None
    sources = any(
        one.argv[0] in (".", "source") and (len(one.argv) > 2 or one.argv[-1].endswith(".sh"))
        for one in script.commands
    )
    if option and request and request[0] and script.commands and not sources:
        return option.line, request[1]
    return None


def _traps(script: LintedScript, name: str) -> list[Trap]:
    return [one for one in script.traps if name in one.signals and one.body not in ("", "-")]


def _run(script: LintedScript) -> Launch | None:
    return next((one for one in script.commands if one.supervised), None)


def _replacing(script: LintedScript) -> Launch | None:
    """Return the program that `exec` puts in the place of the batch shell."""
    return next((one for one in script.commands if one.replaces_shell), None)


def _run_once(launch: Launch) -> str:
    # `hpctrain run` handles the signal, and gives the program the name of a stop file.
    return f"type exec hpctrain run --once -- {launch.text} in the last line, without the trap"


def signal_not_to_shell(script: LintedScript) -> Iterator[Found]:
    """Find signals that go to the steps, although the batch shell has a trap (sbatch(1))."""
    option = script.options.get("signal")
    request = signal_request(option.value) if option else None
    traps = _traps(script, request[1]) if request and not request[0] else []
    if option and traps:
        reason = f"the signal goes to the steps, so the trap in line {traps[0].line} never runs"
        yield option.line, reason, f"type --signal=B:{shown(option.value)}"


def run_without_exec(script: LintedScript) -> Iterator[Found]:
    """Find a shell that waits for `hpctrain run` when the signal comes (bash(1), SIGNALS)."""
    signal, run = _to_shell(script), _run(script)
    if not signal or not run or _replacing(script) or signal[1] in _HARMLESS:
        return
    # A trap may pass the signal on to a program in the background.
    if not _traps(script, signal[1]) or not script.shell.in_background:
        command = run.text if run.by == "hpctrain run" else "hpctrain run …"
        reason = f"bash gets {signal[1]}, and hpctrain run does not: the run cannot save"
        yield run.line, reason, f"type exec {command} in the last line"


def trap_lost(script: LintedScript) -> Iterator[Found]:
    """Find an `exec` after which the trap is gone (bash(1), exec)."""
    signal, replacing = _to_shell(script), _replacing(script)
    traps = _traps(script, signal[1]) if signal else []
    if replacing and traps and not _run(script):
        reason = f"exec ends the shell, and with it its trap in line {traps[0].line}"
        fix = f'type {replacing.text} & and wait "$!" in the place of exec'
        yield replacing.line, reason, fix, _run_once(replacing)


def signal_without_trap(script: LintedScript) -> Iterator[Found]:
    """Find a signal that ends the batch shell (sbatch(1), --signal; bash(1), SIGNALS)."""
    signal = _to_shell(script)
    if not signal or signal[1] in _HARMLESS or _run(script) or _replacing(script):
        return
    line, name = signal
    others = {one for trap in script.traps for one in trap.signals}
    if not others & {name, "EXIT"}:
        hint = f" (there are traps for {shown(', '.join(sorted(others)))})" if others else ""
        reason = f"no trap for {name}{hint}: it ends the batch shell, and with it the job"
        fix = "type exec hpctrain run SCRIPT in the last line: it handles the signal"
        yield line, reason, fix, "leave out B:"


def trap_waits(script: LintedScript) -> Iterator[Found]:
    """Find a program for which bash waits in the foreground, so that its trap runs too late."""
    signal = _to_shell(script)
    traps = _traps(script, signal[1]) if signal else []
    starts = [one for one in script.commands if (one.by or one.trains) and one.kind != "small"]
    indirect = script.opaque or script.shell.in_background
    if not signal or not traps or _run(script) or _replacing(script) or indirect:
        return
    late = [one for one in starts if one.line > traps[0].line]
    if late:
        reason = f"bash runs its trap for {signal[1]} only when this has ended, which is too late"
        loop = 'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done'
        fix = f"start it in the background and wait: COMMAND & ranks=$!; {loop}"
        yield late[-1].line, reason, fix, _run_once(late[-1])


def no_wait(script: LintedScript) -> Iterator[Found]:
    """Find a script that ends while its step runs in the background, which ends the job.

    Source: sbatch(1). Tested with 22.05: the step does not start, and the job is COMPLETED.
    """
    programs = {one.argv[0] for one in script.commands}
    last = script.commands[-1] if script.commands else None
    if not last or not last.command.background or last.command.function:
        return
    if last.by in ("srun", "hpctrain run") and not programs & {"wait", "fg", "sleep", "tail"}:
        reason = "the script and the job end here: no command waits for the background process"
        yield last.line, reason, "type wait in the last line"


def no_time_to_train(script: LintedScript) -> Iterator[Found]:
    """Find a signal that is sent at the start (sbatch(1), --signal: SECONDS before the end)."""
    option, time = script.options.get("signal"), script.options.get("time")
    request, limit = option and signal_request(option.value), time and seconds(time.value)
    if option and request and limit and request[2] >= limit:
        reason = f"the signal comes {request[2]} s before the end of a job of {limit:.0f} s"
        yield option.line, reason, "type a longer --time", "type fewer seconds after @"


def no_time_to_save(script: LintedScript) -> Iterator[Found]:
    """Find a signal that is sent too late to save (sbatch(1), --signal: up to 60 s earlier)."""
    option = script.options.get("signal")
    request = signal_request(option.value) if option else None
    if option and request and request[2] < _LEAST_SECONDS:
        reason = f"the signal comes {request[2]} s before the end: too late to save"
        yield option.line, reason, f"type --signal={shown(option.value.partition('@')[0])}@120"


def _requeues(script: LintedScript) -> list[Launch]:
    return [one for one in script.commands if one.argv[:2] == ["scontrol", "requeue"]]


def log_truncated(script: LintedScript) -> Iterator[Found]:
    """Find a log that a requeued job truncates, which is the default (sbatch(1), --open-mode)."""
    option, calls = script.options.get("requeue"), _requeues(script)
    # Without any #SBATCH line the options are elsewhere.
    line = option.line if option else calls[0].line if calls and script.options else 0
    mode, output = script.options.value("open-mode").lower(), script.options.value("output")
    if line and not mode.startswith("a") and output != "/dev/null":
        reason = "a job that is requeued overwrites its log, so that earlier output is lost"
        yield line, reason, "type #SBATCH --open-mode=append"


def requeue_revives(script: LintedScript) -> Iterator[Found]:
    """Find a requeue that also restarts a cancelled job (scontrol(1), requeue)."""
    code = (line for line in script.lines if not line.lstrip().startswith("#"))
    if any(_CHECKS_STATE.search(line) for line in code):
        return
    # A function that only the traps for other signals call does not run when a job is cancelled.
    signals = defaultdict[str, set[str]](set)
    for trap in script.traps:
        for word in re.findall(r"[\w.:-]+", trap.body):
            signals[word] |= trap.signals
    called = {one.argv[0] for one in script.commands}
    spared = {name for name, those in signals.items() if not those & {"TERM", "EXIT", "CONT"}}
    harmless = spared - called
    lines = [one.line for one in _requeues(script) if one.command.function not in harmless]
    lines += [t.line for t in script.traps if "TERM" in t.signals and _REQUEUES.search(t.body)]
    reason = "a job that was cancelled is started again, as its state is not checked first"
    state = 'scontrol show job -o "$SLURM_JOB_ID" | grep -qE "JobState=(RUNNING|SIGNALING) "'
    for line in lines:
        yield line, reason, f'if {state}; then scontrol requeue "$SLURM_JOB_ID"; fi'
