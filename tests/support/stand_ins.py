"""A machine without Slurm for batch scripts: stand-ins that record their calls.

The records have the words and the environment of each call, byte for byte.
"""

import os
import subprocess
import tarfile

from hpctrain.jobs.script import render

# Runs steps that copy or remove files; of other steps, records only the words and variables.
RECORD = """#!/bin/sh
printf '%s\\0' "${{0##*/}}" "$@" >{folder}/$$.argv
cat /proc/$$/environ >{folder}/$$.environ
case " $* " in *" bash -c "*|*" rm -rf -- "*)
    while [ "${{1#--}}" != "$1" ]; do shift; done
    exec "$@"
esac
exit ${{CODE:-0}}
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
"show hostnames") printf 'node1\\nnode2\\nnode3\\n' ;;
"show job") # the array task in the environment, if any
    index="${SLURM_ARRAY_TASK_ID:+ ArrayJobId=$SLURM_ARRAY_JOB_ID ArrayTaskId=$SLURM_ARRAY_TASK_ID}"
    count=${SLURM_RESTART_COUNT:-0}
    if [ -n "${OUTER:-}" ]; then index='' count=0; fi
    restarts="Restarts=$count BatchFlag=1"
    echo "JobId=$SLURM_JOB_ID$index JobName=a ArrayTaskId=9 JobState=RUNNING Reason=None $restarts"
    ;;
"write batch_script") echo "#!/bin/bash" >"$4" ;;
requeue*) echo disabled; exit 1 ;;
esac
"""
RECORDERS = ("srun", "horovodrun", "program", "python", "torchrun")


class Machine:
    """A folder to submit in, with stand-ins for the programs that a script calls."""

    def __init__(self, folder):
        self.folder = folder / "submit"
        self.records = folder / "records"
        self.bin = folder / "bin"
        for one in (self.folder, self.records, self.bin, folder / "scratch"):
            one.mkdir(parents=True)
        for name in RECORDERS:
            self.program(name, RECORD.format(folder=self.records))
        self.program("scontrol", SCONTROL)
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "USER": "ada",
            "TMPDIR": str(folder / "scratch"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "name",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_NTASKS": "6",
            "SLURM_TASKS_PER_NODE": "2(x3)",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }

    def program(self, name, text):
        """Write a program to a folder of the PATH."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, spec, *arguments, **env):
        """Run the job's script to its end; return its exit code and output."""
        return self.bash(render(spec), *arguments, **env)

    def bash(self, text, *arguments, cwd="/", **env):
        """Run a text by bash with arguments; return its exit code and output."""
        path = self.folder.parent / "script.sh"
        path.write_bytes(os.fsencode(text))
        done = subprocess.run(
            ["bash", path, *map(os.fsencode, arguments)],
            env={**self.environ, **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        return done.returncode, os.fsdecode(done.stdout)

    def calls(self):
        """Return the words of each recorded call, in order."""
        return [_entries(path) for path in self._paths()]

    def variables(self, number=-1):
        """Return the environment of one call."""
        entries = _entries(self._paths()[number].with_suffix(".environ"))
        return dict(entry.split("=", 1) for entry in entries)

    def _paths(self):
        return sorted(self.records.glob("*.argv"), key=lambda path: path.stat().st_mtime_ns)


def _entries(path):
    return [os.fsdecode(one) for one in path.read_bytes().split(b"\0")[:-1]]


def make_files(spec, folder):
    """Make the files that a spec names: a virtual environment, code, data, an archive."""
    if spec.venv:
        (folder / spec.venv / "bin").mkdir(parents=True, exist_ok=True)
        (folder / spec.venv / "bin" / "activate").write_text("export ACTIVE=yes\n")
    if spec.stage_code:
        (folder / spec.stage_code).mkdir(parents=True, exist_ok=True)
        (folder / spec.stage_code / "train.py").touch()
    if spec.stage_data:
        (folder / spec.stage_data).mkdir(parents=True, exist_ok=True)
    if spec.stage_environment:
        path = folder / spec.stage_environment
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / "bin-of-env").mkdir(exist_ok=True)
        with tarfile.open(path, "w") as archive:
            archive.add(folder.parent / "bin-of-env", "bin")
