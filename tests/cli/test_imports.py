"""The imports of a command on a login node: the standard library and few modules of hpctrain.

The counts in imported_modules.json are limits. To write them anew:

    python tests/cli/test_imports.py
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("imported_modules.json")

# A command, its exit code without Slurm, and a part of its output.
COMMANDS = {
    "--help": (0, "submit a job"),
    "--version": (0, "hpctrain "),
    "explain": (0, "launcher"),
    "explain --json": (0, '"rank": 0'),
    "hostlist n[1-2]": (0, "n1\nn2\n"),
    "render job.toml": (0, "#SBATCH --nodes=2\n"),
    "lint job.sh": (0, ""),
    "submit --help": (0, "--nodes"),
    "submit job.toml --dry-run": (0, "#SBATCH --nodes=2\n"),
    "submit --dry-run -- python train.py": (0, "train.py"),
    "submit -- python session.py --epochs two": (2, "is not a whole number"),
    "submit job.toml": (1, "hpctrain run"),
    "status": (0, "Slurm does not answer: no squeue on the PATH"),
    "status --help": (0, "usage: hpctrain status"),
    "cancel no-such-run": (1, "no squeue on the PATH"),
    "requeue no-such-run": (1, "no squeue on the PATH"),
    "run --help": (0, "--nproc-per-node"),
    "init folder": (0, "sbatch train.sbatch"),
    "completion --help": (0, "usage: hpctrain completion"),
    "run no-such-script.py": (2, "no-such-script.py does not exist"),
}

# Forks for each command, from an interpreter without other packages; records imports of those.
FORKS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
class Missing:
    # copy and pickle look for Jython (org.python.core), platform for Windows (_wmi).
    names, known = [], {*sys.stdlib_module_names, "org", "_wmi"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.known:
            self.names.append(name)
sys.meta_path.append(Missing())
results = {}
for command in json.loads(sys.argv[2]):
    folder = os.path.abspath(str(len(results)))
    os.mkdir(folder)
    pid = os.fork()
    if pid == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv[1:] = command.split()
        try:
            from hpctrain.__main__ import main
            code = main()
        except SystemExit as leave:
            code = leave.code
        finally:
            sys.stdout.flush()
            with open(f"{folder}/modules", "w") as file:
                json.dump([list(sys.modules), Missing.names], file)
        os._exit(code or 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err, modules = (open(f"{folder}/{name}").read() for name in ("1", "2", "modules"))
    results[command] = code, out, err, *json.loads(modules)
print(json.dumps(results))
"""


def run_commands(folder):
    """Return, by command: exit code, output, errors, modules imported, and modules not found."""
    folder = Path(folder)
    (folder / "job.toml").write_text('command = "python train.py"\nnodes = 2\ntime = "1h"\n')
    (folder / "train.py").write_text("")
    session = "import hpctrain\nhpctrain.Session(hpctrain.options().parse_args())\n"
    (folder / "session.py").write_text(session)
    (folder / "job.sh").write_text((TOP / "sbatch" / "mnist.sh").read_text())
    # -I leaves out PYTHONPATH and the user's packages, -S those of the environment.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", FORKS, TOP, json.dumps(list(COMMANDS))],
        env={"PATH": "/nowhere", "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def count_modules(results):
    return {
        command: sum(name.partition(".")[0] == "hpctrain" for name in modules)
        for command, (*_, modules, _) in results.items()
    }


def test_commands_need_the_standard_library_only_and_import_few_modules(tmp_path):
    results = run_commands(tmp_path)
    for command, (expected, words) in COMMANDS.items():
        code, out, err, _, missing = results[command]
        assert code == expected, f"hpctrain {command}: {err}"
        assert words in out + err, f"hpctrain {command}"
        assert not re.search("Traceback|Errno", err), f"hpctrain {command}: {err}"
        assert not missing, f"hpctrain {command}"
    limits, found = json.loads(TABLE.read_text()), count_modules(results)
    more = {
        f"hpctrain {command}": f"{found[command]} modules of hpctrain, limit {limits.get(command)}"
        for command in found
        if found[command] > limits.get(command, 0)
    }
    assert not more, (
        f"{more}\nImport what only one command needs inside of its function. "
        f"If the modules are needed: python tests/cli/test_imports.py writes the table anew."
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        TABLE.write_text(json.dumps(count_modules(run_commands(scratch)), indent=2) + "\n")
