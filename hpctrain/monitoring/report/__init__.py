"""HTML report of runs on one page: curves, step times, launches and configuration.

The page needs no script, network or torch, so it can be read in the run directory or sent by mail.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path

from hpctrain import rundir
from hpctrain.errors import UsageError

__all__ = ["write"]


def write(paths: Sequence[str], output: str | None = None) -> Path:
    """Write the page and return its path.

    Args:
        paths: run directories; several runs are compared.
        output: file to write (default: report.html, in the run directory if there is only one).

    Raises:
        UsageError: there is no run, matplotlib or jinja2 is missing, the page cannot be written,
            or a file that is not a report has the name.
    """
    for package in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UsageError(
                "HT651.package-missing", package=package, extra="report", error=error
            ) from None
    from hpctrain.monitoring.report import page, runs

    target = Path(output or (Path(paths[0]) / "report.html" if len(paths) == 1 else "report.html"))
    if target.suffix.lower() not in (".html", ".htm"):
        raise UsageError("HT654.not-html", target=target)
    recorded = runs.read(paths)
    try:
        # `replace` would create the folder of a misspelt name.
        target.parent.stat()
        if target.exists() and not (target.is_file() and page.MARK.encode() in target.read_bytes()):
            raise FileExistsError(f"{target} exists and is not a report")
        rundir.replace(target, page.render(recorded))
    except OSError as error:
        raise UsageError("HT654.cannot-write", error=error) from None
    return target
