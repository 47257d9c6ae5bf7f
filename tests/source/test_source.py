"""The source: format, lint, types, layers, scripts, and files that do not belong in it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SCRIPTS = sorted(str(path.relative_to(TOP)) for path in TOP.glob("[a-z]*/*.sh"))


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "format", "--check", "--no-cache", "."],
        ["ruff", "check", "--no-cache", "."],
        ["mypy"],
        ["lint-imports", "--no-cache"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_linters_and_type_checker_find_nothing(command):
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=TOP, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script, lacking):
    if shutil.which("shellcheck") is None:
        lacking("shellcheck", "apt-get install shellcheck")
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "--exclude=SC1091", script],
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def tracked_files():
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=True,
    )
    return [TOP / line for line in done.stdout.splitlines() if (TOP / line).is_file()]


def test_top_level_folder_holds_known_files_only():
    expected = {"setup.cfg", "setup.py", "README.md", "hpctrain", "sbatch", "tests", "examples"}
    expected |= {"docs", "benchmarks", "containers", "LICENSE", "CHANGELOG.md"}
    expected |= {"CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "llms.txt", "mkdocs.yml"}
    expected |= {"README.zh-CN.md"}
    found = {path.relative_to(TOP).parts[0] for path in tracked_files()}
    assert {name for name in found if not name.startswith(".")} == expected


LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")


def test_every_page_is_in_the_index_and_in_llms_txt():
    pages = {path.name for path in tracked_files() if path.parent == TOP / "docs"} - {"README.md"}
    index = {Path(link).name for link in LINK.findall((TOP / "docs" / "README.md").read_text())}
    known = {Path(link).name for link in LINK.findall((TOP / "llms.txt").read_text())}
    assert pages - index == pages - known == set()


def test_links_between_pages_have_a_target():
    pages = [path for path in tracked_files() if path.suffix == ".md" or path.name == "llms.txt"]
    assert len(pages) > 3
    dead = [
        f"{page.relative_to(TOP)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not dead
