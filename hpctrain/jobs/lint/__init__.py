"""Check of a batch script for errors, before it is submitted to Slurm.

`lint` accepts any sbatch script. A rule reports only what is certain. It ignores what depends on
other scripts, on options on the command line, or on the configuration of the site.
"""

from pathlib import Path

from hpctrain.jobs.lint import (
    about_directives,
    about_environment,
    about_hosts,
    about_signals,
    about_steps,
)
from hpctrain.jobs.lint.lint_finding import LintFinding
from hpctrain.jobs.lint.linted_script import load

__all__ = ["LintFinding", "lint"]

# A rule is a function of the script that yields findings; its docstring names where it is written.
RULES = (
    *about_directives.RULES,
    *about_steps.RULES,
    *about_hosts.RULES,
    *about_signals.RULES,
    *about_environment.RULES,
)


def lint(text: str, folder: Path) -> list[LintFinding]:
    """Return the findings of a script, sorted by line.

    Args:
        text: text of the script.
        folder: folder from which the script will be submitted, for relative paths of log files.
    """
    carriage = text.find("\r\n")
    findings = []
    if carriage >= 0:
        line = text.count("\n", 0, carriage) + 1
        findings.append(
            LintFinding(
                line,
                "dos-line-ends",
                "lines end in \\r\\n, and sbatch refuses the script",
                ("sed -i 's/\\r$//' SCRIPT",),
            )
        )
    script = load(text.replace("\r\n", "\n"), folder)
    findings += [finding for rule in RULES for finding in rule(script)]
    return sorted(set(findings))
