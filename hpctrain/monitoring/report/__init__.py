"""HTML report of runs on one page: curves, times, ranks, starts and options.

The page needs no script, network or torch, so it can be read in the run directory or sent by mail.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from hpctrain import rundir
from hpctrain.errors import UsageError
from hpctrain.monitoring import drawing

__all__ = ["write"]

# A report and its PNGs have their mark within these first bytes.
_HEAD = 2048


def write(paths: Sequence[str], output: str | None = None) -> tuple[Path, list[Path]]:
    """Write the page, and its figures as PNGs into a folder of the same name beside it.

    Args:
        paths: run directories; several runs are compared.
        output: file to write (default: report.html, in the run directory if there is only one).

    Returns:
        Paths of the page and of the figures.

    Raises:
        UsageError: there is no run, a package for drawing is missing, the files cannot be written,
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
    _refuse_other_file(target)
    if not os.access(target.parent, os.W_OK) or not target.parent.is_dir():
        raise _unwritable(f"{target.parent} cannot be written to")
    shown = page.sections(runs)
    drawn = {figure.name: figure.png for section in shown for figure in section.figures}
    try:
        figures = _images(target.with_suffix(""), drawn)
        rundir.replace(target, page.render(runs, shown))
    except OSError as error:
        raise _unwritable(f"the report cannot be written: {error}") from None
    return target, figures


def _unwritable(found: str) -> UsageError:
    return UsageError("HT654", found, "a folder that this user may write to", "--output FILE.html")


def _refuse_other_file(path: Path) -> None:
    if os.path.lexists(path) and not _is_report(path):
        raise _other_file(path)


def _other_file(path: Path) -> UsageError:
    return UsageError(
        "HT654",
        f"{path} exists and is no report",
        "a new name, or the name of a report",
        "--output FILE.html",
    )


def _is_report(path: Path) -> bool:
    """Return whether a file is part of a report; links, pipes and the like never are."""
    from hpctrain.monitoring.report.figures import MARK

    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with path.open("rb") as file:
            return MARK.encode() in file.read(_HEAD)
    except OSError:
        return False


def _images(folder: Path, images: dict[str, bytes]) -> list[Path]:
    """Write the figures and remove other figures of an earlier report.

    Raises:
        UsageError: a file that is no report has one of the names.
    """
    if folder.is_symlink():
        raise _other_file(folder)
    written = {folder / f"{name}.png": image for name, image in images.items()}
    for path in written:
        _refuse_other_file(path)
    for path, image in written.items():
        rundir.replace(path, image)
    for path in folder.glob("*.png"):
        if path not in written and _is_report(path):
            path.unlink()
    return list(written)
