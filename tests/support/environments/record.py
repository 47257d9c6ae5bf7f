"""The train.py of the ranks: records the process."""

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

# A variable of all processes of a start.
MARK = "HPCTRAIN_CAPTURE"


def parents() -> list[str]:
    """Return the titles of the ancestors that belong to the start."""
    found: list[str] = []
    pid = os.getpid()
    while True:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid <= 1:
            return found
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        marked = f"{MARK}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if marked or title[0].startswith("slurmstepd"):
            words = [word.rpartition("/")[2] for word in title[:3] if len(word) < 80]
            # A virtual environment's programs name python or python3 in their first line.
            words[0] = words[0].replace("python3", "python")
            found.append(title[0] if title[0].startswith("slurmstepd") else " ".join(words))
        if not marked:
            return found


def record(name: str, arguments: Sequence[str] = ()) -> None:
    """Write one file to the folder of the start."""
    seen = {
        "host": socket.gethostname(),
        "argv": list(arguments),
        "parents": parents(),
        "env": dict(os.environ),
    }
    folder = Path(__file__).parent / "ranks" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{seen['host']}-{os.getpid()}.part"
    path.write_text(json.dumps(seen))
    path.rename(path.with_suffix(".json"))


if __name__ == "__main__":
    record(sys.argv[-1], sys.argv[1:-1])
