"""`hpctrain horovod build`: its plan, patches, cache and errors, and with --all the build."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.tools import horovod_build
from hpctrain.tools.horovod_build import (
    build_commands,
    cache,
    installed,
    source,
    toolchain,
    wheel_build,
)
from hpctrain.tools.horovod_build.torch_facts import Torch, ask_torch, cxx_standard
from hpctrain.tools.horovod_build.wheel_build import Plan

TORCH = Torch("2.15.0+cu132", "13.2", True, Path("/torch/include"), None)
CPU = Plan(TORCH, None, None)
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
    "horovod/runner/js_run.py": "from distutils.spawn import find_executable\n",
    "horovod/common/gloo/gloo_context.cc": """\
  device_attr.iface = gloo_iface_;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
    "horovod/common/gloo/gloo_controller.cc": "  global_ranks_.reserve(size_);\n",
    "horovod/torch/mpi_ops_v2.cc": (
        "void WaitAndClear(int handle) {\n  while (true) {\n    std::this_thread::yield();\n"
    ),
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


def wheel_in(folder, content=b"whole"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/metadata.json", content)
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
    assert cxx_standard(tmp_path) == standard


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
    source.apply(source.patches(standard, cuda=False), extracted)
    assert f"set(CMAKE_CXX_STANDARD {standard})" in text(extracted, "CMakeLists.txt")
    assert f"set(CMAKE_CXX_STANDARD {standard})" in text(extracted, "horovod/torch/CMakeLists.txt")
    assert text(extracted, "cmake/Modules/FindPytorch.cmake").count("print(False)") == 2
    assert "check_language(CUDA)" not in text(extracted, "CMakeLists.txt")
    for name in HOROVOD:
        assert "distutils" not in text(extracted, name)
        assert "CMAKE_CXX_STANDARD 14" not in text(extracted, name)


def test_patches_of_horovod_over_gloo(extracted):
    source.apply(source.patches(20, cuda=False), extracted)
    context = text(extracted, "horovod/common/gloo/gloo_context.cc")
    chosen = "device_attr.iface = gloo_iface_ = global_context.gloo_iface_;"
    assert context.index(chosen) < context.index("CreateDevice(device_attr)")
    assert "global_ranks_.resize(size_)" in text(
        extracted, "horovod/common/gloo/gloo_controller.cc"
    )
    assert "mended_by_hpctrain = True" in text(extracted, "horovod/__init__.py").splitlines()
    wait = text(extracted, "horovod/torch/mpi_ops_v2.cc")
    assert wait.index("int checks = 0;") < wait.index("while (true)") < wait.index("++checks < 200")
    assert "else std::this_thread::sleep_for(std::chrono::microseconds(50));" in wait


def test_gpu_build_patches_keep_cuda(extracted):
    source.apply(source.patches(20, cuda=True, nccl=Path("/site/nvidia/nccl")), extracted)
    assert "CUDA_HOME is not None" in text(extracted, "cmake/Modules/FindPytorch.cmake")
    assert "check_language(CUDA)" in text(extracted, "CMakeLists.txt")
    kernels = text(extracted, "horovod/common/ops/cuda/CMakeLists.txt")
    assert kernels == "set(CMAKE_CUDA_STANDARD 17)\n"
    assert text(extracted, "cmake/Modules/FindNCCL.cmake").splitlines()[:3] == [
        'set(NCCL_INCLUDE_DIR "/site/nvidia/nccl/include")',
        'set(NCCL_LIBRARY "/site/nvidia/nccl/lib/libnccl.so.2")',
        "find_path(NCCL_INCLUDE_DIR",
    ]


def test_mpi_compilers_are_patched_into_cmake(extracted):
    mpi = (Path("/mpi/bin/mpicxx"), Path("/mpi/bin/mpicc"))
    source.apply(source.patches(20, False, mpi), extracted)
    lines = [line.strip() for line in text(extracted, "CMakeLists.txt").splitlines()]
    first = lines.index('set(MPI_CXX_COMPILER "/mpi/bin/mpicxx")')
    assert lines[first + 1 :][:2] == [
        'set(MPI_C_COMPILER "/mpi/bin/mpicc")',
        "find_package(MPI ${MPI_REQUIRED})",
    ]


@pytest.mark.parametrize("name", [*HOROVOD][:3])
def test_patches_refuse_another_source_than_the_release(extracted, name):
    (extracted / name).write_text("set(CMAKE_CXX_STANDARD 98)\n")
    with pytest.raises(HpctrainError, match="has no") as caught:
        source.apply(source.patches(20, cuda=False), extracted)
    assert name in caught.value.found
    assert caught.value.code == "HT914"


@pytest.mark.parametrize(
    ("url", "key"),
    [
        (
            "file:///home/ada/cache/horovod/0.28.1-3-torch2.15.0-cpu/horovod-0.28.1.whl",
            "0.28.1-3-torch2.15.0-cpu",
        ),
        ("file:///scratch/wheels/horovod-0.28.1-cp311-cp311-linux_x86_64.whl", ""),
        ("file:///horovod-0.28.1.whl", ""),
        ("https://git.example/horovod/horovod.git", ""),
    ],
)
def test_only_a_wheel_of_the_cache_has_a_key(monkeypatch, url, key):
    class Distribution:
        def read_text(self, name):
            return json.dumps({"url": url})

    monkeypatch.setattr(installed.importlib.metadata, "distribution", lambda name: Distribution())
    assert installed.key() == key


def test_wheel_cache_key_differs_by_torch_cuda_and_mpi():
    plans = [
        CPU,
        Plan(replace(TORCH, version="2.15.0+cpu"), None, None),
        Plan(replace(TORCH, version="2.14.1+cu132"), None, None),
        Plan(replace(TORCH, cxx11_abi=False), None, None),
        Plan(TORCH, toolchain.Cuda(Path("/cuda"), "13.0"), None),
        Plan(TORCH, None, toolchain.Mpi("openmpi", "4.1.4", ())),
        Plan(TORCH, None, toolchain.Mpi("openmpi", "5.0.11", ())),
        Plan(TORCH, None, toolchain.Mpi("mpich", "4.1.4", ())),
    ]
    assert len(set(map(horovod_build.key, plans))) == len(plans)


def test_wheel_cache_key_is_one_folder_name():
    odd = Plan(replace(TORCH, version="2.6.0a0+a/b c"), None, toolchain.Mpi("mpi", "1/2", ()))
    name = horovod_build.key(odd)
    assert (name, len(name)) == (Path(name).name, len(name.encode()))
    assert " " not in name
    assert horovod_build.key(CPU) == horovod_build.key(CPU)


@pytest.fixture
def toolkit(programs, tmp_path):
    """Make a fake CUDA 13.0; return the environment with it in $CUDA_HOME."""
    home = tmp_path / "cuda"
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime.h").touch()
    programs("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'", home / "bin")
    return {"CUDA_HOME": str(home), "PATH": os.environ["PATH"]}


@pytest.mark.parametrize(
    ("cuda", "built_with", "on_gpus"),
    [(None, "13.2", True), (True, "13.2", True), (False, "13.2", False), (None, None, False)],
)
def test_build_with_cuda_where_torch_and_machine_have_it(toolkit, cuda, built_with, on_gpus):
    lines = []
    torch = replace(TORCH, cuda=built_with)
    plan = horovod_build.decide(torch, cuda, False, toolkit, lines.append)
    assert (plan.cuda is not None) is on_gpus
    assert ("GPUs over NCCL" if on_gpus else "on CPUs") in lines[0]


@pytest.mark.parametrize("built_with", [None, "12.8"])
def test_build_refuses_cuda_that_differs_from_torchs(toolkit, built_with):
    torch = replace(TORCH, cuda=built_with)
    with pytest.raises(UsageError) as caught:
        horovod_build.decide(torch, True, False, toolkit, quiet)
    assert "13.0" in caught.value.found
    assert caught.value.code == "HT911"
    assert "hpctrain horovod build --cpu" in caught.value.fixes
    assert horovod_build.decide(torch, None, False, toolkit, quiet).cuda is None


def test_cuda_toolkit_found_behind_a_link_to_nvcc(toolkit, tmp_path):
    nvcc = Path(toolkit.pop("CUDA_HOME")) / "bin" / "nvcc"
    (tmp_path / "bin" / "nvcc").symlink_to(nvcc)
    assert toolchain.find_cuda(toolkit) == toolchain.Cuda(tmp_path / "cuda", "13.0")


OPENMPI = 'case "$1" in --showme:version) echo "mpicxx: Open MPI 4.1.4 (Language: C++)";; esac'
MPICH = 'case "$1" in -v) echo "mpicxx for MPICH version 4.0.2";; *) exit 1;; esac'
INTEL = MPICH.replace("MPICH version 4.0.2", "the Intel(R) MPI Library 2021.19 for Linux*")


@pytest.mark.parametrize(
    ("script", "kind", "version"),
    [
        (OPENMPI, "openmpi", "4.1.4"),
        (MPICH, "mpich", "4.0.2"),
        (INTEL, "intelmpi", "2021.19"),
        ("exit 1", "mpi", ""),
    ],
)
def test_mpi_kind_and_version_from_mpicxx(programs, script, kind, version):
    compiler = programs("mpicxx", script)
    found = toolchain.find_mpi(os.environ)
    assert (found.kind, found.version, found.compilers) == (kind, version, (compiler,))


def test_mpi_of_mpirun_is_preferred(programs):
    programs("mpirun", "echo 'HYDRA build details:'")
    programs("mpicxx", OPENMPI)
    compilers = (programs("mpicxx.mpich", MPICH), programs("mpicc.mpich"))
    assert toolchain.find_mpi(os.environ) == toolchain.Mpi("mpich", "4.0.2", compilers)


def test_mpi_home_chooses_the_mpi(programs, tmp_path):
    programs("mpirun", "echo 'HYDRA build details:'")
    programs("mpicxx", MPICH)
    compiler = programs("mpicxx", OPENMPI, tmp_path / "open" / "bin")
    env = {**os.environ, "MPI_HOME": str(tmp_path / "open")}
    assert toolchain.find_mpi(env).compilers == (compiler,)


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_mpi_without_mpicxx_is_refused(programs, home):
    programs("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    programs("mpicxx", MPICH)
    env = {**os.environ, **({"MPI_HOME": home} if home else {})}
    with pytest.raises(HpctrainError) as caught:
        toolchain.find_mpi(env)
    assert "no mpicxx" in caught.value.found
    assert caught.value.code == "HT911"
    assert "libopenmpi-dev" in caught.value.fixes[0]


@pytest.mark.parametrize(
    ("scripts", "word"),
    [
        ({}, "no C++ compiler"),
        ({"g++": "exit 0"}, "no make"),
        ({"g++": "echo g++ 8.5; exit 1", "make": "exit 0"}, "does not support C++20"),
    ],
)
def test_missing_compiler_or_make_is_named_with_the_package(programs, scripts, word):
    for name, script in scripts.items():
        programs(name, script)
    with pytest.raises(HpctrainError) as caught:
        toolchain.check_compiler(20, {"PATH": os.environ["PATH"]})
    assert word in caught.value.found
    assert caught.value.code == "HT912"
    assert any("module load gcc" in fix for fix in caught.value.fixes)


def test_cxx_variable_chooses_the_compiler(programs):
    programs("g++")
    programs("make")
    with pytest.raises(HpctrainError, match="no C\\+\\+ compiler: my-g"):
        toolchain.check_compiler(20, {"PATH": os.environ["PATH"], "CXX": "my-g++ -O1"})


def test_wheel_cache_ignores_a_damaged_wheel(tmp_path):
    assert cache.find(tmp_path / "none") is None
    wheel = wheel_in(tmp_path)
    assert cache.find(tmp_path) == wheel
    content = wheel.read_bytes()
    for broken in (content[:-30], content[:10], b"", content.replace(b"whole", b"wrong", 1)):
        wheel.write_bytes(broken)
        assert cache.find(tmp_path) is None


def test_wheel_cache_folder():
    assert cache.folder("key", {"HPCTRAIN_CACHE": "/some/where"}) == Path("/some/where/horovod/key")
    assert cache.folder("key", {}) == Path.home() / ".cache" / "hpctrain" / "horovod" / "key"


def test_wheel_cache_not_writable_is_refused_before_the_build(tmp_path):
    (tmp_path / "file").touch()
    place = cache.folder("key", {"HPCTRAIN_CACHE": str(tmp_path / "file")})
    with pytest.raises(HpctrainError, match="cannot write") as caught, cache.locked(place, quiet):
        pytest.fail("it went on")
    assert caught.value.code == "HT916"
    assert caught.value.fixes == ("export HPCTRAIN_CACHE=FOLDER",)


def test_wheel_cache_has_no_partial_wheel_after_disk_full(tmp_path, monkeypatch):
    def write_half(source, target):
        target.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(shutil, "copyfileobj", write_half)
    wheel = wheel_in(tmp_path)
    with pytest.raises(HpctrainError, match="No space left") as caught:
        cache.store(wheel, place)
    assert caught.value.fixes[1] == f"take the wheel from {wheel}"
    assert not list(place.iterdir())


def test_concurrent_builds_share_one_wheel(tmp_path):
    place, lines, order = tmp_path / "key", [], []
    waits = threading.Event()

    def log(line):
        lines.append(line)
        waits.set()

    def build_second():
        with cache.locked(place, log):
            order.append(cache.find(place))

    with cache.locked(place, quiet):
        waiting = threading.Thread(target=build_second)
        waiting.start()
        assert waits.wait(60)
        stored = cache.store(wheel_in(tmp_path / "built"), place)
        order.append("built")
    waiting.join(60)
    assert order == ["built", stored]
    assert len(lines) == 1
    assert str(place) in lines[0]


def test_wheel_cache_removes_leftovers_of_a_killed_build(tmp_path):
    (tmp_path / ".unfinished-abc").write_bytes(b"half")
    with cache.locked(tmp_path, quiet):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
def test_build_command_that_fails_or_times_out_leaves_no_process(tmp_path):
    log = tmp_path / "log"
    script = "echo $$; sleep 1000 & echo $!; wait"
    assert build_commands.run(["sh", "-c", "echo output; exit 3"], os.environ, log, quiet) == 3
    assert build_commands.run(["sh", "-c", script], os.environ, log, quiet, seconds=5) == -9
    assert "output" in log.read_text()
    assert build_commands.ask(["sh", "-c", f"exec > pids; {script}"], os.environ, 5) is None
    lines = log.read_text().splitlines() + (tmp_path / "pids").read_text().splitlines()
    pids = [int(line) for line in lines if line.isdecimal()]
    assert len(pids) == 4
    deadline = time.monotonic() + 60
    while living := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, living
        time.sleep(0.02)


def alive(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_build_prints_percent_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(build_commands, "_SECONDS_BETWEEN_LINES", 0.0)
    lines = []
    script = "echo '[ 12%] Building CXX object'; sleep 1.5"
    build_commands.run(["sh", "-c", script], os.environ, tmp_path / "log", lines.append)
    assert any("12 % compiled" in line for line in lines)


@pytest.mark.slow
def test_unreachable_package_index_is_an_error_with_a_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "check_compiler", lambda standard, env: None)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    env |= {"PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    with pytest.raises(HpctrainError, match="could not download") as caught:
        wheel_build.make(CPU, env, tmp_path, quiet)
    assert caught.value.code == "HT913"
    assert "login node" in caught.value.fixes[0]
    assert "--wheel-only" in caught.value.fixes[0]
    assert str(tmp_path / "log") in caught.value.fixes[-1]


def test_failed_compilation_shows_its_first_error(tmp_path):
    log = tmp_path / "log"
    lines = ["fine"] * 50 + ["x.cc:1:2: error: no such thing"] + ["noise"] * 50
    log.write_text("\n".join(lines))
    error = wheel_build._failed("HT915", "the build ended", log)
    assert "no such thing" in error.found
    assert len(error.found.splitlines()) < 20
    assert error.fixes == (f"look at the whole log: {log}",)


@pytest.mark.slow
def test_pip_refusal_is_an_error_with_a_fix(tmp_path):
    # The refusal of Debian's Python; source: PEP 668.
    wheel = tmp_path / "no-wheel.whl"
    with pytest.raises(HpctrainError, match="did not install") as caught:
        installed.install(wheel, os.environ, tmp_path / "log", quiet)
    assert "no-wheel.whl" in caught.value.found
    assert caught.value.code == "HT917"
    assert "--wheel-only" in caught.value.fixes[1]


@pytest.mark.slow
def test_trial_of_horovod_names_a_failing_rank_and_ends(tmp_path, monkeypatch):
    """Fail rank 1; rank 0 would wait for it for ever."""
    package = tmp_path / "horovod"
    for name in ("", "runner", "runner/common", "runner/common/util", "runner/http"):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    (package / "runner/common/util/hosts.py").write_text("SlotInfo = lambda *fields: fields")
    (package / "runner/http/http_server.py").write_text(
        "import http.server\n"
        "class RendezvousHandler(http.server.BaseHTTPRequestHandler): pass\n"
        "class RendezvousHTTPServer(http.server.HTTPServer):\n"
        "    def __init__(self, address, handler, verbose): super().__init__(address, handler)\n"
        "    def init(self, plan): assert len(plan) == 2\n"
    )
    (package / "torch.py").write_text(
        "import os, time\nif os.environ['HOROVOD_RANK'] == '1': raise ImportError('_ZN5torch')\n"
        "time.sleep(1000)"
    )
    facts, why = installed.try_out({**os.environ, "PYTHONPATH": str(tmp_path)})
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


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Simulate the build; return the steps that were done, and the installed Horovod."""
    done = []
    state = {"version": "", "key": "", "facts": {}, "done": done}
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(horovod_build, "ask_torch", lambda env: TORCH)

    def make(plan, env, work, say):
        done.append("make")
        (work / "log").touch()
        return wheel_in(work / "wheels")

    def install(wheel, env, log, say):
        done.append("install")
        facts = {"version": "0.28.1", "gloo": True, "mpi": False, "nccl": False}
        state.update(version="0.28.1", key=wheel.parent.name, facts=facts)

    def try_out(env):
        done.append("check")
        return state["facts"], "" if state["facts"] else "\n    undefined symbol"

    monkeypatch.setattr(horovod_build, "make", make)
    monkeypatch.setattr(installed, "install", install)
    monkeypatch.setattr(installed, "version", lambda: state["version"])
    monkeypatch.setattr(installed, "key", lambda: state["key"])
    monkeypatch.setattr(installed, "try_out", try_out)
    return state


def run_build(*options):
    return main(["horovod", "build", "--cpu", *options])


def test_second_build_only_checks_or_installs_the_cached_wheel(simulated, capsys):
    assert run_build() == 0
    assert run_build() == 0
    assert simulated["done"] == ["make", "install", "check", "check"]
    assert "is installed and works" in capsys.readouterr().err
    simulated.update(version="")
    assert run_build() == 0
    assert simulated["done"][4:] == ["install", "check"]
    assert "found" in capsys.readouterr().err


def test_wheel_cache_may_be_read_only(simulated, tmp_path):
    run_build("--wheel-only")
    (folder,) = (tmp_path / "cache" / "horovod").iterdir()
    (folder / ".lock").unlink()
    before = sorted(folder.iterdir())
    assert run_build() == 0
    assert sorted(folder.iterdir()) == before


def test_wheel_only_prints_only_the_path(simulated, capsys):
    assert run_build("--wheel-only") == 0
    path = Path(capsys.readouterr().out.rstrip("\n"))
    assert path.suffix == ".whl"
    assert path.is_file()
    assert simulated["done"] == ["make"]


@pytest.mark.parametrize(
    ("facts", "key", "steps"),
    [
        ({"gloo": True, "mpi": True}, "", ["check"]),
        ({"gloo": False, "mpi": True}, "", ["check", "make", "install", "check"]),
        ({}, "", ["check", "make", "install", "check"]),
        ({"gloo": True}, "of-another-torch", ["make", "install", "check"]),
    ],
)
def test_working_horovod_of_another_build_is_kept(simulated, facts, key, steps):
    simulated.update(version="0.28.1", key=key, facts=facts)
    assert run_build() == 0
    assert simulated["done"] == steps


def test_installed_wheel_that_does_not_import_is_an_error(simulated, monkeypatch, capsys):
    monkeypatch.setattr(installed, "install", lambda *arguments: None)
    assert run_build() == 1
    output = capsys.readouterr().err
    assert "undefined symbol" in output
    assert "fix:" in output
    assert "hpctrain explain HT918" in output


@pytest.mark.parametrize(
    ("error", "count"),
    [(HpctrainError("HT915", "failed"), 1), (KeyboardInterrupt(), 0), (SystemExit(143), 0)],
)
def test_build_folder_is_kept_after_failure_only(simulated, tmp_path, monkeypatch, error, count):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(plan, env, work, say):
        (work / "log").touch()
        raise error

    monkeypatch.setattr(horovod_build, "make", make)
    with pytest.raises(type(error)):
        horovod_build.build(False, False, True, os.environ, quiet)
    assert len(list(tmp_path.glob("hpctrain-horovod-*"))) == count
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_sigterm_ends_the_compilers_of_a_build(simulated, tmp_path, monkeypatch):
    waits, pids = threading.Event(), []

    class Process(subprocess.Popen):
        def wait(self, timeout=None):
            pids.append(self.pid)
            waits.set()
            return super().wait(timeout)

    def terminate():
        waits.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    def make(plan, env, work, say):
        threading.Thread(target=terminate).start()
        build_commands.run(["sleep", "1000"], env, work / "log", say)

    monkeypatch.setattr(horovod_build, "make", make)
    monkeypatch.setattr(build_commands.subprocess, "Popen", Process)
    with pytest.raises(SystemExit) as caught:
        horovod_build.build(False, False, True, os.environ, quiet)
    assert caught.value.code == 128 + signal.SIGTERM
    assert pids
    assert not alive(pids[0])


def test_horovod_build_never_imports_torch_or_horovod():
    code = (
        "import sys, hpctrain.tools.horovod_build, hpctrain.tools.horovod_build.check\n"
        "sys.exit('torch' in sys.modules or 'horovod' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_installed_horovod_works_with_this_torch(lacking):
    if not installed.version():
        lacking("horovod", "hpctrain horovod build --cpu --mpi")
    facts, why = installed.try_out(os.environ)
    assert facts, why
    assert (facts["version"], facts["gloo"], facts["mpi"]) == ("0.28.1", True, True)


@pytest.mark.slow
def test_wheel_built_from_the_package_index(tmp_path, lacking):
    """Download and compile Horovod with an empty cache, which takes minutes."""
    if not installed.version():
        lacking("horovod", "hpctrain horovod build --cpu --mpi")
    env = {**os.environ, "HPCTRAIN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "hpctrain", "horovod", "build", "--cpu", "--wheel-only"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    with zipfile.ZipFile(done.stdout.strip()) as archive:
        archive.extractall(site)
    facts, why = installed.try_out({**os.environ, "PYTHONPATH": str(site)})
    assert facts == {"version": "0.28.1", "gloo": True, "mpi": False, "nccl": False}, why
