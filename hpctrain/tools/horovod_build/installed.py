"""The Horovod that is installed for this Python: which build it is, whether it works, a new one."""

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build import check
from hpctrain.tools.horovod_build.commands import Say, ask, run
from hpctrain.tools.horovod_build.recipe import pip

__all__ = ["install", "key", "try_out", "version"]

_CHECK_SECONDS = 240.0  # two imports of torch, from a file system with a cold cache
_INSTALL_SECONDS = 900.0
_SHOWN_LINES = 12


def version() -> str:
    """The installed release; "" where there is none."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return ""


def key() -> str:
    """The key of the wheel it came from, "" where it did not come from this cache.

    pip writes down which file it installed (direct_url.json, PEP 610); the cache's folder is
    named after the key.
    """
    try:
        said = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return Path(unquote(urlsplit(json.loads(said or "{}").get("url", "")).path)).parent.name
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def try_out(env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Import it in two ranks and let them compute a sum over gloo.

    Returns:
        "version", and whether "gloo", "mpi" and "nccl" are built in; or nothing, and what was
        said instead.
    """
    answer = ask([sys.executable, "-P", check.__file__], env, _CHECK_SECONDS)
    code, said = answer or (1, f"two ranks were not ready after {_CHECK_SECONDS:.0f} s")
    lines = said.strip().splitlines() or ["it says nothing"]
    if code == 0:
        for line in reversed(lines):
            if line.startswith("{"):
                return dict(json.loads(line)), ""
    return {}, "".join(f"\n    {line[:300]}" for line in lines[-_SHOWN_LINES:])


def install(wheel: Path, env: Mapping[str, str], log: Path, say: Say) -> None:
    """Put a wheel into this Python's environment, and what it needs where that is missing.

    Raises:
        HpctrainError: pip refuses.
    """
    # A wheel of the same release replaces the one that is there only if it is forced to, and
    # forced with what it needs it would replace that as well.
    for options in (("--force-reinstall", "--no-deps"), ()):
        code = run(pip("install", "-q", *options, str(wheel)), env, log, say, _INSTALL_SECONDS)
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            said = "".join(f"\n    {line[:300]}" for line in lines[-_SHOWN_LINES:])
            raise HpctrainError(
                f"pip did not install {wheel}: exit code {code}{said}",
                f"an environment that may be written, for {sys.executable}",
                "python3 -m venv --system-site-packages VENV, and the hpctrain of that; or "
                f"hpctrain horovod build --wheel-only, and pip install --user {wheel}",
            )
