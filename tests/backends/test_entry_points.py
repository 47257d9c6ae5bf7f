"""A launcher and a backend of another installed package work like those of hpctrain."""

import subprocess
import sys

import launches
import outside_package
import pytest
from launcher_env import STEP, TORCHRUN

from hpctrain import arguments, backends
from hpctrain.cluster import launchers
from hpctrain.errors import HpctrainError, UsageError

TRAIN = """
import hpctrain, torch
with hpctrain.Session({"backend": "counting", "ddp": {"bucket_mb": 1}}) as session:
    world = session.world
    total = session.all_reduce(torch.tensor(float(session.world.rank + 1)))
    print(world.launcher, world.rank, world.world_size, session.backend.name, total.item(),
          session.backend.sums)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs the package for this process."""

    def install(**changes):
        folder = outside_package.install(tmp_path / "site", **changes)
        monkeypatch.syspath_prepend(folder)
        return folder

    yield install
    for name in ("maple_launcher", "maple_backend"):
        sys.modules.pop(name, None)


def test_ranks_start_under_a_launcher_and_train_over_a_backend_of_another_package(tmp_path):
    folder = outside_package.install(tmp_path / "site")
    path = f"{folder}:{launches.TOP}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN],
            env=launches.environ(PYTHONPATH=path, **outside_package.environ(rank, 3)),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    # The gloo of torch 2.10 prints, too.
    output = [one.communicate(timeout=120)[0].splitlines()[-1].split() for one in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    # Its sum, and the one of known numbers at the start.
    assert output == [["maple", str(rank), "3", "counting", "6.0", "2"] for rank in range(3)]


def test_launcher_of_another_package_has_its_place_among_the_others(installed):
    installed()
    names = [launcher.name for launcher in launchers.installed()]
    assert names.index("maple") + 1 == names.index("slurm")
    assert [name for name in names if name != "maple"] == [one.name for one in launchers.LAUNCHERS]
    own = outside_package.environ(1, 2)
    assert launchers.detect(own).launcher == "maple"
    assert launchers.detect({**STEP, **own}).launcher == "maple"
    # Each of its tasks may start an agent of torchrun, as each task of srun may.
    assert launchers.detect({**TORCHRUN, **own}).launcher == "torchrun"
    reasons = {one.variable: one.reason for one in launchers.readings({**TORCHRUN, **own})}
    assert reasons["MAPLE_RANK"] == "describes the process that started torchrun"
    assert launchers.detect({**STEP, **own, "HPCTRAIN_LAUNCHER": "slurm"}).launcher == "slurm"


def test_backend_of_another_package_has_the_options_of_the_one_that_it_extends(installed):
    assert "counting" not in backends.names()
    installed()
    assert "counting" in backends.names()
    assert backends.options_of("counting") == "ddp"
    options = arguments.Options(backend="counting", ddp="compression=fp16")
    assert options.of_backend("counting")["compression"] == "fp16"
    with pytest.raises(UsageError, match="--horovod op=sum"):
        arguments.Options(backend="counting", horovod="op=sum").of_backend("counting")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"launcher": "import nothing_of_this_name"}, "its import fails: ModuleNotFoundError"),
        ({"launcher": "MapleLauncher = 3"}, "3 is not a subclass of hpctrain's Launcher"),
        ({"launcher": outside_package.CODE.replace('"maple"', '"oak"')}, "name = 'maple'"),
        ({"launcher": outside_package.CODE.replace('"slurm"\n', '"oak"\n')}, "before = 'oak'"),
        (
            {"entry_points": "[hpctrain.launchers]\nslurm = maple_launcher:MapleLauncher"},
            "the name slurm is taken",
        ),
    ],
)
def test_launcher_that_cannot_be_used_is_refused(installed, changes, found):
    installed(**changes)
    with pytest.raises(UsageError) as caught:
        launchers.survey({})
    assert caught.value.code == "HT119"
    assert found in caught.value.found
    assert "maple" in caught.value.found
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"backend": "import nothing_of_this_name"}, "its import fails: ModuleNotFoundError"),
        (
            {"entry_points": "[hpctrain.backends]\nddp = maple_backend:CountingDDP"},
            "the name ddp is taken",
        ),
    ],
)
def test_backend_that_cannot_be_used_is_refused(installed, changes, found):
    installed(**changes)
    with pytest.raises(HpctrainError, match=found) as caught:
        backends.check("ddp", None, None, None)
    assert caught.value.code == "HT119"


def test_explain_shows_the_error_of_a_package_that_cannot_be_used(tmp_path):
    folder = outside_package.install(tmp_path / "site", launcher="1 / 0")
    result = launches.start(
        [sys.executable, "-m", "hpctrain", "explain"],
        tmp_path,
        PYTHONPATH=f"{folder}:{launches.TOP}",
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("hpctrain: error: maple-tools adds maple = maple_launcher:")
    assert "its import fails: ZeroDivisionError: division by zero" in result.stderr
    assert "pip uninstall maple-tools" in result.stderr
