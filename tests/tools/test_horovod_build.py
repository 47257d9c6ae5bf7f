"""`hpctrain horovod build`: its plan, patches, cache and errors, and with --all the build."""

import errno
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.tools import horovod_build
from hpctrain.tools.horovod_build import wheel
from hpctrain.tools.horovod_build.plan import (
    Cuda,
    Plan,
    Torch,
    ask_torch,
    check_compiler,
    check_toolkit,
    cxx_standard,
    decide,
)

TOP = Path(__file__).resolve().parents[2]
TORCH = Torch("2.15.0+cu132", "13.2", "/torch/include", "/site/nvidia/nccl")
CPU = Plan(TORCH)
GPU = Plan(TORCH, Cuda(Path("/cuda"), "13.0"))
# The lines of Horovod 0.28.1 that the build patches, as in its files.
HOROVOD = {
    "CMakeLists.txt": """\
project(horovod CXX)
set(CMAKE_CXX_STANDARD 14)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
    find_package(MPI ${MPI_REQUIRED})
string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit)
endif()
""",
    "horovod/torch/CMakeLists.txt": """\
execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; \
print(get_python_inc())"
if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")
    set(CMAKE_CXX_STANDARD 14)
endif()
""",
    "cmake/Modules/FindPytorch.cmake": """\
from torch.utils.cpp_extension import CUDA_HOME; print(True if ((torch.version.cuda is not None) \
and (CUDA_HOME is not None)) else False)"
from torch.utils.cpp_extension import ROCM_HOME; print(True if ((torch.version.hip is not None) \
and (ROCM_HOME is not None)) else False)"
""",
    "horovod/common/ops/cuda/CMakeLists.txt": "set(CMAKE_CUDA_STANDARD 11)\n",
    "cmake/Modules/FindNCCL.cmake": "find_path(NCCL_INCLUDE_DIR\n        NAMES nccl.h\n",
    "third_party/flatbuffers/include/flatbuffers/stl_emulation.h": "  const size_type count_;\n",
    "horovod/runner/js_run.py": "from distutils.spawn import find_executable\n",
    "horovod/common/gloo/gloo_context.cc": """\
  device_attr.iface = gloo_iface_;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
    "horovod/common/gloo/gloo_controller.cc": "  global_ranks_.reserve(size_);\n",
    "horovod/torch/mpi_ops_v2.cc": (
        "void WaitAndClear(int handle) {\n  while (true) {\n    std::this_thread::yield();\n"
        "PYBIND11_MODULE(mpi_lib_v2, m) {\n"
    ),
    "horovod/common/operations.cc": """\
  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);
  Status status = process_set.tensor_queue.AddToTensorQueue(e, message);
""",
    "horovod/__init__.py": "__version__ = '0.28.1'\n",
}


@pytest.fixture
def extracted(tmp_path):
    folder = tmp_path / "horovod-0.28.1"
    for name, text in HOROVOD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that adds a fake program to the PATH, which has no other programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, script="exit 0", below=folder):
        path = below / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return add


def quiet(line):
    """Print nothing."""


def text(folder, name):
    return (folder / name).read_text()


def wheel_in(folder):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(b"whole")
    return path


@pytest.mark.parametrize(
    ("demand", "standard"),
    [
        ("#if !defined(_MSC_VER) && __cplusplus < 201703L\n#error C++17 or later", 17),
        ("#if (!defined(_MSVC_LANG) && __cplusplus < 202002L)\n#error C++20 or later", 20),
        ("#if __cplusplus < 202302L", 23),
        ("#pragma once", 20),
        (None, 20),
    ],
)
def test_cxx_standard_from_torch_headers(tmp_path, demand, standard):
    if demand is not None:
        (tmp_path / "ATen").mkdir()
        (tmp_path / "ATen" / "ATen.h").write_text(demand)
    assert cxx_standard(str(tmp_path)) == standard


@pytest.mark.parametrize(
    ("module", "word"),
    [("raise ModuleNotFoundError(\"No module named 'torch'\")", "No module"), ("", "import torch")],
)
def test_horovod_build_names_a_torch_that_cannot_be_imported(tmp_path, module, word):
    (tmp_path / "torch.py").write_text(module)
    with pytest.raises(HpctrainError) as caught:
        ask_torch({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert word in caught.value.found
    assert caught.value.code == "HT910"
    assert caught.value.fixes == (f"{sys.executable} -m pip install torch",)


@pytest.mark.parametrize("standard", [17, 20])
def test_cpu_build_patches_cxx_standard_and_no_gpu(extracted, standard):
    wheel.patch(extracted, CPU, standard, {})
    assert f"set(CMAKE_CXX_STANDARD {standard})" in text(extracted, "CMakeLists.txt")
    assert f"set(CMAKE_CXX_STANDARD {standard})" in text(extracted, "horovod/torch/CMakeLists.txt")
    assert text(extracted, "cmake/Modules/FindPytorch.cmake").count("print(False)") == 2
    assert "check_language(CUDA)" not in text(extracted, "CMakeLists.txt")
    for name in HOROVOD:
        assert "distutils" not in text(extracted, name)
        assert "CMAKE_CXX_STANDARD 14" not in text(extracted, name)
        assert "@" not in text(extracted, name)


def test_patches_of_horovod_over_gloo(extracted):
    wheel.patch(extracted, CPU, 20, {})
    context = text(extracted, "horovod/common/gloo/gloo_context.cc")
    chosen = "device_attr.iface = gloo_iface_ = global_context.gloo_iface_;"
    assert context.index(chosen) < context.index("CreateDevice(device_attr)")
    assert "global_ranks_.resize(size_)" in text(
        extracted, "horovod/common/gloo/gloo_controller.cc"
    )
    header = text(extracted, "third_party/flatbuffers/include/flatbuffers/stl_emulation.h")
    assert header == "  size_type count_;\n"
    mark = f"mended_by_hpctrain = {wheel.RECIPE}"
    assert mark in text(extracted, "horovod/__init__.py").splitlines()
    wait = text(extracted, "horovod/torch/mpi_ops_v2.cc")
    assert wait.index("int checks = 0;") < wait.index("while (true)") < wait.index("++checks < 200")
    assert "else std::this_thread::sleep_for(std::chrono::microseconds(50));" in wait


def test_gpu_build_patches_keep_cuda(extracted):
    wheel.patch(extracted, GPU, 20, {})
    assert "CUDA_HOME is not None" in text(extracted, "cmake/Modules/FindPytorch.cmake")
    assert "check_language(CUDA)" in text(extracted, "CMakeLists.txt")
    kernels = text(extracted, "horovod/common/ops/cuda/CMakeLists.txt")
    assert kernels == "set(CMAKE_CUDA_STANDARD 17)\n"
    assert text(extracted, "cmake/Modules/FindNCCL.cmake").splitlines()[:3] == [
        'set(NCCL_INCLUDE_DIR "/site/nvidia/nccl/include")',
        'set(NCCL_LIBRARY "/site/nvidia/nccl/lib/libnccl.so.2")',
        "find_path(NCCL_INCLUDE_DIR",
    ]


def test_gpu_build_uses_the_nccl_that_the_user_set(extracted):
    wheel.patch(extracted, GPU, 20, {"HOROVOD_NCCL_HOME": "/nccl"})
    name = "cmake/Modules/FindNCCL.cmake"
    assert text(extracted, name) == HOROVOD[name]


def test_mpi_compiler_is_patched_into_cmake(extracted):
    wheel.patch(extracted, replace(CPU, mpi="/mpi/bin/mpicxx"), 20, {})
    lines = [line.strip() for line in text(extracted, "CMakeLists.txt").splitlines()]
    first = lines.index('set(MPI_CXX_COMPILER "/mpi/bin/mpicxx")')
    assert lines[first + 1] == "find_package(MPI ${MPI_REQUIRED})"


@pytest.mark.parametrize("name", [*HOROVOD][:3])
def test_patches_refuse_another_source_than_the_release(extracted, name):
    (extracted / name).write_text("set(CMAKE_CXX_STANDARD 98)\n")
    with pytest.raises(HpctrainError, match="does not contain") as caught:
        wheel.patch(extracted, CPU, 20, {})
    assert name in caught.value.found
    assert caught.value.code == "HT914"


def test_wheel_cache_folder_differs_by_torch_cuda_and_mpi():
    plans = [
        CPU,
        GPU,
        Plan(replace(TORCH, version="2.15.0+cpu")),
        Plan(replace(TORCH, version="2.6.0a0+a/b c")),
        replace(CPU, mpi="/usr/bin/mpicxx", mpi_flags="g++ -I/opt/openmpi/4.1.4"),
        replace(CPU, mpi="/usr/bin/mpicxx", mpi_flags="g++ -I/opt/openmpi/5.0.11"),
    ]
    folders = {wheel.place(plan, {"HPCTRAIN_CACHE": "/some/where"}) for plan in plans}
    assert len(folders) == len(plans)
    for folder in folders:
        assert folder.parent == Path("/some/where/horovod")
        assert " " not in folder.name
    assert wheel.place(CPU, {}).parent == Path.home() / ".cache" / "hpctrain" / "horovod"


@pytest.fixture
def toolkit(programs, tmp_path):
    """Make a fake CUDA 13.0; return the environment with it in $CUDA_HOME."""
    home = tmp_path / "cuda"
    programs("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'", home / "bin")
    return {"CUDA_HOME": str(home), "PATH": os.environ["PATH"]}


@pytest.mark.parametrize(
    ("cuda", "built_with", "on_gpus"),
    [(None, "13.2", True), (True, "13.2", True), (False, "13.2", False), (None, None, False)],
)
def test_build_with_cuda_where_torch_and_machine_have_it(toolkit, cuda, built_with, on_gpus):
    plan = decide(replace(TORCH, cuda=built_with), cuda, False, toolkit)
    assert (plan.cuda is not None) is on_gpus


@pytest.mark.parametrize("built_with", [None, "12.8"])
def test_build_refuses_cuda_that_differs_from_torchs(toolkit, built_with):
    torch = replace(TORCH, cuda=built_with)
    with pytest.raises(UsageError) as caught:
        decide(torch, True, False, toolkit)
    assert "13.0" in caught.value.found
    assert caught.value.code == "HT911"
    assert "hpctrain horovod build --cpu" in caught.value.fixes
    assert decide(torch, None, False, toolkit).cuda is None


def test_cuda_toolkit_found_behind_a_link_to_nvcc(toolkit, tmp_path):
    nvcc = Path(toolkit.pop("CUDA_HOME")) / "bin" / "nvcc"
    (tmp_path / "bin" / "nvcc").symlink_to(nvcc)
    assert decide(TORCH, None, False, toolkit).cuda == Cuda(tmp_path / "cuda", "13.0")


def test_mpi_of_mpi_home_or_of_the_path(programs, tmp_path):
    first = programs("mpicxx", "echo g++ -I/usr/lib/mpich")
    other = programs("mpicxx", "echo g++ -I/opt/openmpi", tmp_path / "open" / "bin")
    plan = decide(TORCH, False, True, os.environ)
    assert (plan.mpi, plan.mpi_flags) == (str(first), "g++ -I/usr/lib/mpich\n")
    plan = decide(TORCH, False, True, {**os.environ, "MPI_HOME": str(tmp_path / "open")})
    assert (plan.mpi, plan.mpi_flags) == (str(other), "g++ -I/opt/openmpi\n")


def test_mpi_without_mpicxx_is_refused(programs):
    programs("mpirun")
    with pytest.raises(HpctrainError) as caught:
        decide(TORCH, False, True, os.environ)
    assert "no mpicxx" in caught.value.found
    assert caught.value.code == "HT911"
    assert "libopenmpi-dev" in caught.value.fixes[0]


@pytest.mark.parametrize(
    ("scripts", "word"),
    [
        ({}, "no C++ compiler"),
        ({"g++": "exit 0"}, "no make"),
        ({"g++": "echo unknown option -std; exit 1", "make": "exit 0"}, "C++20: unknown option"),
    ],
)
def test_missing_compiler_or_make_is_named_with_the_package(programs, scripts, word):
    for name, script in scripts.items():
        programs(name, script)
    with pytest.raises(HpctrainError) as caught:
        check_compiler(20, os.environ)
    assert word in caught.value.found
    assert caught.value.code == "HT912"
    assert any("module load gcc" in fix for fix in caught.value.fixes)


def test_incomplete_toolkit_is_refused_before_anything_is_compiled(toolkit, programs):
    cuda = decide(TORCH, None, False, toolkit).cuda
    programs("nvcc", '[ "$1 $2" = "-ccbin g++-12" ]', cuda.home / "bin")
    check_toolkit(cuda, {**toolkit, "CUDAHOSTCXX": "g++-12"})
    script = "echo In file; echo 'probe.cu:2: fatal error: cuda_runtime.h: No such file'; exit 1"
    programs("nvcc", script, cuda.home / "bin")
    with pytest.raises(HpctrainError) as caught:
        check_toolkit(cuda, toolkit)
    assert caught.value.found.endswith(f"kernel: {script.split(chr(39))[1]}")
    assert caught.value.fixes[0] == "hpctrain horovod build --cpu"


def test_cxx_variable_chooses_the_compiler(programs):
    programs("g++")
    programs("make")
    with pytest.raises(HpctrainError, match=re.escape("no C++ compiler (my-g")):
        check_compiler(20, {"PATH": os.environ["PATH"], "CXX": "my-g++ -O1"})


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Replace the compilation; return how often it was done, and the environment of a cache."""
    done = []
    monkeypatch.setattr(wheel, "check_compiler", lambda standard, env: None)
    monkeypatch.setattr(wheel, "check_toolkit", lambda cuda, env: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def compile_wheel(plan, standard, env, work, print_line):
        done.append("compile")
        (work / "log").touch()
        return wheel_in(work / "wheels")

    monkeypatch.setattr(wheel, "_compile", compile_wheel)
    return done, {"HPCTRAIN_CACHE": str(tmp_path / "cache")}


def test_wheel_cache_not_writable_is_refused_before_the_build(compiled, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(HpctrainError, match="cannot write") as caught:
        wheel.get(CPU, compiled[1], quiet)
    assert caught.value.code == "HT916"
    assert caught.value.fixes == ("export HPCTRAIN_CACHE=FOLDER",)
    assert not compiled[0]


def test_wheel_cache_has_no_partial_wheel_after_disk_full(compiled, monkeypatch):
    def write_half(source, target):
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", write_half)
    with pytest.raises(HpctrainError, match="No space left") as caught:
        wheel.get(CPU, compiled[1], quiet)
    built = shlex.split(caught.value.fixes[1])[2]
    assert Path(built).read_bytes() == b"whole"
    assert [path.name for path in wheel.place(CPU, compiled[1]).iterdir()] == []


@pytest.mark.parametrize(
    ("error", "count"), [(HpctrainError.of_text("HT915", "failed"), 1), (KeyboardInterrupt(), 0)]
)
def test_build_folder_is_kept_after_failure_only(compiled, tmp_path, monkeypatch, error, count):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(wheel, "_compile", fail)
    with pytest.raises(type(error)):
        wheel.get(CPU, compiled[1], quiet)
    assert len(list(tmp_path.glob("hpctrain-horovod-*"))) == count
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_build_prints_percent_compiled_and_returns_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "_SECONDS_BETWEEN_LINES", 0.1)
    lines = []
    script = "echo '[ 12%] Building CXX object'; sleep 1.5; exit 3"
    assert wheel.run(["sh", "-c", script], os.environ, tmp_path / "log", lines.append) == 3
    assert any("12 % compiled" in line for line in lines)


@pytest.mark.slow
def test_unreachable_package_index_is_an_error_with_a_fix(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    env |= {"PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    with pytest.raises(HpctrainError, match="could not download") as caught:
        wheel._compile(CPU, 20, env, tmp_path, quiet)
    assert caught.value.code == "HT913"
    assert "--wheel-only on a login node" in caught.value.fixes[0]
    assert str(tmp_path / "log") in caught.value.fixes[-1]


def test_failed_compilation_shows_its_first_error(tmp_path):
    log = tmp_path / "log"
    lines = ["fine"] * 50 + ["x.cc:1:2: error: no such thing"] + ["noise"] * 50
    log.write_text("\n".join(lines))
    excerpt = wheel.excerpt(log)
    assert excerpt.splitlines()[1].endswith("error: no such thing")
    assert len(excerpt.splitlines()) < 20


@pytest.mark.slow
def test_pip_refusal_is_an_error_with_a_fix(tmp_path):
    with pytest.raises(HpctrainError, match="did not install") as caught:
        horovod_build._install(tmp_path / "no-wheel.whl", CPU, os.environ, quiet)
    assert "no-wheel.whl" in caught.value.found
    assert caught.value.code == "HT917"
    assert "--wheel-only" in caught.value.fixes[1]


@pytest.mark.slow
def test_trial_of_horovod_names_a_failing_rank_and_ends(tmp_path):
    """Fail rank 1; rank 0 would wait for it for ever."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch.py").write_text(
        "import os, time\nif os.environ['HOROVOD_RANK'] == '1': raise ImportError('_ZN5torch')\n"
        "time.sleep(1000)"
    )
    facts, why = horovod_build.try_out({**os.environ, "PYTHONPATH": f"{tmp_path}:{TOP}"})
    assert not facts
    assert "_ZN5torch" in why


@pytest.mark.parametrize(
    "arguments",
    [["horovod"], ["horovod", "build", "--cpu", "--cuda"], ["horovod", "build", "--mpi=x"]],
)
def test_horovod_build_wrong_use_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: hpctrain horovod" in capsys.readouterr().err


FACTS = {
    "version": "0.28.1", "torch": TORCH.version, "gloo": True, "mpi": False, "nccl": False,
    "recipe": wheel.RECIPE,
}  # fmt: skip


@pytest.fixture
def simulated(compiled, monkeypatch):
    """Simulate the build; return the steps that were done, and the facts of what is installed."""
    done, env = compiled
    state = {"done": done, "facts": None}  # None: Horovod is not installed
    found = importlib.util.find_spec
    monkeypatch.setenv("HPCTRAIN_CACHE", env["HPCTRAIN_CACHE"])
    monkeypatch.setattr(horovod_build, "ask_torch", lambda env: TORCH)

    def find_spec(name):
        return None if name == "horovod" and state["facts"] is None else found(name)

    def run(command, env, log, print_line):
        if "--force-reinstall" in command:
            done.append("install")
            state["facts"] = FACTS
        return 0

    def try_out(env):
        done.append("check")
        return state["facts"], "" if state["facts"] else "\n    undefined symbol"

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(wheel, "run", run)
    monkeypatch.setattr(horovod_build, "try_out", try_out)
    return state


def run_build(*options):
    return main(["horovod", "build", "--cpu", *options])


def test_second_build_only_checks_or_installs_the_cached_wheel(simulated, capsys):
    assert run_build() == 0
    assert run_build() == 0
    assert simulated["done"] == ["compile", "install", "check", "check"]
    assert "the installed Horovod fits" in capsys.readouterr().err
    simulated["facts"] = None
    assert run_build() == 0
    assert simulated["done"][4:] == ["install", "check"]
    assert "found" in capsys.readouterr().err


def test_wheel_cache_may_be_read_only(simulated, tmp_path):
    run_build("--wheel-only")
    (folder,) = (tmp_path / "cache" / "horovod").iterdir()
    before = sorted(folder.iterdir())
    assert run_build() == 0
    assert sorted(folder.iterdir()) == before


def test_wheel_only_prints_only_the_path(simulated, capsys):
    assert run_build("--wheel-only") == 0
    path = Path(capsys.readouterr().out.rstrip("\n"))
    assert path.suffix == ".whl"
    assert path.is_file()
    assert simulated["done"] == ["compile"]


@pytest.mark.parametrize(
    ("facts", "steps"),
    [
        ({**FACTS, "mpi": True}, ["check"]),
        ({**FACTS, "gloo": False}, ["check", "compile", "install", "check"]),
        ({**FACTS, "torch": "2.14.1+cu130"}, ["check", "compile", "install", "check"]),
        ({**FACTS, "recipe": 0}, ["check", "compile", "install", "check"]),
        ({}, ["check", "compile", "install", "check"]),
    ],
    ids=["fits", "no gloo", "another torch", "built elsewhere", "broken"],
)
def test_installed_horovod_is_kept_if_it_fits(simulated, facts, steps):
    simulated["facts"] = facts
    assert run_build() == 0
    assert simulated["done"] == steps


def test_installed_wheel_that_does_not_import_is_an_error(simulated, monkeypatch, capsys):
    monkeypatch.setattr(wheel, "run", lambda *arguments: 0)
    simulated["facts"] = {}
    assert run_build() == 1
    output = capsys.readouterr().err
    assert "undefined symbol" in output
    assert "fix:" in output
    assert "hpctrain explain HT918" in output


def test_horovod_build_never_imports_torch_or_horovod():
    code = (
        "import sys, hpctrain.tools.horovod_build\n"
        "sys.exit('torch' in sys.modules or 'horovod' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_installed_horovod_works_with_this_torch(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build --cpu --mpi")
    facts, why = horovod_build.try_out(os.environ)
    assert facts, why
    assert (facts["version"], facts["gloo"], facts["mpi"]) == ("0.28.1", True, True)
    assert facts["torch"] == ask_torch(os.environ).version


@pytest.mark.slow
def test_wheel_built_from_the_package_index(tmp_path, lacking):
    """Download and compile Horovod with an empty cache, which takes minutes."""
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build --cpu --mpi")
    env = {**os.environ, "HPCTRAIN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "hpctrain", "horovod", "build", "--cpu", "--wheel-only"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    with zipfile.ZipFile(done.stdout.strip()) as archive:
        archive.extractall(site)
    facts, why = horovod_build.try_out({**os.environ, "PYTHONPATH": f"{site}:{TOP}"})
    assert facts, why
    assert (facts["gloo"], facts["mpi"], facts["nccl"]) == (True, False, False)
