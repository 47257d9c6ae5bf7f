"""Write tables and pictures of the pages from result files, or report which differ from them.

    python benchmarks/pages [--check]

A table is in a page between `<!-- results: NAME -->` and `<!-- end of results -->`; NAME is a key
of `tables.TABLES`. The rest of a page is written manually and contains no measured figure. The
pictures of docs/benchmarks.md are those of `charts.CHARTS`; matplotlib draws them.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import blocks
import charts

TOP = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    """Write or compare the pages; return 1 if a page differs with --check."""
    parser = argparse.ArgumentParser(
        prog=blocks.COMMAND, description="Write tables and pictures of the pages."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    check = parser.parse_args().check
    pages = blocks.differing(TOP)
    pictures = {charts.path(name, TOP): name for name in charts.differing(TOP)}
    for path in (*pages, *pictures):
        print(f"{path.relative_to(TOP)}: {'differs from its results' if check else 'written'}")
        if not check:
            content = pages[path].encode() if path in pages else charts.draw(pictures[path], TOP)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if check and (pages or pictures):
        print(f"fix: {blocks.COMMAND}")
    return bool(check and (pages or pictures))


if __name__ == "__main__":
    sys.exit(main())
