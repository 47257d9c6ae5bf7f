"""Find and replace the tables of a page; no torch."""

import re
from pathlib import Path

from tables import TABLES

__all__ = ["COMMAND", "PAGES", "differing", "names", "renew"]

COMMAND = "python benchmarks/pages"
PAGES = (
    "README.md",
    "benchmarks/README.md",
    "docs/errors.md",
    "docs/ported.md",
    "docs/programs.md",
    "docs/reliability.md",
    "docs/reproducibility.md",
    "docs/status.md",
)

_BLOCK = re.compile(r"<!-- results: (.+?) -->\n.*?<!-- end of results -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:results:.*?|end of results) -->")


def renew(page: str, top: Path) -> str:
    """Return a page with new tables.

    Args:
        page: text of the page.
        top: folder of the repository, which contains the results.

    Raises:
        ValueError: a mark has no matching mark, or names an unknown table.
    """
    if unknown := names(page) - set(TABLES):
        raise ValueError(f"no table has the name {', '.join(sorted(unknown))}")
    if len(_MARK.findall(page)) != 2 * len(_BLOCK.findall(page)):
        raise ValueError("a block of results begins or ends without its other mark")
    return _BLOCK.sub(
        lambda found: (
            f"<!-- results: {found[1]} -->\n\n{TABLES[found[1]](top)}\n\n<!-- end of results -->"
        ),
        page,
    )


def names(page: str) -> set[str]:
    """Return the names of a page's tables."""
    return {found[1] for found in _BLOCK.finditer(page)}


def differing(top: Path) -> dict[Path, str]:
    """Return the pages that differ from their results, each with its correct text."""
    found = {}
    for path in (top / name for name in PAGES):
        page = path.read_text()
        if (new := renew(page, top)) != page:
            found[path] = new
    return found
