"""The device of a rank: a MIG slice for each, and errors where torch cannot use the job's GPUs.

Where a test needs a GPU, a driver or another build of torch, a stand-in in the ranks returns what
torch would return there.
"""

import os
import re
import warnings
from types import SimpleNamespace

import pytest
import ranks
import torch

import hpctrain
from hpctrain import backends
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.world import World
from hpctrain.precision import PRECISIONS, PrecisionSettings, open_precision
from hpctrain.process import device
from hpctrain.rendezvous import Roster
from hpctrain.training import setup

CUDA = "CUDA_VISIBLE_DEVICES"
SLICES = tuple(f"MIG-0a1b2c3d-3b6a-4bb1-9f0e-00000000000{n}" for n in range(4))
JOB = {"SLURM_JOB_ID": "815", "SLURM_GPUS_ON_NODE": "4"}


@pytest.fixture
def without_driver(lacking):
    if torch.cuda.is_available() or torch.version.cuda is None:
        lacking("no-driver", "a CUDA build of torch without a driver")


def open_session(**changes):
    """Open a session; return its device, and the variable before, inside and after it."""
    os.environ.update(changes)
    before = os.environ.get(CUDA)
    with hpctrain.Session(batch_size=1, start_timeout=30) as session:
        inside = os.environ.get(CUDA)
        assert session.sum(1) == session.world.world_size
    return session.device.type, before, inside, os.environ.get(CUDA)


def check_refused(results, *words):
    """Check that all ranks have the same error with these words."""
    for result in results:
        assert isinstance(result, hpctrain.HpctrainError), result
        assert result.exit_code == 2
        for word in words:
            assert word in str(result)
    assert len({str(result) for result in results}) == 1


def test_mig_each_rank_sees_its_own_slice_until_the_session_closes():
    """Check the variable only: without a slice, torch trains on the CPU."""
    visible = ",".join(SLICES)
    results = ranks.values(ranks.run(3, open_session, env={CUDA: visible}))
    assert results == [("cpu", visible, SLICES[rank], visible) for rank in range(3)]


def test_mig_slices_of_a_host_are_for_the_ranks_of_that_host():
    visible = ",".join(SLICES[:2])
    results = ranks.values(ranks.run(3, open_session, layout=(2, 1), env={CUDA: visible}))
    assert [inside for _, _, inside, _ in results] == [SLICES[0], SLICES[1], SLICES[0]]


@pytest.mark.parametrize("visible", ["", SLICES[0], None])
def test_mig_one_slice_or_none_is_left_as_it_is(visible):
    env = {} if visible is None else {CUDA: visible}
    results = ranks.values(ranks.run(2, open_session, env=env))
    assert results == [("cpu", visible, visible, visible)] * 2


def error_of_session(started=False, **changes):
    """Open a session; return its error, and check that the variables are unchanged."""
    os.environ.update(changes)
    before = dict(os.environ)
    # A stand-in: without a GPU, CUDA cannot be initialized.
    torch.cuda.is_initialized = lambda: started and hpctrain.detect().rank == 1
    try:
        hpctrain.Session(batch_size=1, start_timeout=30)
    except hpctrain.HpctrainError as error:
        assert dict(os.environ) == before
        return error
    return None


def test_mig_more_ranks_than_slices_are_refused_on_all_ranks():
    results = ranks.run(3, error_of_session, env={CUDA: ",".join(SLICES[:2])})
    check_refused(
        results, "rank 2 on node1", "local rank 2 and 2 MIG slices", "start 2 ranks", "HT113"
    )


def test_cuda_initialized_before_the_session_is_refused_on_all_ranks():
    results = ranks.run(3, error_of_session, True, env={CUDA: ",".join(SLICES)})
    check_refused(
        results, "rank 1 on node1", "CUDA has started before the Session", "move", "HT115"
    )


def error_on_rocm(**variables):
    """Open a session on a stand-in for torch's build for ROCm; return its error."""
    torch.version.hip = "6.2.41134"
    return error_of_session(**variables)


def test_rocm_variables_that_hide_every_gpu_are_refused_on_all_ranks():
    env = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}
    results = ranks.run(3, error_on_rocm, env=env)
    check_refused(results, "has only 2", "env -u HIP_VISIBLE_DEVICES", "HT114")
    env = {"HIP_VISIBLE_DEVICES": "0", CUDA: "1"}
    check_refused(
        ranks.run(3, error_on_rocm, env=env), "HIP_VISIBLE_DEVICES=0", f"env -u {CUDA} ", "HT114"
    )


def test_rocm_variables_are_ignored_by_other_builds_of_torch():
    env = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}
    assert ranks.run(1, error_of_session, env=env) == [None]


@pytest.mark.usefixtures("without_driver")
def test_gpus_of_the_job_without_a_driver_are_refused_on_all_ranks():
    results = ranks.run(3, open_session, env=JOB)
    check_refused(
        results,
        "GPUs of job 815 on this node (GPUs: 4)",
        "driver",
        "nvidia-smi",
        "--nv",
        CUDA,
        "HT116",
    )


@pytest.mark.usefixtures("without_driver")
def test_gpus_of_only_one_rank_are_refused_on_all_ranks():
    check_refused(ranks.run(3, open_with_job_on, 2), "rank 2 on node1", "GPUs of job 815")


def open_with_job_on(rank):
    return open_session(**(JOB if hpctrain.detect().rank == rank else {}))


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize(
    "variables",
    [
        *({CUDA: ""}, {"SLURM_GPUS_ON_NODE": "0"}, {"SLURM_JOB_ID": ""}),
        pytest.param({"HIP_VISIBLE_DEVICES": ""}, marks=pytest.mark.slow),
        pytest.param({"SLURM_GPUS_ON_NODE": ""}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_job_that_hides_its_gpus_or_has_none_trains_on_the_cpu(variables):
    results = ranks.values(ranks.run(3, open_session, env={**JOB, **variables}))
    assert [kind for kind, *_ in results] == ["cpu"] * 3


def open_with_torch(build):
    """Open a session with a stand-in for another build of torch, or for another driver."""
    if build == "cpu":
        torch.version.cuda = None
        torch.cuda.is_available = lambda: False
    else:
        text = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11)"

        def is_available():
            warnings.warn(f"{text}. Please update.", stacklevel=1)
            return False

        torch.version.cuda = "13.2"
        torch.cuda.is_available = is_available
    return open_session()


def test_cpu_build_of_torch_is_refused_where_the_job_has_gpus():
    results = ranks.run(3, open_with_torch, "cpu", env=JOB)
    check_refused(
        results, "GPUs of job 815 on this node (GPUs: 4)", "it is a CPU build", "pip install"
    )


def test_old_driver_is_refused_where_the_job_has_gpus():
    results = ranks.run(3, open_with_torch, "old driver", env={**JOB, "SLURM_GPUS_ON_NODE": "1"})
    check_refused(
        results,
        "GPUs of job 815 on this node (GPUs: 1)",
        "too old (found version 11)",
        "newer driver",
    )


@pytest.mark.parametrize("build", ["cpu", "old driver"])
def test_cpu_build_of_torch_is_accepted_outside_of_a_job(build):
    assert ranks.values(ranks.run(1, open_with_torch, build))[0][0] == "cpu"


def warnings_of_session():
    """Open a session with a stand-in for device files of a GPU; return its warnings."""
    import logging

    lines = []

    class KeepMessages(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("hpctrain").addHandler(KeepMessages(logging.WARNING))
    device.visible_gpus.here = lambda: ["0"]
    open_session()
    return lines


@pytest.mark.usefixtures("without_driver")
def test_gpu_that_torch_cannot_use_is_a_warning_outside_of_a_job():
    (lines,) = ranks.values(ranks.run(1, warnings_of_session))
    (line,) = lines
    assert "this machine has GPUs, and torch" in line
    assert "driver" in line
    assert "nvidia-smi" in line
    (lines,) = ranks.values(ranks.run(1, warnings_of_session, env={CUDA: ""}))
    assert lines == []


# GPUs that no rank uses. The numbers of devices are stand-ins: no machine of the tests has them.


def warnings_with(kind, count, option="auto"):
    """Open a session where torch finds devices of a kind; return device and warnings by rank."""
    import logging

    lines = []

    class KeepMessages(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("hpctrain").addHandler(KeepMessages(logging.WARNING))
    if not hasattr(torch, kind):
        setattr(torch, kind, SimpleNamespace())
    getattr(torch, kind).is_available = lambda: True
    getattr(torch, kind).device_count = lambda: count
    with hpctrain.Session(batch_size=1, start_timeout=30, device=option) as session:
        return session.device.type, lines


@pytest.mark.parametrize("kind", ["xpu", "hpu"])
def test_accelerators_that_torch_finds_and_no_rank_uses_are_named_once(kind):
    first, second = ranks.values(ranks.run(2, warnings_with, kind, 12))
    assert (first[0], second) == ("cpu", ("cpu", []))
    (line,) = first[1]
    assert line.startswith(f"torch finds 12 devices of type {kind}, and hpctrain does not use them")
    assert "--device cpu" in line


def test_accelerators_that_the_user_does_not_want_are_not_named():
    assert ranks.values(ranks.run(1, warnings_with, "xpu", 12, "cpu")) == [("cpu", [])]
    env = {CUDA: ""}
    assert ranks.values(ranks.run(1, warnings_with, "xpu", 12, env=env)) == [("cpu", [])]


def test_accelerator_of_a_package_that_extends_torch_is_named(monkeypatch):
    current = SimpleNamespace(type="quantum")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "quantum", module, raising=False)
    assert "2 devices of type quantum" in device.passed_over({}).found
    monkeypatch.delattr(torch, "accelerator")  # before torch 2.6
    assert device.passed_over({}) is None


def idle_of_session(backend, seen):
    """Compare ranks as rank 0 does, if each of them sees a number of GPUs; return the warnings."""
    hosts = ("node1", "node2")[: len(seen)]
    of_ranks = [node for node, (count, _) in enumerate(seen) for _ in range(count)]
    entries = tuple({"visible_gpus": seen[node][1]} for node in of_ranks)
    roster = Roster(entries, (), hosts, tuple(of_ranks), 0)
    world = World(0, len(of_ranks), 0, seen[0][0], 0, len(seen), hosts, "torchrun")
    start = SimpleNamespace(world=world, allocation=None)
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "warn", lambda error: lines.append(error.found))
        patch.setattr(setup.consistency, "check", lambda *_: None)
        patch.setattr(setup, "divide", lambda *_: [])
        setup._check(start, backend, 0, roster)
    return lines


def test_gpus_that_ranks_see_and_do_not_use_are_named_for_all_nodes():
    both = "4 of the 8 GPUs on node1 and node2 are idle"
    assert idle_of_session("ddp", [(2, 4), (2, 4)]) == [f"{both}, as each rank uses one"]
    assert "1 of the 3 GPUs on node2" in idle_of_session("ddp", [(4, 4), (2, 3)])[0]
    assert idle_of_session("ddp", [(4, 4), (4, 4)]) == []
    assert idle_of_session("dataparallel", [(1, 4)]) == []  # it uses all of them


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("2.7.1+cu126", False),
        ("2.9.1", False),
        ("2.9.0a0+git1a2b", False),
        ("1.13.1", False),
        ("2.10.0", True),
        ("2.10.0a0+b4e4ee81d3.nv25.12", True),
        ("2.10.0.dev20251001+rocm6.4", True),
        ("2.11.0+xpu", True),
        ("3.0.0", True),
        ("unknown", True),
    ],
)
def test_torch_that_is_too_old_is_refused(version, accepted):
    if accepted:
        device.check_torch(version, "/site/torch")
        return
    with pytest.raises(
        hpctrain.HpctrainError, match=f"torch {re.escape(version)} in /site/to"
    ) as e:
        device.check_torch(version, "/site/torch")
    assert (e.value.code, e.value.exit_code) == ("HT121", 2)
    assert "'torch>=2.10'" in e.value.fixes[0]


def open_with_version(version, rank):
    if hpctrain.detect().rank == rank:
        torch.__version__ = version
    return open_session()


def test_session_of_a_torch_that_is_too_old_is_refused_on_all_ranks():
    results = ranks.run(2, open_with_version, "2.7.1+cu126", 1)
    check_refused(results, "rank 1 on node1: torch 2.7.1+cu126 in ", "HT121")


def bound(rank, seen=2, on_node=4):
    """Return the GPU of one of four ranks on a node, or its error."""
    world = World(rank, 4, rank, 4, 0, 1, ("node1",), "slurm")
    try:
        return device.index_of(world, seen, on_node)
    except hpctrain.HpctrainError as error:
        return error


def test_ranks_that_see_some_gpus_of_their_node_are_told_so():
    """Test `srun --gpu-bind=closest`: two ranks see GPUs 2 and 3, and two see 0 and 1."""
    assert [bound(0), bound(1), bound(2, seen=1), bound(3, seen=4)] == [0, 1, 0, 3]
    assert "local rank 2 sees 2 GPUs" in bound(2).found
    assert "some of its 4 GPUs, as with --gpu-bind=closest" in bound(2).found
    assert "--gpu-bind=none" in bound(2).fixes[0]
    assert bound(2).code == bound(2, on_node=2).code == "HT113"
    assert bound(2, on_node=2).fixes[0] == "start 2 ranks on each node"


# The GPU of a Mac, of which torch says here that it is there.


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def chosen(size, rank=0, name="auto"):
    world = World(rank, size, rank, size, 0, 1, ("mac",), "hpctrain")
    return device.choose(world, None, {}, name).type


def test_one_process_uses_the_gpu_of_a_mac_and_several_use_the_cpu(mac, caplog):
    caplog.set_level("INFO", "hpctrain")
    assert [chosen(1), chosen(1, name="mps"), chosen(1, name="cpu")] == ["mps", "mps", "cpu"]
    assert caplog.text == ""
    assert [chosen(2, rank) for rank in range(2)] == ["cpu", "cpu"]
    assert caplog.text.count("2 ranks on the CPU: gloo cannot carry") == 1


@pytest.mark.parametrize(
    ("size", "name", "expected"),
    [(2, "mps", "--device mps with 2 ranks"), (1, "cuda", "--device cuda, and torch")],
)
def test_device_that_a_mac_lacks_is_refused(mac, size, name, expected):
    with pytest.raises(hpctrain.HpctrainError, match=expected) as refused:
        chosen(size, name=name)
    assert refused.value.code == "HT116"


def test_gpu_of_a_mac_is_refused_elsewhere():
    with pytest.raises(hpctrain.HpctrainError, match="it is the GPU of a Mac"):
        chosen(1, name="mps")


def test_ranks_stay_on_the_cpu_if_told_so():
    (type_, *_), _ = ranks.values(ranks.run(2, open_on_cpu))
    assert type_ == "cpu"


def open_on_cpu():
    with hpctrain.Session(batch_size=1, device="cpu") as session:
        return session.device.type, session.sum(1)


def test_backend_of_several_ranks_is_refused_on_the_gpu_of_a_mac():
    world = World(0, 1, 0, 1, 0, 1, ("mac",), "none")
    settings = BackendSettings(10.0, 10.0, 1, False, False, "fp32", {})
    with pytest.raises(hpctrain.HpctrainError, match="--backend ddp on the GPU of a Mac"):
        backends.check("ddp", world, torch.device("mps"), settings)


@pytest.mark.parametrize("name", PRECISIONS)
def test_gpu_of_a_mac_has_three_precisions(name):
    settings = PrecisionSettings(None, None, 1)
    mps = torch.device("mps")
    if name in ("fp32", "bf16", "fp16"):
        assert open_precision(name, mps, settings).name == name
        assert open_precision("auto", mps, settings).name == "fp32"
    else:
        with pytest.raises(hpctrain.HpctrainError, match=f"{name} on the GPU of a Mac") as refused:
            open_precision(name, mps, settings)
        assert refused.value.code == "HT402"
