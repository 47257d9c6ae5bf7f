"""Which starts import torch once for all ranks of a host, and what they import."""

import subprocess
import sys
from importlib import metadata

import launches
import pytest

from hpctrain.launch import script_source, warm_imports
from hpctrain.process import read_once


@pytest.fixture
def decide(tmp_path):
    """Return a function that writes files, and decides for a command."""

    def decide(files, words=("train.py",), ranks=2, cores=None, **env):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        environs = [{**env, "PATH": "/bin", "RANK": str(rank)} for rank in range(ranks)]
        command = [sys.executable, *words]
        source = script_source.read(command, str(tmp_path), environs[0])
        return warm_imports.of_command(source, command, str(tmp_path), environs, cores)

    return decide


@pytest.mark.parametrize(
    ("files", "more"),
    [
        ({"train.py": "import torch"}, []),
        ({"train.py": "def f():\n    from torch import nn"}, []),
        ({"train.py": "import lightning as L"}, []),
        ({"train.py": "import horovod.torch as hvd"}, []),
        ({"train.py": "from hpctrain import Session"},
         ["hpctrain.training.session", "torch._dynamo"]),
        ({"train.py": "import torch\nopt = torch.optim.SGD"}, ["torch._dynamo"]),
        ({"train.py": "import torch.optim as optim"}, ["torch._dynamo"]),
        ({"train.py": "import torch, torchvision, wandb, mpi4py"}, ["torchvision"]),
        ({"train.py": "import model", "model.py": "import torch"}, []),
        ({"train.py": "from nets import big", "nets/__init__.py": "",
          "nets/big.py": "from .a import b", "nets/a.py": "import torch"}, []),
        ({"train.py": "import torch\nimport os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'"}, []),
        ({"train.py": "import torch",
          "other.py": "import os\nos.environ['OMP_NUM_THREADS'] = '1'"}, []),
    ],
)  # fmt: skip
def test_torch_is_imported_once_for_a_script_that_imports_it(decide, files, more):
    imports = decide(files, cores=[{0}, {1}])
    assert list(imports.modules) == ["numpy", "torch", "hpctrain.process.read_once", *more]
    assert list(imports.python) == [sys.executable]
    assert (imports.environ, imports.cores) == ({"PATH": "/bin"}, {0})


def test_package_without_torch_in_its_first_file_is_followed(decide):
    files = {
        "lab/__init__.py": "",
        "lab/train/__init__.py": "",
        "lab/train/__main__.py": "from ..model import Net",
        "lab/model.py": "import torch",
    }
    assert decide(files, ["-m", "lab.train"])
    assert decide({"lab/train/__main__.py": "from .. import nothing"}, ["-m", "lab.train"]) is None


def test_options_of_python_for_its_path_are_those_of_the_ranks(decide):
    imports = decide({"lab.py": "import torch"}, ["-P", "-m", "lab"])
    assert list(imports.python) == [sys.executable, "-P"]


def test_package_in_pythonpath_is_followed(decide, tmp_path):
    files = {"src/lab.py": "import torch", "scripts/train.py": "import lab"}
    assert decide(files, ["scripts/train.py"], PYTHONPATH=str(tmp_path / "src"))
    assert decide({}, ["scripts/train.py"]) is None


@pytest.mark.parametrize(
    ("files", "words", "ranks"),
    [
        ({"train.py": "import torch"}, ["train.py"], 1),
        ({"train.py": "import json"}, ["train.py"], 2),
        ({"train.py": "import hpctrain; hpctrain.detect()"}, ["train.py"], 2),
        ({"train.py": "text = 'import torch'"}, ["train.py"], 2),
        ({"train.py": "import horovod.tensorflow"}, ["train.py"], 2),
        ({"train.py": "import torch"}, ["-O", "train.py"], 2),
        ({"train.py": "import torch"}, ["-c", "import torch"], 2),
        ({}, ["missing.py"], 2),
        ({"train.py": "import torch ("}, ["train.py"], 2),
    ],
)
def test_nothing_is_imported_for_ranks_that_do_not_need_it(decide, capsys, files, words, ranks):
    assert decide(files, words, ranks) is None
    assert capsys.readouterr().err == ""


def test_another_python_or_a_choice_of_the_user_leaves_the_import_to_each_rank(decide, tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    environs = [{}, {}]
    command = ["python3.9", "train.py"]
    source = script_source.read(command, str(tmp_path), {})
    assert warm_imports.of_command(source, command, str(tmp_path), environs, None) is None
    assert decide({}, HPCTRAIN_FRESH_INTERPRETERS="1") is None


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['OMP_NUM_THREADS'] = '4'",
        "os.environ.setdefault('MKL_NUM_THREADS', '4')",
        "os.environ.update(PYTHONHASHSEED='0')",
        "os.environ.update({'A': '1', 'TORCH_LOGS': 'dynamo'})",
        "os.environ |= {'KMP_BLOCKTIME': '0'}",
        "os.putenv('PYTORCH_CUDA_ALLOC_CONF', 'backend:cudaMallocAsync')",
        "del os.environ['OPENBLAS_NUM_THREADS']",
        "os.environ.pop('LD_LIBRARY_PATH', None)",
    ],
)
def test_script_that_sets_a_variable_that_is_read_once_imports_torch_itself(decide, capsys, line):
    assert decide({"train.py": f"import os\n{line}\nimport torch\n"}) is None
    shown = capsys.readouterr().err
    assert shown.startswith("hpctrain: each rank imports torch itself: train.py, line 2, sets ")
    assert (
        decide({"train.py": "import settings, torch", "settings.py": f"import os\n{line}"}) is None
    )
    assert "settings.py, line 2, sets " in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "LD_PRELOAD", "NSYS_MPI_STORE_TEAMS"),
        *("CUDA_INJECTION64_PATH", "COVERAGE_PROCESS_START", "PYDEVD_LOAD_VALUES_ASYNC"),
    ],
)
def test_variable_that_acts_at_the_start_of_a_process_makes_new_interpreters(decide, capsys, name):
    assert decide({"train.py": "import torch"}, **{name: "value"}) is None
    assert f"each rank imports torch itself: {name} is set" in capsys.readouterr().err


def test_plugin_of_torch_makes_new_interpreters(decide, capsys, monkeypatch):
    found = [metadata.EntryPoint("other_device", "package:load", "torch.backends")]
    monkeypatch.setattr(warm_imports.metadata, "entry_points", lambda group: found)
    assert decide({"train.py": "import torch"}) is None
    assert "torch loads the backend other_device" in capsys.readouterr().err


def test_variable_that_was_changed_too_late_is_named(monkeypatch):
    monkeypatch.setattr(read_once, "at_fork", {"OMP_NUM_THREADS": "1", "PYTHONPATH": "a"})
    env = {"OMP_NUM_THREADS": "2", "PYTHONPATH": "a", "MKL_NUM_THREADS": "3", "OTHER": "4"}
    assert read_once.changed(env) == ["MKL_NUM_THREADS", "OMP_NUM_THREADS"]
    monkeypatch.setattr(read_once, "at_fork", None)
    assert read_once.changed(env) == []


TORCH = """
import os, random
os.environ[os.environ.get("LATE", "NOTHING")] = "7"
import numpy, torch
print(os.environ["RANK"], torch.rand(1).item(), numpy.random.rand(), random.random(),
      torch.initial_seed(), torch.get_num_threads(), type(torch.ones(2) @ torch.ones(2)).__name__)
"""


def test_forked_ranks_of_torch_draw_different_numbers(tmp_path):
    (tmp_path / "train.py").write_text(TORCH)
    command = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node", "3", "train.py"]
    done = subprocess.run(
        command, env=launches.environ(), capture_output=True, text=True, timeout=120, check=True
    )
    drawn = [line.split()[1:] for line in done.stdout.splitlines()]
    assert len(drawn) == 3
    assert "imports torch itself" not in done.stderr
    for place in range(1, 5):
        assert len({words[place] for words in drawn}) == 3
    assert {words[5] for words in drawn} == {"1"}


@pytest.mark.slow
def test_forked_ranks_train_the_same_bits(tmp_path):
    written = []
    for more in ([], ["--fresh-interpreters"]):
        words = [
            *launches.PARITY,
            "--seed",
            "3",
            "--max-steps",
            "200",
            "--run-dir",
            f"run{len(more)}",
        ]
        command = [launches.PYTHON, "-m", "hpctrain", "run", *more, "--nproc-per-node", "3"]
        launches.start([*command, str(launches.EXAMPLE), *words], tmp_path)
        newest = tmp_path / f"run{len(more)}" / "checkpoints" / "step-00000200"
        written.append([(newest / name).read_bytes() for name in ("model.pt", "optimizer.pt")])
    assert written[0] == written[1]


LATE = """
import os
os.environ["OMP_NUM" + "_THREADS"] = "2"
import hpctrain
with hpctrain.Session():
    pass
"""


def test_session_names_a_variable_that_was_set_too_late(tmp_path):
    (tmp_path / "train.py").write_text(LATE)
    command = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, env=launches.environ(), capture_output=True, text=True, timeout=120, check=True
    )
    assert "OMP_NUM_THREADS changed after torch was imported for all ranks" in done.stderr
    assert "--fresh-interpreters" in done.stderr
