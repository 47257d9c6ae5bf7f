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
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from measure import add_save, describe, facts, order, outcome, save, summary, table

SBATCH, SUBMIT, SUBMITIT = "sbatch job.sh", "hpctrain submit --live", "submitit"
FROZEN, FIRST = "hpctrain submit, a file edited", "hpctrain submit, the first one"
BARE = "python -c pass"
TARGET_MS = 150.0
FILES = 5000
TARGET_OF_FREEZING_MS = 100.0

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
    # Without bytecode caches, the time would include the compiler.
    names = ("PYTHONDONTWRITEBYTECODE",)
    if here:
        yield list, {name: value for name, value in os.environ.items() if name not in names}
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    from cluster import Cluster

    cluster = Cluster()
    cluster.start()
    try:
        environ = cluster.environ()
        yield cluster.command, {name: environ[name] for name in environ if name not in names}
    finally:
        cluster.stop()


def measure(rounds: int, command: Command, environ: dict[str, str]) -> dict[str, list[float]]:
    """Return the milliseconds of each arm, one per round."""
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.sh").write_text(SCRIPT)
        _make_project(Path(folder))

        def run(name: str) -> tuple[float, str]:
            # `env` changes the folder inside the command: on a host, the line begins with a prefix.
            _prepare(name, Path(folder))
            argv = command(["env", "--chdir", folder, *ARMS[name]])
            start = time.perf_counter()
            done = subprocess.run(
                argv, env=environ, capture_output=True, check=True, text=True, timeout=60
            )
            return (time.perf_counter() - start) * 1e3, done.stdout.strip()

        for name in ARMS:  # warms up: writes the caches, loads the files into memory
            run(name)
        jobs = []
        try:
            for number in range(rounds):
                for name in order(list(ARMS), number):
                    spent, job = run(name)
                    times[name].append(spent)
                    jobs += [job] if job else []
        finally:
            if jobs:
                subprocess.run(command(["scancel", *jobs]), env=environ, check=False)
    return times


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


def evaluate(times: dict[str, list[float]]) -> dict[str, dict]:
    """Return for each arm its time, and how much longer it is than sbatch in the same round."""
    results = {}
    for name, own in times.items():
        results[name] = {"ms": summary(own), "all_ms": own}
        if name != SBATCH:
            more = [a - b for a, b in zip(own, times[SBATCH], strict=True)]
            results[name]["more_ms"] = summary(more)
    for name in (FROZEN, FIRST):
        more = [a - b for a, b in zip(times[name], times[SUBMIT], strict=True)]
        results[name] |= {
            "freezing_ms": summary(more),
            "target_ms": TARGET_OF_FREEZING_MS,
            "outcome": outcome(summary(more), TARGET_OF_FREEZING_MS),
        }
    submit = results[SUBMIT]
    submit |= {"target_ms": TARGET_MS, "outcome": outcome(submit["more_ms"], TARGET_MS)}
    return results


def show(results: dict[str, dict]) -> str:
    """Return the results as a text table."""
    rows = [("", "ms", "more than sbatch", "more than --live", "target", "")]
    for name, result in results.items():
        more, target = result.get("more_ms"), result.get("target_ms")
        limit = f"≤ {target:g}" if target else ""
        rows.append(
            (name, describe(result["ms"]), describe(more) if more else "",
             describe(result["freezing_ms"]) if "freezing_ms" in result else "", limit,
             result.get("outcome", ""))
        )  # fmt: skip
    return table(rows) + "\nMedians, with their 95 % intervals."


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description="The cost of submitting.")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default: 30")
    parser.add_argument("--here", action="store_true", help="use the Slurm of this machine")
    add_save(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("a spread needs --rounds 2 or more")
    record = facts(["hpctrain", "submitit"])
    with slurm(arguments.here) as (command, environ):
        results = evaluate(measure(arguments.rounds, command, environ))
    print(show(results))
    save(arguments.save, {"benchmark": "submit", **record, "results": results})


if __name__ == "__main__":
    main()
