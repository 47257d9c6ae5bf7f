"""Run programs on the test cluster, and record the environments of their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments import keep, record
from environments.parts import BIN, INTELMPI, OPENMPI5, parts, versions
from environments.starts import Program, Start
from environments.table import PROGRAMS

if TYPE_CHECKING:
    from cluster import Cluster

CLUSTER_SCRIPT = Path(__file__).parents[1] / "cluster.py"

# Runs the command on the other host of the cluster, with the environment of a login there.
SSH = """\
#!/bin/bash
host=
while :; do
    case "$1" in
        -[xqnt]) shift ;;
        -?) shift 2 ;;
        -*) shift ;;
        *) [ -z "$host" ] || break; host=$1; shift ;;
    esac
done
exec env -i PATH="$PATH" HOME="$HOME" {mark}=1 HPCTRAIN_TEST_CLUSTER={parent} \\
    ${{PYTHONPATH:+PYTHONPATH=$PYTHONPATH}} \\
    {python} {script} run --name {name} --host "$host" -- sh -c "$*"
"""

# The variable with the rank.
RANK = {
    "slurm": "SLURM_PROCID",
    "hpctrain": "HPCTRAIN_RANK",
    "torchrun": "RANK",
    "horovodrun": "HOROVOD_RANK",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "hydra": "PMI_RANK",
    "submitit": "SUBMITIT_LOCAL_GLOBALID",
    "env": "RANK",
    "prterun": "PMIX_RANK",
}


class CaptureError(RuntimeError):
    """A start has not the layout that its command line sets."""


Documents = dict[str, dict[str, Any] | CaptureError]


def capture(wanted: Iterable[str], cluster: Cluster, folder: Path) -> Documents:
    """Run the programs that make the wanted starts; return their documents.

    Args:
        wanted: the names of starts whose programs have all their parts.
        cluster: a cluster that is idle.
        folder: an empty folder.

    Returns:
        For each start its document, or the error.
    """
    wanted = set(wanted)
    programs = [program for program in PROGRAMS if wanted & {one.name for one in program.starts}]
    _separate_folders_for_pmix(programs, cluster)
    with_ = versions(cluster)
    found: Documents = {}
    with ThreadPoolExecutor(4) as pool:
        for documents in pool.map(lambda one: _run(one, cluster, folder, with_), programs):
            found.update(documents)
    return {name: document for name, document in found.items() if name in wanted}


def _separate_folders_for_pmix(programs: Sequence[Program], cluster: Cluster) -> None:
    """Make a folder that the hosts do not share, as Slurm's plugin needs; they share /tmp."""
    folder = _pmix_folder(cluster)
    if any("pmix" in program.needs for program in programs):
        folder.mkdir(exist_ok=True)
        for host in ("node1", "node2"):
            mount = 'mountpoint -q "$0" || mount -t tmpfs tmpfs "$0"'
            cluster.run(["sh", "-c", mount, str(folder)], host, check=True)


def _pmix_folder(cluster: Cluster) -> Path:
    return cluster.directory / "pmix"


def _run(program: Program, cluster: Cluster, folder: Path, with_: Mapping[str, str]) -> Documents:
    """Run one program in its own folder."""
    work = folder / program.name
    _lay_out(program, work, cluster)
    argv = program.typed.split() or ["bash", "job.sh"]
    if argv[0] == "sbatch":
        argv[1:1] = ["--output=job.log"]
    try:
        with (work / "typed.log").open("w") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            env = _environ(program, work, cluster)
            cluster.run(argv, program.host, cwd=work, env=env, timeout=300, **streams)
        deadline = time.monotonic() + 300 if program.in_background else 0
        while not _complete(program, work) and time.monotonic() < deadline:
            time.sleep(0.1)
    except subprocess.TimeoutExpired as error:
        (work / "error.log").write_text(str(error))
    documents: Documents = {}
    for start in program.starts:
        try:
            documents[start.name] = {
                "launcher": start.launcher,
                "how": program.how(start),
                "with": ", ".join(with_[part] for part in parts(program, start)),
                "captured": date.today().isoformat(),
                "layout": list(start.layout),
                "ranks": _ranks(start, work, cluster),
            }
        except CaptureError as error:
            output = "".join(log.read_text(errors="replace") for log in sorted(work.glob("*.log")))
            documents[start.name] = CaptureError(f"{error}\n{output}")
    return documents


def _lay_out(program: Program, work: Path, cluster: Cluster) -> None:
    """Make the folder, with all files that the program reads."""
    (work / "bin").mkdir(parents=True)
    (work / "tmp").mkdir()
    files = {
        "bin/ssh": SSH.format(
            mark=record.MARK,
            parent=cluster.directory.parent,
            name=cluster.directory.name,
            python=sys.executable,
            script=CLUSTER_SCRIPT,
        ),
        "train.py": Path(record.__file__).read_text(),
        "job.sh": f"#!/bin/bash\n{program.script}",
        **program.files,
    }
    for name, text in files.items():
        (work / name).write_text(text)
    (work / "bin" / "ssh").chmod(0o755)


def _environ(program: Program, work: Path, cluster: Cluster) -> dict[str, str]:
    """Return the environment of the shell in which a program is typed."""
    site = cluster.environ()
    env = {
        "PATH": f"{work}/bin:{BIN}:{site['PATH']}",
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": "C.UTF-8",
        "SLURM_CONF": site["SLURM_CONF"],
        "OPENMPI5": OPENMPI5,
        "INTELMPI": INTELMPI,
        "HOST_FOLDER": str(_pmix_folder(cluster)),
        record.MARK: "1",
    }
    if not {"openmpi", "openmpi5", "pmix"} & set(program.needs):
        env["TMPDIR"] = str(work / "tmp")
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return env


def _records(start: Start, work: Path) -> list[Path]:
    return sorted((work / "ranks" / start.name).glob("*.json"))


def _complete(program: Program, work: Path) -> bool:
    return all(len(_records(start, work)) >= len(start.layout) for start in program.starts)


def _ranks(start: Start, work: Path, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the records of the ranks of one start, by rank, with their true places.

    Raises:
        CaptureError: not every rank is there, once and on its host.
    """
    records = [json.loads(path.read_text()) for path in _records(start, work)]
    by_rank = {_rank(entry, start): entry for entry in records}
    if sorted(by_rank) != list(range(len(start.layout))) or len(records) != len(by_rank):
        places = sorted((str(_rank(entry, start)), entry["host"]) for entry in records)
        raise CaptureError(f"{start.name}: not each of {start.layout} once: {places}")
    neutral = {f"train.py {start.name}": "train.py", **_neutral(work, cluster)}
    ranks = []
    for rank, entry in sorted(by_rank.items()):
        if not start.simulated and entry["host"] != start.layout[rank]:
            raise CaptureError(f"{start.name}: rank {rank} is on {entry['host']}")
        ranks.append(
            {
                "world": start.known_world(rank),
                **({"argv": entry["argv"]} if entry["argv"] else {}),
                "parents": entry["parents"],
                "env": keep.kept(entry["env"], neutral),
            }
        )
    return ranks


def _rank(entry: Mapping[str, Any], start: Start) -> int:
    if start.launcher == "none":
        return 0
    text = entry["env"].get(RANK[start.launcher], "")
    return int(text) if text.isdecimal() else -1


def _neutral(work: Path, cluster: Cluster) -> dict[str, str]:
    """Return replacements for this machine's folders, inner folders first."""
    return {
        str(work / "tmp"): "/tmp",
        str(work): keep.WORK,
        str(_pmix_folder(cluster)): "/tmp",
        **{f"{cluster.directory}/node{n}/spool": "/var/spool/slurmd" for n in range(1, 5)},
        str(BIN.parent): f"{keep.HOME}/.venv",
        **({OPENMPI5: "/opt/openmpi"} if OPENMPI5 else {}),
        **({INTELMPI: "/opt/intel/mpi"} if INTELMPI else {}),
    }
