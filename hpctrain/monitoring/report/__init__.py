"""HTML report of runs on one page: curves, times, ranks, starts and options.

The page needs no script, network or torch, so it can be read in the run directory or sent by mail.
"""

from collections.abc import Sequence
from pathlib import Path

from hpctrain import rundir
from hpctrain.errors import UsageError
from hpctrain.monitoring import drawing

__all__ = ["write"]


def write(paths: Sequence[str], output: str | None = None) -> Path:
    """Write the page and return its path.

    Args:
        paths: run directories; several runs are compared.
        output: file to write (default: report.html, in the run directory if there is only one).

    Raises:
        UsageError: there is no run, a package for drawing is missing, the page cannot be written,
            or a file that is no report has the name.
    """
    drawing.need("report", "jinja2", "matplotlib.figure")
    from hpctrain.monitoring.report import page, run_reader

    target = Path(output or (Path(paths[0]) / "report.html" if len(paths) == 1 else "report.html"))
    if target.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            "HT654", f"--output {target}", "a name that ends in .html", f"--output {target}.html"
        )
    runs = run_reader.read(paths)
    if target.exists() and not (target.is_file() and page.MARK.encode() in target.read_bytes()):
        raise UsageError(
            "HT654",
            f"{target} exists and is no report",
            "a new name, or the name of a report",
            "--output FILE.html",
        )
    try:
        # First, because `replace` would create the folder of a misspelt name.
        target.parent.stat()
        rundir.replace(target, page.render(runs))
    except OSError as error:
        raise UsageError(
            "HT654",
            f"the report cannot be written: {error}",
            "a folder that this user may write to",
            "--output FILE.html",
        ) from None
    return target
