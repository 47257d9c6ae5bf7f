"""One page that shows how runs went: curves, times, ranks, starts and options.

It needs no script, no network and no torch: it is read where the run directory is, or sent by mail.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain import drawing, rundir
from hpctrain.errors import UsageError

__all__ = ["write"]

# A page of one's own says so within its first bytes, and a PNG too.
_HEAD = 2048


def write(paths: Sequence[str], output: str | None = None) -> tuple[Path, list[Path]]:
    """Write the page, and its figures as PNGs into a folder of its name beside it.

    Args:
        paths: run directories; several are compared.
        output: the file (default: report.html, in the run directory where there is one).

    Returns:
        The page and the figures.

    Raises:
        UsageError: there is no run, or what draws is not installed, or the place cannot be
            written, or a file that is no report has it.
    """
    drawing.need("report", "jinja2", "matplotlib.figure")
    from hpctrain.report import page, reading

    target = Path(output or (Path(paths[0]) / "report.html" if len(paths) == 1 else "report.html"))
    if target.suffix.lower() not in (".html", ".htm"):
        raise UsageError(
            f"--output {target}", "a name that ends in .html", f"--output {target}.html"
        )
    runs = reading.read(paths)
    _refuse_strangers(target)
    if not os.access(target.parent, os.W_OK) or not target.parent.is_dir():
        raise _unwritable(f"{target.parent} cannot be written to")
    shown = page.sections(runs)
    drawn = {one.name: one.png for section in shown for one in section.figures}
    try:
        figures = _images(target.with_suffix(""), drawn)
        rundir.replace(target, page.render(runs, shown))
    except OSError as error:
        raise _unwritable(f"the report cannot be written: {error}") from None
    return target, figures


def _unwritable(found: str) -> UsageError:
    return UsageError(found, "a folder that this user may write to", "--output FILE.html")


def _refuse_strangers(path: Path) -> None:
    if path.exists() and not _own(path):
        raise UsageError(
            f"{path} is there, and no report",
            "a new name, or that of a report",
            "--output FILE.html",
        )


def _own(path: Path) -> bool:
    """Whether a file was written here."""
    from hpctrain.report.figures import MARK

    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(_HEAD)
    except OSError:
        return False


def _images(folder: Path, images: dict[str, bytes]) -> list[Path]:
    """Write the figures, and remove those of an earlier report.

    Raises:
        UsageError: a file of somebody else has one of the names.
    """
    written = [folder / f"{name}.png" for name in images]
    for path in written:
        _refuse_strangers(path)
    if folder.is_dir():
        for path in folder.glob("*.png"):
            if _own(path):
                path.unlink()
    if written:
        folder.mkdir(parents=True, exist_ok=True)
    for path, image in zip(written, images.values(), strict=True):
        path.write_bytes(image)
    return written
