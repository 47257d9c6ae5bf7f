"""Horovod of this Python: version and origin, test, and installation of a wheel."""

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build import check
from hpctrain.tools.horovod_build.build_commands import PrintLine, ask, run
from hpctrain.tools.horovod_build.source import VERSION
from hpctrain.tools.horovod_build.wheel_build import pip

__all__ = ["install", "key", "try_out", "version"]

_CHECK_SECONDS = 240.0  # for two imports of torch, from a file system with a cold cache
_INSTALL_SECONDS = 900.0
_SHOWN_LINES = 12


def version() -> str:
    """Return the installed release; "" if Horovod is not installed."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return ""


def key() -> str:
    """Return the key of the installed wheel, which is the name of its folder in the cache.

    pip records the path of a file that it installs (direct_url.json, PEP 610). The result is "" for
    a Horovod from elsewhere: a package index, a repository, or a wheel outside of a cache.
    """
    try:
        origin = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        path = Path(unquote(urlsplit(json.loads(origin or "{}").get("url", "")).path))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
    cached = path.parent.name.startswith(f"{VERSION}-") and path.parents[1].name == "horovod"
    return path.parent.name if cached else ""


def try_out(env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Import Horovod in two ranks, and let them compute a sum over gloo.

    Returns:
        Facts and "": "version", and whether "gloo", "mpi" and "nccl" are built in. After a failure,
        no facts and the last lines of the output.
    """
    answer = ask([sys.executable, "-P", check.__file__], env, _CHECK_SECONDS)
    code, output = answer or (1, f"two ranks were not ready after {_CHECK_SECONDS:.0f} s")
    lines = output.strip().splitlines() or ["no output"]
    if code == 0:
        for line in reversed(lines):
            if line.startswith("{"):
                return dict(json.loads(line)), ""
    return {}, "".join(f"\n    {line[:300]}" for line in lines[-_SHOWN_LINES:])


def install(wheel: Path, env: Mapping[str, str], log: Path, print_line: PrintLine) -> None:
    """Install a wheel for this Python, and its requirements that are missing.

    Raises:
        HpctrainError: pip fails.
    """
    # pip replaces an installation of the same release only with --force-reinstall. Without
    # --no-deps that would reinstall the requirements too, so a second call adds the missing ones.
    for options in (("--force-reinstall", "--no-deps"), ()):
        code = run(
            pip("install", "-q", *options, str(wheel)), env, log, print_line, _INSTALL_SECONDS
        )
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            excerpt = "".join(f"\n    {line[:300]}" for line in lines[-_SHOWN_LINES:])
            raise HpctrainError(
                "HT917",
                f"pip did not install {wheel}: exit code {code}{excerpt}",
                f"write access to the environment of {sys.executable}",
                "python3 -m venv --system-site-packages VENV, and an hpctrain in it",
                f"hpctrain horovod build --wheel-only, and pip install --user {wheel}",
            )
