"""The commands of the guides that need no Slurm, as they are printed and in their order."""

import importlib.util
import os
import shutil

import guides
import launches
import pages
import pytest

pytestmark = pytest.mark.e2e

HERE = guides.runnable(slurm=False)
# Pages whose commands start no ranks.
BY_DEFAULT = {f"docs/{name}.md" for name in ("errors", "hangs", "install-cluster", "jobs", "lint")}
# What the reader of a page has done before.
BEFORE = {
    "docs/fsdp.md": (
        "hpctrain run train.py --run-dir runs/before",
        "hpctrain export runs/before weights",
    ),
    "docs/imagenet.md": ("python train.py --run-dir runs/imagenet-4711",),
    "docs/runs.md": (
        "python train.py --run-dir runs/a --epochs 500 --max-steps 500 --checkpoint-every 500",
    ),
    "docs/report.md": tuple(
        f"python train.py --run-dir runs/{name}" for name in ("imagenet-4711", "a", "b")
    ),
}
# Commands that give a script to other schedulers than Slurm.
SCHEDULERS = ("flux", "qsub")
# Open MPI's variables that let root run it in a container, with more ranks than cores.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def test_commands_that_no_test_runs_are_still_in_the_pages():
    commands = [command for page in guides.GUIDES for command in guides.typed(page)]
    assert not [
        start
        for start in guides.NOT_HERE
        if not any(command.startswith(start) for command in commands)
    ]


@pytest.fixture
def shell(tmp_path):
    """Return a function that runs a line in a folder with what the pages speak of."""
    guides.prepare(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in SCHEDULERS:
        (programs / name).write_text("#!/bin/sh\nexec cat >/dev/null\n")
        (programs / name).chmod(0o755)
    path = f"{launches.BIN}:{programs}:{os.environ['PATH']}"

    def run(command):
        line = ["bash", "-c", command]
        done = launches.start(line, tmp_path, 600, PATH=path, HOME=str(tmp_path), **MPI)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def check_parts(page, folder, lacking):
    """Skip a page for which this machine lacks something."""
    text = "\n".join(HERE[page])
    for name, word in (("horovod",) * 2, ("accelerate",) * 2, ("shtab", "hpctrain completion")):
        if word in text and importlib.util.find_spec(name) is None:
            lacking(name, f"no module named {name}")
    for program, part in (("mpirun", "openmpi"), ("shellcheck", "shellcheck")):
        if program in text and shutil.which(program) is None:
            lacking(part, f"no {program} here")
    if "examples/photographs.py" in text or "imagenet " in text:
        try:
            launches.example("photographs").make(folder / "imagenet", train=3, val=2, classes=3)
        except FileNotFoundError as error:
            lacking("photographs", str(error))


@pytest.mark.parametrize(
    "page",
    [pytest.param(one, marks=() if one in BY_DEFAULT else pytest.mark.slow) for one in HERE],
)
def test_commands_of_a_guide_work_as_printed(page, shell, tmp_path, lacking):
    check_parts(page, tmp_path, lacking)
    for command in BEFORE.get(page, ()):
        shell(command)
    printed = "".join(block.text for block in pages.blocks(page, "console"))
    for command in HERE[page]:
        shown = shell(guides.small(command))
        if f"$ {command}\n" in printed:
            assert f"$ {command}\n{shown}" in printed
