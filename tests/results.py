"""Run tests and save their results for docs/reliability.md and docs/status.md.

    python tests/results.py                               # the tests of survival
    python tests/results.py tests/monitoring -k SIGSTOP   # some of them
    python tests/results.py tests -n 4                    # all tests: dates what was run where
    python tests/results.py --slurm 24.11 -n 4            # those on Slurm, with a version of it

Each test is a row of the first page, with the first line of its docstring: passed, failed and left
out, by backend. A row of the second page gets a new date if all tests under its `tests` were run
and none failed. With --slurm, each file of tests has a row in a table of docs/status.md, and
each version a column. Only in a clean tree, and with all slow tests. Then: python benchmarks/pages
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Xml
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "benchmarks"))

sys.path.insert(0, str(TOP / "tests" / "support"))

import measure  # noqa: E402
import slurm_roots  # noqa: E402

RESULTS = TOP / "docs" / "results"
# The sections of docs/reliability.md, by the file of their tests.
SECTIONS = {
    "tests/training/test_resume_after_kill.py": "kill",
    "tests/training/test_resume_under_launchers.py": "launchers",
    "tests/training/test_resume_on_slurm.py": "slurm",
    "tests/monitoring/test_hangs.py": "hangs",
    "tests/monitoring/test_watchdog.py": "hangs",
    "tests/checkpoint/test_checkpoint_faults.py": "checkpoints",
}
BACKENDS = {"horovod": "Horovod", "ddp": "ddp", "fsdp": "fsdp", "auto": "ddp"}
MANY = 12
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "left out"}


@dataclass(frozen=True)
class Case:
    """One test with its parameters.

    Attributes:
        file: from the top of the repository.
        test: name of the function.
        backend: over which it ran; empty where its parameters do not tell.
        parameters: the others.
        outcome: passed, failed or left out.
        seconds: that it took.
        lost: seconds that each fault cost the run, where the test has recorded them.
    """

    file: str
    test: str
    backend: str
    parameters: str
    outcome: str
    seconds: float
    lost: Sequence[float] = ()


def read(path: Path) -> list[Case]:
    """Return the cases of a JUnit file of pytest, of the family xunit1."""
    cases = []
    for node in Xml.parse(path).iter("testcase"):
        # pytest-xdist appends the group of a test.
        name = re.sub(r"@[\w-]+\Z", "", node.get("name", ""))
        test, _, parameters = name.partition("[")
        words = parameters.removesuffix("]").split("-")
        backend = next((BACKENDS[word] for word in words if word in BACKENDS), "")
        outcome = next((OUTCOMES[child.tag] for child in node if child.tag in OUTCOMES), "passed")
        others = "-".join(word for word in words if word not in BACKENDS)
        seconds = float(node.get("time", 0))
        properties = node.iter("property")
        lost = [float(one.get("value", 0)) for one in properties if one.get("name") == "lost"]
        cases.append(Case(node.get("file", ""), test, backend, others, outcome, seconds, lost))
    return cases


def first_lines(file: Path) -> dict[str, str]:
    """Return the first line of each function's docstring, by the function's name."""
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        node.name: (ast.get_docstring(node) or "").partition("\n")[0].rstrip(".")
        for node in functions
    }


def described(first_line: str, cases: list[Case]) -> str:
    """Return a description of what was done: a docstring's first line, and the parameters."""
    values = list(dict.fromkeys(case.parameters for case in cases))
    if len(values) > MANY:
        values = [*values[:2], "…", values[-1]]
    return ": ".join(filter(None, (first_line, ", ".join(values))))


def row(cases: list[Case], what: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the cases of one test."""
    outcomes = [case.outcome for case in cases]
    counts = [(outcomes.count(name), name) for name in ("failed", "left out") if name in outcomes]
    passed = outcomes.count("passed")
    backends = [case.backend for case in cases]
    runs = [(name, backends.count(name)) for name in sorted(set(backends))]
    lost = [round(seconds, 1) for case in cases for seconds in case.lost]
    result = [f"{passed} passed", *(f"{count} {name}" for count, name in counts)]
    return {
        "section": SECTIONS[cases[0].file],
        "file": cases[0].file,
        "test": cases[0].test,
        "case": cases[0].test.removeprefix("test_").replace("_", " "),
        "what": described(what, cases),
        "runs": ", ".join(f"{name} {count}".strip() for name, count in runs),
        "result": "all passed" if passed == len(cases) else ", ".join(result),
        "seconds": round(sum(case.seconds for case in cases), 1),
        **({"lost": lost} if lost else {}),
        **facts,
    }


def renew_reliability(
    rows: Iterable[dict[str, Any]], cases: list[Case], facts: Mapping[str, Any], part: bool
) -> list[dict[str, Any]]:
    """Return the rows with those of the tests that were run in place of older ones.

    Args:
        rows: so far.
        cases: that were run.
        facts: when, where and by what they were run.
        part: whether files were run in part: then their other rows stay.
    """
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.file in SECTIONS:
            groups.setdefault((case.file, case.test), []).append(case)
    files = {file for file, _ in groups}
    unchanged = [
        old
        for old in rows
        if (old["file"], old.get("test")) not in groups and (part or old["file"] not in files)
    ]
    lines = {file: first_lines(TOP / file) for file in files}
    new = [row(group, lines[file].get(test, ""), facts) for (file, test), group in groups.items()]
    return unchanged + new


def renew_status(
    rows: Iterable[dict[str, Any]],
    cases: list[Case],
    paths: Iterable[Path],
    facts: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the rows, with a new date where all their tests were run and none failed.

    Args:
        rows: so far.
        cases: that were run.
        paths: whole files and folders that were run.
        facts: when and where they were run.
    """

    def renewed(old: Mapping[str, Any]) -> bool:
        wanted = [TOP / name for name in old.get("tests", ())]
        whole = all(any(path.is_relative_to(path_run) for path_run in paths) for path in wanted)
        own = [
            case.outcome
            for case in cases
            if any((TOP / case.file).is_relative_to(path) for path in wanted)
        ]
        return whole and "passed" in own and "failed" not in own

    dated = {name: facts[name] for name in ("date", "machine", "commit")}
    return [{**old, **dated} if renewed(old) else old for old in rows]


def renew_slurm(
    rows: Iterable[dict[str, Any]], cases: list[Case], version: str, facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows, with those of a version of Slurm in place of older ones: one for each file.

    Args:
        rows: so far.
        cases: that were run.
        version: version of Slurm.
        facts: when and where they were run.
    """
    files: dict[str, list[str]] = {}
    for case in cases:
        files.setdefault(case.file, []).append(case.outcome)
    dated = {name: facts[name] for name in ("date", "machine", "commit")}
    new = []
    for file, outcomes in sorted(files.items()):
        text = ast.get_docstring(ast.parse((TOP / file).read_text())) or ""
        counts = {name: outcomes.count(name) for name in ("passed", "failed", "left out")}
        row = {"version": version, "file": file, "what": text.partition("\n")[0].rstrip(".")}
        new.append({**row, **counts, **dated})
    replaced = {(version, file) for file in files}
    return [old for old in rows if (old["version"], old["file"]) not in replaced] + new


def main() -> int:
    """Run pytest and write the results; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help="default: the tests of survival")
    parser.add_argument("-k", metavar="EXPRESSION", help="of these tests, those that match")
    parser.add_argument("-n", metavar="N", help="workers (default: one after the other)")
    parser.add_argument(
        "--results", type=measure.place, default=str(RESULTS), metavar="DIR", help="of the files"
    )
    parser.add_argument("--slurm", metavar="VERSION", help="of slurm_roots, or `machine`")
    arguments = parser.parse_args()
    if arguments.slurm:
        arguments.paths = arguments.paths or [str(TOP / "tests")]
    paths = [Path(path).resolve() for path in arguments.paths or (TOP / name for name in SECTIONS)]
    options = ["--all", "--strict-parts", "-o", "junit_family=xunit1"]
    options += ["-k", arguments.k] if arguments.k else []
    environ = dict(os.environ)
    if arguments.slurm:
        options += ["-m", "slurm"]
        environ["HPCTRAIN_TEST_SLURM"] = arguments.slurm.replace("machine", "")
    if arguments.n:
        options += ["-n", arguments.n, "--dist", "loadgroup", "--no-loadscope-reorder"]
    facts = measure.facts(["torch", "horovod"])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        options += [f"--junitxml={report}", *map(str, paths)]
        command = [sys.executable, "-m", "pytest", *options]
        code = subprocess.run(command, cwd=TOP, env=environ).returncode
        if code not in (0, 1):  # interrupted, wrong use, no tests
            return code
        cases = read(report)
    if measure.commit() != facts["commit"]:
        sys.exit(f"not saved: the tree is no longer that of commit {facts['commit']}")
    if arguments.slurm:
        save(
            arguments.results / "slurm_versions.json",
            lambda rows: renew_slurm(rows, cases, version_of_slurm(arguments.slurm), facts),
        )
        return code
    for name, renew in (
        ("reliability", lambda rows: renew_reliability(rows, cases, facts, bool(arguments.k))),
        ("status", lambda rows: renew_status(rows, cases, [] if arguments.k else paths, facts)),
    ):
        save(arguments.results / f"{name}.json", renew)
    return code


def save(path: Path, renew: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Write a file with its rows renewed."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    measure.save(path, {"rows": renew(rows)})


def version_of_slurm(name: str) -> str:
    """Return the version of the Slurm of a root, or of the machine's own."""
    within = [] if name == "machine" else ["chroot", str(slurm_roots.root(name))]
    shown = subprocess.run([*within, "slurmctld", "-V"], capture_output=True, text=True)
    return shown.stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
