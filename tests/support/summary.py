"""Print a summary of a JUnit file of pytest: passed, failed, left out, and the reasons.

python tests/support/summary.py tests.xml
"""

import sys
import xml.etree.ElementTree as Xml
from collections import Counter


def main() -> None:
    """Print the summary of the file that the command line names."""
    seconds, counts, lines = 0.0, Counter(), []
    for case in Xml.parse(sys.argv[1]).iter("testcase"):
        seconds += float(case.get("time", 0))
        result = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        tag = None if result is None else result.tag
        kind = {None: "passed", "skipped": "left out"}.get(tag, "failed")
        counts[kind] += 1
        if result is not None:
            reason = (result.get("message") or "").strip().partition("\n")[0]
            lines.append(f"{kind}: {case.get('classname')}::{case.get('name')}: {reason}")
    print("\n".join(sorted(lines)))
    names = ("passed", "failed", "left out")
    print(", ".join(f"{counts[name]} {name}" for name in names) + f", {seconds:.0f} s of tests")


if __name__ == "__main__":
    main()
