"""Fakes of Slurm's commands: scripts that print the output that a test sets."""

import json
import sys
from pathlib import Path

# Prints the jobs of a JSON file as squeue does, by the columns and separators of --Format.
_SQUEUE = """#!{python} -SE
import json, sys
jobs = json.load(open({jobs!r}))
if jobs is None:
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller")
options = dict(one[2:].partition("=")[::2] for one in sys.argv[1:])
if "job" in options:
    wanted, ids = set(options["job"].split(",")), ("JobArrayID", "ArrayJobID", "JobID")
    jobs = [one for one in jobs if {{one[name] for name in ids}} & wanted]
    if not jobs:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
if "user" in options:
    jobs = [one for one in jobs if one["UserID"] == options["user"]]
if "partition" in options:
    jobs = [one for one in jobs if one["Partition"] == options["partition"]]
if "format" in options:
    for job in jobs:
        print(job["JobID"], job["NodeList"])
    sys.exit()
sys.stdout.reconfigure(errors="surrogateescape")  # bytes, as squeue prints, in any locale
columns = [one.partition(":0") for one in options["Format"].split(",")]
for job in jobs:
    print("".join(job[name] + end for name, _, end in columns))
"""


class FakeSlurm:
    """A folder for PATH with fakes of Slurm's commands, which hide the real ones.

    Args:
        folder: the parent folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "fakes"
        self.folder.mkdir()
        self.calls = folder / "calls"
        self._jobs = folder / "jobs.json"
        squeue = _SQUEUE.format(python=sys.executable, jobs=str(self._jobs))
        self._put("squeue", squeue)
        self.jobs()
        for name in ("scontrol", "sbatch", "scancel", "sinfo", "sacct", "sacctmgr"):
            self.command(name, error=f"{name}: Unable to contact slurm controller", code=1)

    @property
    def env(self) -> dict[str, str]:
        """The environment with these commands on the PATH, and without user settings.

        Real commands in /usr/bin, which show up where a test removes a fake, find no Slurm.
        """
        path = f"{self.folder}:/usr/bin:/bin"
        own = {"HOME": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)}
        return {"PATH": path, "SLURM_CONF": "/nowhere/slurm.conf", **own}

    def installed(self, monkeypatch):
        """Set the variables of `env` for a test; return this fake."""
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return self

    def jobs(self, *jobs: dict[str, str] | None) -> None:
        """Set the jobs of squeue, see `job`; a single None if the controller is unreachable."""
        self._jobs.write_text(json.dumps(None if jobs == (None,) else jobs))

    def command(self, name: str, output="", error="", code=0, more="") -> None:
        """Write a command that prints and records its arguments; sh runs `more` before."""
        self._put(
            name,
            f'#!/bin/sh\necho "{name} $*" >> "{self.calls}"\n{more}\n'
            f"cat <<'EOF'\n{output}\nEOF\ncat >&2 <<'EOF'\n{error}\nEOF\nexit {code}\n",
        )

    def _put(self, name: str, text: str) -> None:
        program = self.folder / name
        program.write_text(text)
        program.chmod(0o755)


def job(label: str, **more: str) -> dict[str, str]:
    """Return a running job, by squeue's names of columns; exit_code is a wait status."""
    array, _, task = label.partition("_")
    log = f"{more.get('WorkDir', '/nowhere')}/runs/%x-{'%A_%a' if task else '%j'}.log"
    return {
        "JobArrayID": label, "JobID": array, "ArrayJobID": array, "ArrayTaskID": task or "N/A",
        "UserName": "ada", "UserID": "1000", "Name": "train", "State": "RUNNING",
        "Reason": "None", "RestartCnt": "0", "exit_code": "0", "TimeUsed": "0:12",
        "TimeLeft": "47:48", "StartTime": "2026-11-21T10:00:00", "NumNodes": "2",
        "NodeList": "node[1-2]", "WorkDir": "/nowhere", "STDOUT": log, "Partition": "main",
        "PreemptTime": "N/A", "SubmitTime": "2026-11-21T09:00:00", "TimeLimit": "48:00",
        "Dependency": "(null)", "PriorityLong": "100", "Account": "physics", "QOS": "normal",
        **more,
    }  # fmt: skip
