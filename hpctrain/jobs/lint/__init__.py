"""Check of a batch script for errors, before it is submitted to Slurm.

`lint` accepts any sbatch script. A rule reports only what is certain. It ignores what depends on
other batch scripts, on options on the command line, or on the configuration of the site. The Python
scripts that a job starts are read, if they are there.
"""

from pathlib import Path

from hpctrain.jobs.lint import (
    about_environment,
    about_programs,
    about_shells,
    about_signals,
    about_steps,
)
from hpctrain.jobs.lint.lint_finding import LintFinding
from hpctrain.jobs.lint.linted_script import LintedScript

__all__ = ["LintFinding", "lint"]

_RULES = (
    *about_environment.RULES,
    *about_programs.RULES,
    *about_shells.RULES,
    *about_steps.RULES,
    *about_signals.RULES,
)


def lint(text: str, folder: Path) -> list[LintFinding]:
    """Return the findings of a script, sorted by line.

    Args:
        text: text of the script.
        folder: folder from which the script will be submitted, for relative paths of log files.
    """
    script = LintedScript(text, folder)
    found = {one for rules in _RULES for one in rules(script)}
    return sorted(LintFinding(line, rule, why, tuple(fixes)) for line, rule, why, *fixes in found)
