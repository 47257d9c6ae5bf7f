"""Plant each known bug in a copy of the project, and print which test finds it.

    python tests/planted [--jobs N] [--only NAME …] [--save FILE.json]
    python tests/planted --list

A finding counts only by a test that passes without the bug. Exit code 1 unless 95 % of the bugs are
found, and 80 % by the default tier.
"""

import argparse
import contextlib
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bugs import TOP, Bug, load, mistakes

sys.path.insert(0, str(TOP / "benchmarks"))

import measure

NEEDED = (
    *("hpctrain", "tests", "examples", "sbatch", "docs", "benchmarks"),
    *("setup.cfg", "setup.py", "README.md", ".ruff.toml"),
)
FOUND, FOUND_BY_DEFAULT = 0.95, 0.80
LIMIT = 120.0  # seconds for the tests of one bug; a time-out counts as found
PASSED, FAILED = 0, 1  # exit codes of pytest
# xdist appends the group to the name.
FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?:@[\w.]+)?(?: - .*)?$", re.MULTILINE)
YOUNGER = itertools.count(1)


@dataclass(frozen=True)
class Outcome:
    """The result of the tests of a bug.

    Attributes:
        found: whether one of them failed or hung.
        how: the test, "time-out", or why there is no result.
        seconds: that they took.
    """

    found: bool
    how: str
    seconds: float


class Copy:
    """A copy of the project in which one bug at a time is planted.

    Args:
        folder: for the copy; it does not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self._temporary = folder / "t"
        self.folder.mkdir(parents=True)
        for name in NEEDED:
            source, target = TOP / name, self.folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        (self.folder / ".venv").symlink_to(TOP / ".venv")
        # An editable install comes after $PYTHONPATH, in children and examples as well.
        self._env = {**os.environ, "PYTHONPATH": str(self.folder)}
        ask = [sys.executable, "-c", "import hpctrain; print(hpctrain.__file__)"]
        done = subprocess.run(ask, cwd="/", env=self._env, capture_output=True, text=True)
        if not done.stdout.startswith(str(self.folder)):
            raise SystemExit(f"the copy is not what is imported: {done.stdout}{done.stderr}")

    @contextlib.contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        """Plant a bug in the copy for as long as the block lasts."""
        path = self.folder / bug.file
        text, times = path.read_text(), path.stat()
        path.write_text(bug.plant(text))
        # Python decides by a file's size and second of change whether compiled code is current.
        os.utime(path, (times.st_atime, times.st_mtime + next(YOUNGER)))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, (times.st_atime, times.st_mtime))

    def pytest(self, *arguments: str, limit: float) -> tuple[int | None, str]:
        """Run pytest; return its exit code, which is None after a time-out, and its output."""
        command = [sys.executable, "-m", "pytest", "-rfE", "--tb=line", *arguments]
        command += ["-p", "no:cacheprovider", f"--basetemp={self._temporary}"]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                code, output = None, ""
            finally:
                self._end_all()
        return code, output

    def _end_all(self) -> None:
        """End the processes that the tests left: all that import from this copy."""
        mark = f"PYTHONPATH={self.folder}".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)


def failing(copy: Copy, bugs: Sequence[Bug], jobs: int) -> set[str]:
    """Return the tests of some bugs that fail without a bug."""
    failed = set()
    for tier in ("default", "all"):
        tests = dict.fromkeys(test for bug in bugs if bug.tier == tier for test in bug.tests)
        if tests:
            parallel = ("-n", str(jobs), "--dist", "loadgroup")
            code, output = copy.pytest(*_tier(tier), *parallel, *tests, limit=3600)
            if code not in (PASSED, FAILED):
                raise SystemExit(f"without a bug the tests do not run:\n{output}")
            failed |= set(FAILURE.findall(output))
    return failed


def find(copy: Copy, bug: Bug, failed: set[str]) -> Outcome:
    """Run the tests of a bug with the bug planted.

    Args:
        copy: without other bugs.
        bug: to plant.
        failed: tests that fail without it.
    """
    begin = time.monotonic()
    sound = [f"--deselect={test}" for test in failed]
    with copy.planted(bug):
        code, output = copy.pytest(*_tier(bug.tier), "-x", *sound, *bug.tests, limit=LIMIT)
    seconds = time.monotonic() - begin
    if code is None:
        return Outcome(True, "time-out", seconds)
    first = FAILURE.search(output)
    if code == FAILED and first:
        return Outcome(True, first[1], seconds)
    lines = output.strip().splitlines() or ["no output"]
    return Outcome(False, "NOT FOUND" if code == PASSED else f"NOT RUN: {lines[-1]}", seconds)


def _tier(tier: str) -> tuple[str, ...]:
    return ("--all",) if tier == "all" else ()


def find_all(bugs: Sequence[Bug], jobs: int) -> list[Outcome]:
    """Plant each bug, several at a time; return the outcomes."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder, str(number))))
        copy = copies.get()
        failed = failing(copy, bugs, jobs)
        copies.put(copy)
        for test in sorted(failed):
            log(f"fails without a bug, and finds none: {test}")

        def find_one(bug: Bug) -> Outcome:
            copy = copies.get()
            try:
                outcome = find(copy, bug, failed)
            finally:
                copies.put(copy)
            log(f"{bug.name}: {outcome.how}, {outcome.seconds:.0f} s")
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(find_one, bugs))


def log(text: str) -> None:
    """Print a line about the progress."""
    print(text, file=sys.stderr, flush=True)


def table(bugs: Sequence[Bug], outcomes: Sequence[Outcome]) -> str:
    """Return a table of the bugs and the tests that found them, with totals."""
    width = max(len(bug.name) for bug in bugs)
    lines = []
    for bug, outcome in zip(bugs, outcomes, strict=True):
        lines.append(f"{bug.name:<{width}}  {bug.promise}")
        lines.append(f"{'':<{width}}  {bug.tier}: {outcome.how}")
    found, by_default = shares(bugs, outcomes)
    total = f"{len(bugs)} bugs: {found:.0%} found, {by_default:.0%} by the default tier"
    return "\n".join([*lines, total])


def shares(bugs: Sequence[Bug], outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Return the shares of bugs that any tier finds, and that the default tier finds."""
    found = [bug.tier for bug, outcome in zip(bugs, outcomes, strict=True) if outcome.found]
    return len(found) / len(bugs), found.count("default") / len(bugs)


def main() -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python tests/planted", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these bugs alone")
    measure.add_save(parser)
    parser.add_argument("--list", action="store_true", help="show the bugs, and run nothing")
    options = parser.parse_args()
    bugs = load()
    if options.only:
        if unknown := set(options.only) - {bug.name for bug in bugs}:
            parser.error(f"no bug is named {', '.join(sorted(unknown))}")
        bugs = [bug for bug in bugs if bug.name in options.only]
    if options.list:
        for bug in bugs:
            print(f"{bug.name} ({bug.tier}): {bug.promise}", *bug.tests, sep="\n    ")
        return 0
    if wrong := [f"{bug.name}: {why}" for bug in bugs for why in mistakes(bug)]:
        raise SystemExit("\n".join(wrong))
    outcomes = find_all(bugs, options.jobs)
    print(table(bugs, outcomes))
    rows = [
        {"name": bug.name, "promise": bug.promise, "tier": bug.tier, **asdict(outcome)}
        for bug, outcome in zip(bugs, outcomes, strict=True)
    ]
    measure.save(options.save, {**measure.facts(["torch"]), "rows": rows})
    found, by_default = shares(bugs, outcomes)
    return 0 if found >= FOUND and by_default >= FOUND_BY_DEFAULT else 1


if __name__ == "__main__":
    sys.exit(main())
