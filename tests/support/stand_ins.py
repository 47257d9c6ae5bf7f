"""A machine without Slurm for batch scripts: stand-ins that record their calls.

The records have the words and the environment of each call, byte for byte.
"""

import os
import signal
import subprocess
from functools import partial

from hpctrain.jobs.script import render

RECORD = """#!/bin/sh
printf '%s\\0' "${{0##*/}}" "$@" >'{folder}'/$$.argv
cat /proc/$$/environ >'{folder}'/$$.environ
"""
RECORDERS = ("hpctrain", "python", "python3")


class Machine:
    """A folder to submit in, with stand-ins for the programs that a script calls."""

    def __init__(self, folder):
        self.folder = folder / "submit"
        self.records = folder / "records"
        self.bin = folder / "bin"
        for one in (self.folder, self.records, self.bin):
            one.mkdir(parents=True)
        for name in RECORDERS:
            self.program(name, RECORD.format(folder=self.records))
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "SLURM_JOB_ID": "7",
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

    def bash(self, text, *arguments, **env):
        """Run a text by bash with arguments; return its exit code and output."""
        path = self.folder.parent / "script.sh"
        path.write_bytes(os.fsencode(text))
        done = subprocess.run(
            ["bash", path, *map(os.fsencode, arguments)],
            env={**self.environ, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
            # Under nohup, this process ignores SIGHUP, and bash cannot change that.
            preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
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
