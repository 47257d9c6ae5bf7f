"""The README, and the commands in it."""

import re

import launches

TEXT = (launches.TOP / "README.md").read_text()
# The commands of hpctrain that tests/docs/test_readme_on_slurm.py runs.
JOBS = tuple(f"hpctrain {name}" for name in ("submit", "render", "status", "logs", "lint"))
PROGRAMS = ("bash", "horovodrun", "hpctrain", "mpirun", "python", "sbatch", "srun", "torchrun")
_COMMANDS = re.compile(r"^```bash\n(.*?)^```|^\| you have \|(.*?)\n\n", re.MULTILINE | re.DOTALL)


def commands():
    """Return the commands of the bash blocks and of the table of launchers, in their order."""
    found = []
    for block, table in _COMMANDS.findall(TEXT):
        found += [line.partition(" # ")[0].strip() for line in block.splitlines()]
        typed = re.findall(r"`([^`]+)`", table)
        found += [
            line
            for line in typed
            if line.split()[0] in PROGRAMS and "THEIR_SCRIPT" not in line  # has no such file
        ]
    return found
