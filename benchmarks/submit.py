"""Cost of `hpctrain submit` over plain sbatch: new processes, in turns.

    python benchmarks/submit.py [--rounds 30] [--here] [--save FILE]

It runs on the test cluster of tests/support, which it starts and stops (as root), or with --here on
the cluster of this machine. All jobs are submitted on hold, and cancelled at the end. The arms take
turns, and each is compared with the sbatch of its own round. A bare Python shows how much of the
time is Python's own start. The project is a git repository of 5,000 files. Unless `--live` is
given, a job's code is recorded: once after a file was edited, once for the first time.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from harness import ENVIRONMENT, Results, compare, judge, run

from hpctrain.tools.bench.measure import summary, take_turns

SBATCH, SUBMIT, SUBMITIT = "sbatch job.sh", "hpctrain submit --live", "submitit"
FROZEN, FIRST = "hpctrain submit, a file edited", "hpctrain submit, the first one"
BARE = "python -c pass"
FILES = 5000

SCRIPT = "#!/bin/bash\nsrun python train.py\n"
BY_SUBMITIT = """
import submitit
executor = submitit.SlurmExecutor("log")
executor.update_parameters(time=5, additional_parameters={"hold": True})
print(executor.submit(print, 1).job_id)
"""
HELD = ("--hold", "--job-name=benchmark-of-submitting")
LINE = (
    *(sys.executable, "-m", "hpctrain", "submit", "--extra", "hold"),
    *("--nodes", "2", "--time", "4h", "--", sys.executable, "train.py", "--lr", "0.1"),
)
ARMS = {
    SBATCH: ("sbatch", "--parsable", *HELD, "job.sh"),
    SUBMIT: (*LINE[:4], "--live", *LINE[4:]),
    FROZEN: LINE,
    FIRST: LINE,
    SUBMITIT: (sys.executable, "-c", BY_SUBMITIT),
    BARE: (sys.executable, "-c", "pass"),
}
Command = Callable[[Sequence[str]], list[str]]


@contextlib.contextmanager
def slurm(here: bool) -> Iterator[tuple[Command, dict[str, str]]]:
    """Yield a function that makes the command line on the cluster, and its environment."""
    if here:
        yield list, ENVIRONMENT
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    from cluster import Cluster

    cluster = Cluster()
    cluster.start()
    try:
        environ = dict(cluster.environ())
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        yield cluster.command, environ
    finally:
        cluster.stop()


def measure(arguments: argparse.Namespace) -> Results:
    """Return each arm's time, and how much longer it is than sbatch."""
    jobs: list[str] = []
    with slurm(arguments.here) as (command, environ), tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.sh").write_text(SCRIPT)
        _make_project(Path(folder))

        def milliseconds(name: str) -> dict[str, float]:
            # `env` changes the folder inside the command: on a host, the line begins with a prefix.
            _prepare(name, Path(folder))
            argv = command(["env", "--chdir", folder, *ARMS[name]])
            start = time.perf_counter()
            done = subprocess.run(
                argv, env=environ, capture_output=True, check=True, text=True, timeout=60
            )
            took = (time.perf_counter() - start) * 1e3
            jobs.extend(done.stdout.split())
            return {"ms": took}

        arms = {name: partial(milliseconds, name) for name in ARMS}
        try:
            # The warm-up writes the caches, and loads the files into memory.
            times = take_turns(arms, arguments.rounds, warm_up=1)
        finally:
            if jobs:
                subprocess.run(command(["scancel", *jobs]), env=environ, check=False)
    results = compare(times, SBATCH, ("more_ms",))
    judge(results[SUBMIT], "more_ms", "≤ 80")
    for name in (FROZEN, FIRST):
        more = [a["ms"] - b["ms"] for a, b in zip(times[name], times[SUBMIT], strict=True)]
        results[name]["freezing_ms"] = summary(more)
        judge(results[name], "freezing_ms", "≤ 100")
    return results


def _make_project(folder: Path) -> None:
    """Make a git repository with a program and modules."""
    (folder / "train.py").touch()
    for number in range(FILES - 1):
        place = folder / "package" / f"part{number % 50}" / f"module{number}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"VALUE = {number}\n" * 40)
    (folder / ".gitignore").write_text("runs/\nlog/\n")
    own = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    for words in (("init", "-q"), ("add", "."), (*own, "commit", "-q", "-m", "all")):
        subprocess.run(["git", "-C", str(folder), *words], check=True)


def _prepare(name: str, folder: Path) -> None:
    if name == FIRST:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    elif name == FROZEN:
        with (folder / "package" / "part0" / "module0.py").open("a") as file:
            file.write(f"# {time.time_ns()}\n")


OPTIONS = {"--here": {"action": "store_true", "help": "use the Slurm of this machine"}}

if __name__ == "__main__":
    run("The cost of submitting.", 30, ["hpctrain", "submitit"], measure, OPTIONS)
