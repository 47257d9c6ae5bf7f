"""The scripts of docs/migrate.md, run as they are printed there."""

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys

import launches
import pytest
import ranks

PAGE = (launches.TOP / "docs" / "migrate.md").read_text()
SCRIPTS = {
    block.split()[1]: block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}
BEFORE = dict(re.findall(r"^Before: `([^`]+?(\w+\.py))`", PAGE, re.MULTILINE))
BEFORE = {script: command for command, script in BEFORE.items()}
AFTER = re.findall(r"^After: `([^`]+)`", PAGE, re.MULTILINE)
(SED,) = re.findall(r"^sed .*$", PAGE, re.MULTILINE)
ACCURACY = 0.9
PATH = f"{launches.BIN}:{os.environ['PATH']}"


@pytest.fixture
def scripts(tmp_path):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")


@pytest.fixture
def packages(script, lacking):
    """Skip a script of a package that is not installed."""
    for name in re.findall(
        r"^(?:from|import) (horovod|lightning_fabric|accelerate)", SCRIPTS[script], re.M
    ):
        if importlib.util.find_spec(name) is None:
            lacking(name, f"no module named {name}")


def accuracy(output):
    *_, last = re.findall(r"epoch 4 .* top1 (\S+)", output)
    return float(last)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run_as_rank(script, options, variables):
    """Run a script with the variables and options of a launcher; return what it prints."""
    names = {"RANK": "HPCTRAIN_RANK", "WORLD_SIZE": "HPCTRAIN_WORLD_SIZE"}
    places = {name: os.environ[own_name] for name, own_name in names.items()}
    os.environ.update({name: value.format(**places) for name, value in variables.items()})
    sys.argv = [script, *(option.format(**places) for option in options)]
    sys.path.insert(0, os.getcwd())
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(script, run_name="__main__")
    return output.getvalue()


def test_migrate_page_has_each_script_before_and_after():
    assert list(SCRIPTS) == [
        *("common.py", "ported.py", "single.py", "data_parallel.py", "ddp.py", "spawned.py"),
        *("slurm_manual.py", "mixed.py", "apex_o2.py", "horovod_manual.py"),
        *("fabric_manual.py", "accelerate_manual.py"),
    ]
    assert len(AFTER) == len(SCRIPTS) - 2
    assert all(" ported.py" in command for command in AFTER)


RANKS = {"RANK": "{RANK}", "WORLD_SIZE": "{WORLD_SIZE}", "LOCAL_RANK": "{RANK}"}
SLURM = {"SLURM_PROCID": "{RANK}", "SLURM_NTASKS": "{WORLD_SIZE}", "SLURM_LOCALID": "{RANK}"}


def master_variables():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["single", "data_parallel", "mixed", "slurm_manual"])
def test_migrate_scripts_of_one_rank_a_process_train(name, scripts):
    script = f"{name}.py"
    size, variables = (2, {**SLURM, **master_variables()}) if "slurm" in name else (1, {})
    assert BEFORE.get(script) == (f"python {script}" if size == 1 else None)
    first, *_ = ranks.values(ranks.run(size, run_as_rank, script, (), variables))
    assert accuracy(first) >= ACCURACY
    assert (scripts / "model.pt").is_file()


def test_migrate_apex_script_trains_with_compat_imports(scripts):
    before = (scripts / "apex_o2.py").read_text()
    subprocess.run(["bash", "-c", SED], cwd=scripts, check=True)
    changed = set((scripts / "apex_o2.py").read_text().splitlines()) - set(before.splitlines())
    assert changed == {
        "from hpctrain.compat.apex import amp",
        "from hpctrain.compat.apex.parallel import DistributedDataParallel",
    }
    options = ("--local-rank={RANK}",)
    first, *_ = ranks.values(
        ranks.run(2, run_as_rank, "apex_o2.py", options, {**RANKS, **master_variables()})
    )
    assert accuracy(first) >= ACCURACY
    assert (scripts / "checkpoint.pt").is_file()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "script",
    ["ddp.py", "spawned.py", "horovod_manual.py", "fabric_manual.py", "accelerate_manual.py"],
)
def test_migrate_scripts_that_start_their_ranks_train(script, scripts):
    command = BEFORE[script]
    for _ in range(3):
        done = launches.start(["bash", "-c", command], scripts, PATH=PATH, MASTER_PORT=free_port())
        # A thread of gloo that wants the GIL while plain torch's interpreter ends aborts it, about
        # once in thirty on a busy machine (pull request 179291 of PyTorch).
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= ACCURACY
    assert (scripts / "model.pt").is_file()


def ranks_and_options(command):
    """Return ranks and options of a command with the ported script."""
    launcher, options = re.fullmatch(r"(.+) ported\.py ?(.*)", command).groups()
    # On CPUs `auto` is one rank.
    return 1 if launcher == "python" or "auto" in launcher else 2, options


def cases():
    """Yield each form of the ported script; by default only two plain ranks."""
    for size, options in sorted(set(map(ranks_and_options, AFTER))):
        by_default = size == 2 and "--backend" not in options and "--precision" not in options
        yield pytest.param(size, options, marks=() if by_default else pytest.mark.slow)


@pytest.mark.e2e
@pytest.mark.parametrize(("size", "options"), list(cases()))
def test_migrate_ported_script_trains(size, options, scripts, request):
    over_horovod = "--backend horovod" in options
    if over_horovod:
        request.getfixturevalue("horovod")
    ranks.values(ranks.run(size, run_as_rank, "ported.py", options.split(), {}))
    (run,) = (scripts / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["metrics"]["top1"] >= ACCURACY
    assert (scripts / "model.pt").is_file()
    assert summary["world_size"] == size
    assert (summary["backend"] == "horovod") == over_horovod
