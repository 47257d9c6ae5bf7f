"""Command of a rank in a container of Apptainer, and the options of srun for Pyxis."""

import pytest

from hpctrain.errors import UsageError
from hpctrain.launch.containers import apptainer, pyxis

ENV = {"SLURM_SUBMIT_DIR": "/home/me/it's here", "HPCTRAIN_RUN_DIR": "/runs/one"}
COMMAND = ["python", "train.py", "--data", "my data"]
BINDS = ["--bind", "/home/me/it's here", "--bind", "/runs/one"]


def test_apptainer_mounts_the_folders_of_the_job_and_starts_in_the_working_directory():
    assert apptainer(COMMAND, "/images/a.sif", False, "/home/me/src", ENV) == [
        *("apptainer", "exec", "--pwd", "/home/me/src", *BINDS, "/images/a.sif"),
        *COMMAND,
    ]
    staged = {**ENV, "HPCTRAIN_SCRATCH": "/tmp/copies"}
    words = apptainer(COMMAND, "a.sif", True, "/tmp/copies/code", staged)
    assert words == [
        *("apptainer", "exec", "--nv", "--pwd", "/tmp/copies/code"),
        *(*BINDS, "--bind", "/tmp/copies", "/home/me/it's here/a.sif"),
        *COMMAND,
    ]


def test_folder_that_is_both_is_mounted_once():
    env = {**ENV, "HPCTRAIN_RUN_DIR": ENV["SLURM_SUBMIT_DIR"]}
    assert apptainer(COMMAND, "/a.sif", False, "/", env).count("--bind") == 1


def test_pyxis_mounts_the_folders_of_the_job_and_passes_the_variables():
    folders = "/home/me/it's here:/home/me/it's here,/runs/one:/runs/one"
    place = "/home/me/it's here/src"
    assert pyxis("nvcr.io#nvidia/pytorch:25.10-py3", place, ENV, ("A", "B")) == [
        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3",
        f"--container-mounts={folders}",
        f"--container-workdir={place}",
        "--container-env=A,B",
    ]
    # The working directory is mounted, too.
    assert pyxis("a#b", "/home/you", ENV, ())[1:] == [
        f"--container-mounts={folders},/home/you:/home/you",
        "--container-workdir=/home/you",
    ]


def test_pyxis_gets_the_code_and_the_threads_of_the_job_and_more_mounts_of_the_user():
    more = {"PYTHONPATH": "/code", "OMP_NUM_THREADS": "2", "PYXIS_CONTAINER_MOUNTS": "/data:/data"}
    words = pyxis("a#b", "/runs/one/x", {**ENV, **more}, ("A", "PYTHONPATH"))
    assert words[1].endswith(",/runs/one:/runs/one,/data:/data")
    assert words[3] == "--container-env=PYTHONPATH,OMP_NUM_THREADS,A"


@pytest.mark.parametrize("character", [*",:$`", '"', "\\"])
def test_folder_that_pyxis_would_read_as_bash_is_refused(character):
    with pytest.raises(UsageError, match="a path without"):
        pyxis("a#b", "/", {"SLURM_SUBMIT_DIR": f"/home/a{character}b"}, ())


def test_pyxis_gets_the_path_of_an_image_that_is_a_file(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.sqsh").touch()
    env = {"SLURM_SUBMIT_DIR": str(tmp_path)}
    assert pyxis("images/a.sqsh", "/", env, ())[0] == f"--container-image={tmp_path}/images/a.sqsh"
    assert pyxis(".hidden", "/", env, ())[0] == f"--container-image={tmp_path}/.hidden"


# Names of images in registries have no path in front; for Pyxis a path begins with / or a dot.
@pytest.mark.parametrize(
    ("image", "for_apptainer", "for_pyxis"),
    [
        ("docker://a/b:c", "docker://a/b:c", "docker://a/b:c"),
        ("/abs/a.sif", "/abs/a.sif", "/abs/a.sif"),
        ("images/a.sif", "/top/images/a.sif", "images/a.sif"),
        ("./a.sqsh", "/top/./a.sqsh", "/top/./a.sqsh"),
        ("../a.sqsh", "/top/../a.sqsh", "/top/../a.sqsh"),
    ],
)
def test_relative_image_is_below_the_submit_directory(image, for_apptainer, for_pyxis):
    env = {"SLURM_SUBMIT_DIR": "/top"}
    assert apptainer(["x"], image, False, "/", env)[-2] == for_apptainer
    assert pyxis(image, "/", env, ())[0] == f"--container-image={for_pyxis}"


@pytest.mark.parametrize("name", ["SLURM_SUBMIT_DIR", "HPCTRAIN_RUN_DIR", "HPCTRAIN_SCRATCH"])
@pytest.mark.parametrize("folder", ["/runs/lr=0.1,2", "/runs/seed:2"])
def test_folder_that_cannot_be_mounted_is_refused(name, folder):
    env = {**ENV, name: folder}
    with pytest.raises(UsageError, match="a path without , :") as caught:
        apptainer(COMMAND, "/a.sif", False, "/", env)
    assert folder in str(caught.value)
    with pytest.raises(UsageError, match="a path without , :"):
        pyxis("a#b", "/", env, ())
