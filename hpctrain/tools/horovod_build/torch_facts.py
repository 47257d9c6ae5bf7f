"""Facts of the torch that Horovod has to fit, read in a separate process."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build.build_commands import ask

__all__ = ["Torch", "ask_torch", "cxx_standard"]

_IMPORT_SECONDS = 180.0  # on a file system with many small files and a cold cache
_ASK = """
import importlib.util, json, os, torch
nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
    "include": os.path.join(os.path.dirname(torch.__file__), "include"),
    "nccl": list(nccl.submodule_search_locations)[0] if nccl else None,
}))
"""
_REQUIRED = re.compile(r"__cplusplus\s*<\s*(20\d\d)\d\dL")
_STANDARDS = {2014: 14, 2017: 17, 2020: 20, 2023: 23}
_NEWEST_REQUIRED = 20


@dataclass(frozen=True, slots=True)
class Torch:
    """Facts of torch on which a build depends.

    Attributes:
        version: full version, such as "2.15.0+cu132".
        cuda: version of CUDA with which torch was built; None in other builds.
        cxx11_abi: whether std::string and std::list are those of C++11 (GCC has two ABIs).
        include: folder with torch's headers.
        nccl: folder of the Python package with torch's NCCL; None if it is not installed.
    """

    version: str
    cuda: str | None
    cxx11_abi: bool
    include: Path
    nccl: Path | None


def ask_torch(env: Mapping[str, str]) -> Torch:
    """Return the facts of the torch that is installed for this Python.

    Raises:
        HpctrainError: torch is missing, or its import fails.
    """
    answer = ask([sys.executable, "-P", "-c", _ASK], env, _IMPORT_SECONDS)
    lines = (answer[1] if answer else f"nothing in {_IMPORT_SECONDS:.0f} s").strip().splitlines()
    try:
        facts = json.loads(lines[-1])
        return Torch(
            version=facts["version"],
            cuda=facts["cuda"],
            cxx11_abi=facts["cxx11_abi"],
            include=Path(facts["include"]),
            nccl=Path(facts["nccl"]) if facts["nccl"] else None,
        )
    except (ValueError, TypeError, KeyError, IndexError):
        found = f"import torch fails: {lines[-1] if lines else 'no output'}"
        fix = f"{sys.executable} -m pip install torch"
        raise HpctrainError(
            "HT910", found, "an installed torch, for which Horovod is built", fix
        ) from None


def cxx_standard(include: Path) -> int:
    """Return the C++ standard that torch's headers require, such as 17.

    The headers refuse older standards with `#error`. If they name none, the newest standard that
    any torch requires is returned.
    """
    try:
        header = (include / "ATen" / "ATen.h").read_text(errors="replace")
    except OSError:
        return _NEWEST_REQUIRED
    required = [_STANDARDS.get(int(year), _NEWEST_REQUIRED) for year in _REQUIRED.findall(header)]
    return max(required, default=_NEWEST_REQUIRED)
