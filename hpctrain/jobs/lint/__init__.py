"""Check of a batch script for errors, before it is submitted to Slurm.

`lint` accepts any sbatch script. A rule reports only what is certain. It ignores what depends on
other scripts, on options on the command line, or on the configuration of the site.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.jobs.lint import (
    about_directives,
    about_environment,
    about_signals,
    about_steps,
)
from hpctrain.jobs.lint.lint_finding import Found, LintFinding
from hpctrain.jobs.lint.linted_script import LintedScript

__all__ = ["RULES", "LintFinding", "lint"]

#: The rules by name. Each yields line, reason and fixes; its docstring names where it is written.
RULES: dict[str, Callable[[LintedScript], Iterator[Found]]] = {
    # The #SBATCH lines.
    "no-shebang": about_directives.no_shebang,
    "dos-line-ends": about_directives.dos_line_ends,
    "directive-refused": about_directives.directive_refused,
    "directive-ignored": about_directives.directive_ignored,
    "directive-variable": about_directives.directive_variable,
    "directive-cut": about_directives.directive_cut,
    "unknown-option": about_directives.unknown_option,
    "unknown-pattern": about_directives.unknown_pattern,
    "option-twice": about_directives.option_twice,
    "log-folder-missing": about_directives.log_folder_missing,
    "memory-twice": about_directives.memory_twice,
    "memory-in-megabytes": about_directives.memory_in_megabytes,
    "export-cut": about_directives.export_cut,
    # Programs, and their hosts, tasks, CPUs and GPUs.
    "missing-srun": about_steps.missing_srun,
    "tasks-and-gpus": about_steps.tasks_and_gpus,
    "several-agents": about_steps.several_agents,
    "hosts-apart": about_steps.hosts_apart,
    "cpus-dropped": about_steps.cpus_dropped,
    "no-kill-on-bad-exit": about_steps.no_kill_on_bad_exit,
    "gpu-isolation": about_steps.gpu_isolation,
    # The end of a job.
    "signal-not-to-shell": about_signals.signal_not_to_shell,
    "signal-without-trap": about_signals.signal_without_trap,
    "trap-waits": about_signals.trap_waits,
    "trap-lost": about_signals.trap_lost,
    "run-without-exec": about_signals.run_without_exec,
    "no-wait": about_signals.no_wait,
    "no-time-to-save": about_signals.no_time_to_save,
    "no-time-to-train": about_signals.no_time_to_train,
    "log-truncated": about_signals.log_truncated,
    "requeue-revives": about_signals.requeue_revives,
    # Quotes, variables and paths.
    "open-quote": about_environment.open_quote,
    "export-none": about_environment.export_none,
    "sbatch-in-job": about_environment.sbatch_in_job,
    "manual-rank": about_environment.manual_rank,
    "rank-of-batch-shell": about_environment.rank_of_batch_shell,
    "manual-gpus": about_environment.manual_gpus,
    "fixed-port": about_environment.fixed_port,
    "secret-in-script": about_environment.secret_in_script,
    "script-path": about_environment.script_path,
}


def lint(text: str, folder: Path) -> list[LintFinding]:
    """Return the findings of a script, sorted by line.

    Args:
        text: text of the script.
        folder: folder from which the script will be submitted, for relative paths of log files.
    """
    script = LintedScript(text, folder)
    return sorted(
        {
            LintFinding(line, name, reason, tuple(fixes))
            for name, rule in RULES.items()
            for line, reason, *fixes in rule(script)
        }
    )
