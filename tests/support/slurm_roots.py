"""Debian roots with other versions of Slurm than the machine's, for the hosts of the test cluster.

    python tests/support/slurm_roots.py 24.11     # makes the root if it is not there; prints it

A host of the cluster has such a root as its `/`, with the machine's folders that hold no system
(/home, /root, /run, /tmp and so on) in it, so that it sees the same files. The machine's Python
runs there, because the C library of a newer Debian runs what an older one compiled. So do the
libraries of the machine's Open MPI, which the Horovod of the tests was built with.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The suite of Debian that has a version, what apt has to be told for it, and more packages.
SUITES = {
    "24.11": ("trixie", (), ()),
    "newest": ("sid", ('Acquire::Check-Valid-Until "false"',), ("apptainer",)),
}
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge"),
    *("slurmdbd", "slurm-wlm-mysql-plugin"),
    *("bsdutils", "mount", "hostname", "iproute2", "procps", "git", "environment-modules"),
    *("openssh-server", "openssh-client", "openmpi-bin", "mpich"),
    # What the machine's Python and Open MPI need.
    *("libffi8", "libssl3", "libsqlite3-0", "libreadline8", "liblzma5", "libbz2-1.0", "libexpat1"),
    *("libstdc++6", "libhwloc15", "libevent-core-2.1-7", "libevent-pthreads-2.1-7"),
)
# The rest of the machine's folders at the top is shared with the hosts.
SYSTEM = {
    "bin",
    "boot",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "lost+found",
    "sbin",
    "usr",
    "var",
}
# The packages of a root; one with other packages is made anew.
LIST = Path("etc/hpctrain-packages")
MPI = ("libmpi.so.40", "libmpi_cxx.so.40", "libopen-rte.so.40", "libopen-pal.so.40")


def root(version: str) -> Path:
    """Return the root with a version of Slurm, after it was made if it was not there.

    Raises:
        KeyError: no suite is known for the version.
        OSError: mmdebstrap is not installed, or fails.
    """
    suite, options, more = SUITES[version]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "hpctrain-tests" / f"slurm-{version}"
    packages = " ".join((*PACKAGES, *more))
    if (place / LIST).is_file() and (place / LIST).read_text() == packages:
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    folder.chmod(0o755)
    command = [
        "mmdebstrap",
        "--variant=apt",
        "--quiet",
        f"--include={packages.replace(' ', ',')}",
    ]
    command += [f"--aptopt={option}" for option in options]
    try:
        done = subprocess.run([*command, suite, str(folder), mirror()], check=False)
        if done.returncode:
            raise OSError(f"mmdebstrap ended with {done.returncode}")
        complete(folder)
        (folder / LIST).write_text(packages)
        folder.rename(place)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return place


def complete(folder: Path) -> None:
    """Add mount points and the machine's Open MPI."""
    for name in shared():
        (folder / name).mkdir(exist_ok=True)
    (folder / "etc" / "hosts").touch()
    libraries = Path("/usr/lib/x86_64-linux-gnu")
    for name in MPI:
        if (libraries / name).exists():
            shutil.copy(libraries / name, folder / "usr" / "local" / "lib" / name)
    subprocess.run(["chroot", str(folder), "/sbin/ldconfig"], check=True)


def shared() -> list[str]:
    """Return the machine's folders at the top that the hosts see as well."""
    return sorted(
        path.name for path in Path("/").iterdir() if path.is_dir() and path.name not in SYSTEM
    )


def mirror() -> str:
    """Return the address of the archive from which this machine gets its packages."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    found = re.search(r"^(?:URIs:|deb(?: \[.*\])?)\s+(\S+/debian)/?\s", text, re.MULTILINE)
    if found is None:
        raise OSError("apt's sources name no archive of Debian")
    return found[1]


if __name__ == "__main__":
    print(root(sys.argv[1]))
