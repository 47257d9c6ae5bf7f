"""Which device a rank gets: a slice of its own, and no GPU of the job that torch leaves idle.

Where a test needs a GPU, a driver or another build of torch, a stand-in in the ranks says what
torch would say there, and the test names it.
"""

import os
import warnings

import pytest
import ranks
import torch

import hpctrain
from hpctrain.process import device

CUDA = "CUDA_VISIBLE_DEVICES"
SLICES = tuple(f"MIG-0a1b2c3d-3b6a-4bb1-9f0e-00000000000{n}" for n in range(4))
JOB = {"SLURM_JOB_ID": "815", "SLURM_GPUS_ON_NODE": "4"}


@pytest.fixture
def without_driver(lacking):
    if torch.cuda.is_available() or torch.version.cuda is None:
        lacking("no-driver", "it is the CUDA build of torch without a driver that is shown here")


def opened(**changes):
    """A session of this rank: its device, and the variable before, inside and after it."""
    os.environ.update(changes)
    before = os.environ.get(CUDA)
    with hpctrain.Session(batch_size=1, start_timeout=30) as session:
        inside = os.environ.get(CUDA)
        assert session.sum(1) == session.world.world_size
    return session.device.type, before, inside, os.environ.get(CUDA)


def refused(results, *words):
    """The same error on all ranks."""
    for result in results:
        assert isinstance(result, hpctrain.HpctrainError), result
        assert result.exit_code == 2
        for word in words:
            assert word in str(result)
    assert len({str(result) for result in results}) == 1


def test_mig_each_rank_sees_its_own_slice_until_the_session_closes():
    """No slice is there, so torch trains on the CPU; the variable is what counts."""
    shown = ",".join(SLICES)
    results = ranks.values(ranks.run(3, opened, env={CUDA: shown}))
    assert results == [("cpu", shown, SLICES[rank], shown) for rank in range(3)]


def test_mig_slices_of_a_host_are_for_the_ranks_of_that_host():
    shown = ",".join(SLICES[:2])
    results = ranks.values(ranks.run(3, opened, layout=(2, 1), env={CUDA: shown}))
    assert [inside for _, _, inside, _ in results] == [SLICES[0], SLICES[1], SLICES[0]]


@pytest.mark.parametrize("shown", ["", SLICES[0], None])
def test_mig_one_slice_or_none_is_left_as_it_is(shown):
    env = {} if shown is None else {CUDA: shown}
    results = ranks.values(ranks.run(2, opened, env=env))
    assert results == [("cpu", shown, shown, shown)] * 2


def refused_here(started=False, **changes):
    """What a session is refused with; the variable is what it was."""
    os.environ.update(changes)
    before = dict(os.environ)
    # A stand-in: CUDA cannot start where there is no GPU.
    torch.cuda.is_initialized = lambda: started and hpctrain.detect().rank == 1
    try:
        hpctrain.Session(batch_size=1, start_timeout=30)
    except hpctrain.HpctrainError as error:
        assert dict(os.environ) == before
        return error
    return None


def test_mig_more_ranks_than_slices_are_refused_on_all_ranks():
    results = ranks.run(3, refused_here, env={CUDA: ",".join(SLICES[:2])})
    refused(results, "rank 2 on node1", "local rank 2 and 2 MIG slices", "start 2 ranks", "HT113")


def test_cuda_initialized_before_the_session_is_refused_on_all_ranks():
    results = ranks.run(3, refused_here, True, env={CUDA: ",".join(SLICES)})
    refused(results, "rank 1 on node1", "CUDA has started before the Session", "move", "HT115")


def on_rocm(**variables):
    """A rank of a torch for ROCm: a stand-in for that build, and nothing of it is used."""
    torch.version.hip = "6.2.41134"
    return refused_here(**variables)


def test_rocm_variables_that_hide_every_gpu_are_refused_on_all_ranks():
    env = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}
    results = ranks.run(3, on_rocm, env=env)
    refused(results, "leaves 2 GPUs", "env -u HIP_VISIBLE_DEVICES", "HT114")
    env = {"HIP_VISIBLE_DEVICES": "0", CUDA: "1"}
    refused(ranks.run(3, on_rocm, env=env), "HIP_VISIBLE_DEVICES=0", f"env -u {CUDA} ", "HT114")


def test_rocm_variables_are_ignored_by_other_builds_of_torch():
    env = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}
    assert ranks.run(1, refused_here, env=env) == [None]


@pytest.mark.usefixtures("without_driver")
def test_gpus_of_the_job_without_a_driver_are_refused_on_all_ranks():
    results = ranks.run(3, opened, env=JOB)
    refused(
        results, "job 815 has 4 GPUs on this host", "driver", "nvidia-smi", "--nv", CUDA, "HT116"
    )


@pytest.mark.usefixtures("without_driver")
def test_gpus_of_only_one_rank_are_refused_on_all_ranks():
    refused(ranks.run(3, in_the_job_is, 2), "rank 2 on node1", "job 815 has 4 GPUs")


def in_the_job_is(rank):
    return opened(**(JOB if hpctrain.detect().rank == rank else {}))


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize(
    "meant",
    [
        *({CUDA: ""}, {"SLURM_GPUS_ON_NODE": "0"}, {"SLURM_JOB_ID": ""}),
        pytest.param({"HIP_VISIBLE_DEVICES": ""}, marks=pytest.mark.slow),
        pytest.param({"SLURM_GPUS_ON_NODE": ""}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_job_that_hides_its_gpus_or_has_none_trains_on_the_cpu(meant):
    results = ranks.values(ranks.run(3, opened, env={**JOB, **meant}))
    assert [kind for kind, *_ in results] == ["cpu"] * 3


def with_torch(build):
    """A rank with a stand-in for another build of torch, or for another driver."""
    if build == "cpu":
        torch.version.cuda = None
        torch.cuda.is_available = lambda: False
    else:
        said = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11)"

        def is_available():
            warnings.warn(f"{said}. Please update.", stacklevel=1)
            return False

        torch.version.cuda = "13.2"
        torch.cuda.is_available = is_available
    return opened()


def test_cpu_build_of_torch_is_refused_where_the_job_has_gpus():
    results = ranks.run(3, with_torch, "cpu", env=JOB)
    refused(results, "job 815 has 4 GPUs on this host", "it is a CPU build", "pip install")


def test_old_driver_is_refused_where_the_job_has_gpus():
    results = ranks.run(3, with_torch, "old driver", env={**JOB, "SLURM_GPUS_ON_NODE": "1"})
    refused(results, "job 815 has 1 GPU on this host", "too old (found version 11)", "newer driver")


@pytest.mark.parametrize("build", ["cpu", "old driver"])
def test_cpu_build_of_torch_is_accepted_outside_of_a_job(build):
    assert ranks.values(ranks.run(1, with_torch, build))[0][0] == "cpu"


def warned():
    """A rank with a stand-in for device files: there are none without a GPU."""
    import logging

    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("hpctrain").addHandler(Keep(logging.WARNING))
    device.visible_gpus.here = lambda: ["0"]
    opened()
    return lines


@pytest.mark.usefixtures("without_driver")
def test_gpu_that_torch_cannot_use_is_a_warning_outside_of_a_job():
    (lines,) = ranks.values(ranks.run(1, warned))
    (line,) = lines
    assert "this machine has GPUs, and torch" in line
    assert "driver" in line
    assert "nvidia-smi" in line
    (lines,) = ranks.values(ranks.run(1, warned, env={CUDA: ""}))
    assert lines == []
