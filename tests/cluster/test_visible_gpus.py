"""The GPUs that the environment makes visible: CUDA's forms, MIG slices, ROCm's two filters."""

import re

import pytest

from hpctrain.cluster import visible_gpus
from hpctrain.cluster.job import Allocation
from hpctrain.errors import ContradictionError

WHOLE = "GPU-5f7c1f4e-3b6a-4bb1-9f0e-111111111111"
SLICE_A = "MIG-0a1b2c3d-3b6a-4bb1-9f0e-aaaaaaaaaaaa"
SLICE_B = "MIG-0a1b2c3d-3b6a-4bb1-9f0e-bbbbbbbbbbbb"
OLD_SLICE = "MIG-GPU-5f7c1f4e-3b6a-4bb1-9f0e-111111111111/1/0"  # as drivers before 470 name them


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        (" ", ()),
        (",0", ()),
        ("0", ("0",)),
        ("0,1", ("0", "1")),
        ("3,1", ("3", "1")),
        (" 0 , 1 ", ("0", "1")),
        # CUDA stops at the first entry that names no device.
        ("0,-1,1", ("0",)),
        ("-1,0", ()),
        ("0,,1", ("0",)),
        ("0,NoDevFiles", ("0",)),
        (f"{WHOLE},1", (WHOLE, "1")),
        (f"{SLICE_A},{OLD_SLICE}", (SLICE_A, OLD_SLICE)),
    ],
)
def test_cuda_visible_devices_values(value, names):
    for variable in (visible_gpus.CUDA, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        seen = visible_gpus.visible({variable: value})
        assert (seen.names, seen.source) == (names, variable)


def test_cuda_visible_devices_unset():
    assert visible_gpus.visible({"GPU_DEVICE_ORDINAL": "0"}) is None
    assert visible_gpus.visible({visible_gpus.CUDA: "0"}, "ROCR_VISIBLE_DEVICES") is None


@pytest.mark.parametrize(
    ("value", "local_rank", "own"),
    [
        (f"{SLICE_A},{SLICE_B}", 0, SLICE_A),
        (f"{SLICE_A},{SLICE_B}", 1, SLICE_B),
        (f" {SLICE_B} , {SLICE_A}", 0, SLICE_B),
        (f"{SLICE_A},{OLD_SLICE}", 1, OLD_SLICE),
        # Each process has one already, for any number of ranks.
        (SLICE_A, 0, None),
        (SLICE_A, 7, None),
        (f"{SLICE_A},-1,{SLICE_B}", 1, None),
        # No slices.
        (f"{WHOLE},0", 1, None),
        ("0,1", 1, None),
        ("", 1, None),
        (None, 1, None),
    ],
)
def test_mig_slices_are_given_by_local_rank(value, local_rank, own):
    assert (
        visible_gpus.own_slice({} if value is None else {visible_gpus.CUDA: value}, local_rank)
        == own
    )


@pytest.mark.parametrize("value", [f"0,{SLICE_A}", f"{SLICE_A},{WHOLE}", f"{SLICE_A},x,{SLICE_B}"])
def test_mig_slices_beside_whole_gpus_are_refused_with_the_slices_to_export(value):
    with pytest.raises(ContradictionError) as caught:
        visible_gpus.own_slice({visible_gpus.CUDA: value}, 0)
    assert f"CUDA_VISIBLE_DEVICES={value}" in caught.value.found
    assert caught.value.code == "HT114"
    (fix,) = caught.value.fixes
    (slices,) = re.findall(r"\Aenv CUDA_VISIBLE_DEVICES=(\S+) python SCRIPT", fix)
    assert visible_gpus.own_slice({visible_gpus.CUDA: slices}, 0) in (
        SLICE_A,
        None,
    )  # a single slice is left as it is


ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {ROCR: "2,3"},
        {HIP: "2,3"},
        {CUDA: "2,3"},
        {ROCR: "2,3", HIP: "0,1"},
        {ROCR: "2,3", CUDA: "1"},
        {ROCR: "GPU-5f7c,GPU-5f7d", HIP: "1,0"},
        {HIP: "0,1", CUDA: "0,1"},
        {HIP: "0,1", CUDA: "0, 1"},
        {HIP: "", CUDA: "-1"},
        {ROCR: "0", HIP: ""},
    ],
)
def test_rocm_visible_devices_that_agree_are_accepted(env):
    visible_gpus.check_rocm(env)


@pytest.mark.parametrize(
    ("env", "words", "unset"),
    [
        # Slurm may set all of them to the same numbers; HIP counts the GPUs that ROCR leaves.
        ({ROCR: "2,3", HIP: "2,3"}, ["has only 2,", "HIP_VISIBLE_DEVICES=2,3", "number 2"], HIP),
        ({ROCR: "2,3", CUDA: "0,2"}, ["CUDA_VISIBLE_DEVICES=0,2", "number 2"], CUDA),
        ({ROCR: "3", HIP: "1"}, ["has only 1,", "number 1"], HIP),
        ({ROCR: "", HIP: "0"}, ["has only 0,"], HIP),
        ({ROCR: "0", HIP: "9" * 5000}, ["has only 1,"], HIP),
        ({HIP: "0", CUDA: "1"}, ["HIP_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"], CUDA),
        ({HIP: "0,1", CUDA: ""}, ["HIP_VISIBLE_DEVICES=0,1"], CUDA),
    ],
)
def test_rocm_visible_devices_that_hide_gpus_are_refused(env, words, unset):
    with pytest.raises(ContradictionError) as caught:
        visible_gpus.check_rocm(env)
    for word in words:
        assert word in caught.value.found
    assert caught.value.code == "HT114"
    (fix,) = caught.value.fixes
    assert fix.startswith(f"env -u {unset} python SCRIPT")
    visible_gpus.check_rocm({name: value for name, value in env.items() if name != unset})


@pytest.fixture
def device_files(tmp_path, monkeypatch):
    """Return a function that makes device files of GPUs in folders instead of /dev and /sys."""
    monkeypatch.setattr(visible_gpus, "Path", lambda path: tmp_path / path.lstrip("/"))

    def make(*nvidia, nodes=()):
        for name in nvidia:
            path = tmp_path / "dev" / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        for number, simd in enumerate(nodes):
            node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
            node.mkdir(parents=True)
            (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {simd}\nlds 64\n")

    return make


def test_nvidia_gpus_are_counted_by_device_files(device_files):
    assert visible_gpus.here() == []
    device_files("nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia10", "nvidia2", "nvidia0")
    assert visible_gpus.here() == ["0", "2", "10"]


def test_amd_gpus_are_counted_by_simd_units(device_files):
    device_files(nodes=(0, 0, 304, 120))
    assert visible_gpus.here() == ["0", "1"]


JOB = Allocation("slurm", "815", tasks=1, gpus=4)


@pytest.mark.parametrize(
    ("launcher", "job", "ranks", "seen", "found", "fix"),
    [
        ("none", None, 1, 4, "3 of the 4 GPUs", "hpctrain run --nproc-per-node auto SCRIPT"),
        ("none", JOB, 1, 4, "3 of the 4 GPUs", "hpctrain run --nproc-per-node auto SCRIPT"),
        ("slurm", JOB, 1, 4, "3 of the 4 GPUs", "#SBATCH --ntasks-per-node=4, without --ntasks"),
        ("slurm", JOB, 2, 2, "2 of the 4 GPUs", "#SBATCH --ntasks-per-node=4, without --ntasks"),
        ("openmpi", None, 2, 3, "1 of the 3 GPUs", "start 3 ranks on each node"),
    ],
)
def test_gpus_that_a_launch_leaves_idle(launcher, job, ranks, seen, found, fix):
    warning = visible_gpus.idle(launcher, job, {"node1": (ranks, seen)})
    assert (warning.code, warning.fixes[0]) == ("HT120", fix)
    assert warning.found == f"{found} on node1 are idle, as each rank uses one"


@pytest.mark.parametrize(
    ("launcher", "job", "ranks", "seen"),
    [
        ("none", None, 1, 0),
        ("none", None, 1, 1),
        ("none", JOB, 1, 1),  # one of several trainings in a job, each with its own GPU
        ("slurm", JOB, 4, 4),
        ("slurm", JOB, 4, 1),
        ("slurm", JOB, 1, 1),
        ("slurm", JOB, 8, 4),  # refused elsewhere
    ],
)
def test_launch_that_leaves_no_gpu_idle(launcher, job, ranks, seen):
    assert visible_gpus.idle(launcher, job, {"node1": (ranks, seen)}) is None
