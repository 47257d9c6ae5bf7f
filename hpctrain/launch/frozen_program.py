"""Program of a job, with its code from a snapshot in place of the project's folder.

Only code comes from the snapshot: the script, the folders in `sys.path`, an editable install of the
project. The working directory, data and outputs are where they were.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from hpctrain.cluster import env_vars
from hpctrain.rundir.frozen_code import Snapshot

__all__ = ["from_snapshot"]


def from_snapshot(
    command: Sequence[str], snapshot: Snapshot, folder: Path, env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of the ranks that run the code of a snapshot.

    Args:
        command: program and arguments; only those of Python are changed.
        snapshot: record of the snapshot.
        folder: folder with its files.
        env: environment of the ranks.
    """
    words = list(command)
    is_python = os.path.basename(words[0]).startswith("python")
    first: list[str] = []
    if is_python and len(words) > 2 and words[1] == "-m":
        # Python would look for modules in the working directory first.
        words.insert(1, "-P")
        first = [os.getcwd()]
    elif is_python and len(words) > 1:
        script = snapshot.place_of(words[1], folder)
        words[1] = str(script) if script is not None else words[1]
    given = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = []
    for entry in (*first, *given, *snapshot.path, *_editable(Path(snapshot.root))):
        place = snapshot.place_of(entry, folder)
        path += [str(place)] if place is not None else []
        path += [entry] if entry in given else []
    environ = {**env, env_vars.COMMIT: snapshot.commit + "-dirty" * snapshot.changed}
    if path:
        environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    return words, environ


def _editable(root: Path) -> Iterator[str]:
    """Yield the folders of editable installs in a project.

    Source: PEP 610, direct_url.json.
    """
    for distribution in metadata.distributions():
        try:
            record = json.loads(distribution.read_text("direct_url.json") or "{}")
        except ValueError:
            continue
        if not record.get("dir_info", {}).get("editable"):
            continue
        place = Path(unquote(urlparse(record.get("url", "")).path))
        if place.is_relative_to(root):
            yield str(place / "src" if (place / "src").is_dir() else place)
