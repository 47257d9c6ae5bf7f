"""Rendered scripts, run by bash with stand-ins for Slurm's commands.

tests/jobs/test_sbatch_script_on_slurm.py runs them on a real Slurm.
"""

import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest
from stand_ins import RECORD, Machine

from hpctrain.errors import UsageError
from hpctrain.jobs.script import render_local
from hpctrain.jobs.spec import JobSpec


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine")


# --- the environment, and the precedence of its sources


SAYS = """#!/bin/sh
echo "ranks: A=$A PATH=$PATH threads=$OMP_NUM_THREADS run=$HPCTRAIN_RUN_DIR here=$(pwd)"
"""


@pytest.fixture
def printing_machine(machine):
    """Return a machine on which the ranks print their environment."""
    machine.program("srun", SAYS)
    return machine


def site_file(machine, text):
    path = machine.folder.parent / ".config" / "hpctrain" / "site.sh"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def module_system(text="export A=module"):
    """Return a `module` function as a login shell exports it; only `absent` is unknown."""
    body = f'[ "$2" != absent ] || return 1; {text}; unset "$never_set"'
    return {"BASH_FUNC_module%%": f"() {{ {body}; }}"}


def test_environment_order_site_modules_setup_spec(printing_machine):
    site_file(printing_machine, "export A=site OMP_NUM_THREADS=7")
    modules = module_system()
    more = {}
    for name, field, value in (
        ("site", "setup", ()),
        ("module", "modules", ("there",)),
        ("setup", "setup", ("export A=setup",)),
        ("spec", "environment", {"A": "spec"}),
    ):
        more[field] = value
        code, output = printing_machine.run(JobSpec(command="a", **more), A="inherited", **modules)
        assert code == 0
        assert f"A={name} " in output
        assert "threads=7 " in output
    assert "threads=1 " in printing_machine.run(JobSpec(command="a"), HPCTRAIN_SITE="/dev/null")[1]
    more["environment"] = {"OMP_NUM_THREADS": "3"}
    assert "threads=3 " in printing_machine.run(JobSpec(command="a", **more), **modules)[1]


def test_site_sh_failure_is_printed_and_job_continues(printing_machine):
    path = site_file(printing_machine, '[ "$unset" = x ] && true\nmodule load gone\nfalse')
    code, output = printing_machine.run(JobSpec(command="a"))
    assert (code, f"{path} ended with 1\n" in output) == (0, True)
    path.write_text("if then")
    code, output = printing_machine.run(JobSpec(command="a"))
    assert (code, f"{path} ended with " in output) == (0, True)
    code, output = printing_machine.run(JobSpec(command="a"), HPCTRAIN_SITE="/no/such/file")
    assert (code, "/no/such/file: No such file" in output) == (0, True)


def test_module_load_failure_ends_job(printing_machine):
    modules = module_system()
    code, output = printing_machine.run(
        JobSpec(command="a", modules=("there", "absent")), **modules
    )
    assert (code, output) == (2, "absent: this module could not be loaded\n")


def test_setup_line_failure_ends_job(printing_machine):
    code, output = printing_machine.run(
        JobSpec(command="a", setup=('echo "got $unset_before"', "false"))
    )
    assert (code, output) == (1, "got \n")


CONDA = """#!/bin/sh
echo 'conda() { [ "$2" = torch ] && export A=conda; }'
"""


def test_conda_environment_is_activated_or_error_names_the_reason(printing_machine):
    torch = JobSpec(command="a", conda="torch")
    code, output = printing_machine.run(torch)
    assert (code, "no conda on the PATH" in output) == (2, True)
    printing_machine.program("conda", CONDA)
    assert "A=conda " in printing_machine.run(torch)[1]
    code, output = printing_machine.run(JobSpec(command="a", conda="it's $(id)"))
    assert (code, output) == (2, "it's $(id): this conda environment could not be activated\n")


def test_missing_venv_ends_job(printing_machine):
    code, output = printing_machine.run(JobSpec(command="a", venv="my env"))
    assert code == 2
    assert output.startswith("./my env: no virtual environment on ")
    assert output.endswith(f"seen from {printing_machine.folder}\n")


def test_run_directory_from_environment_wins(printing_machine):
    spec = JobSpec(command="a", run_dir="my-run")
    folder = printing_machine.folder
    assert f"run={folder}/my-run " in printing_machine.run(spec)[1]
    assert (
        f"run={folder}/runs/other " in printing_machine.run(spec, HPCTRAIN_RUN_DIR="runs/other")[1]
    )
    assert (
        f"run={folder.parent}/x "
        in printing_machine.run(spec, HPCTRAIN_RUN_DIR=f"{folder.parent}/x")[1]
    )
    assert (folder / "runs" / "other").is_dir()
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    assert (
        f"run={folder}/runs/name-5_3 "
        in printing_machine.run(JobSpec(command="a", array="3"), **array)[1]
    )
    assert f"run={folder}/my-run/3 " in printing_machine.run(spec, **array)[1]


def test_script_makes_log_folder(printing_machine):
    assert printing_machine.run(JobSpec(command="a", output="my logs/%x-%j.log"))[0] == 0
    assert (printing_machine.folder / "my logs").is_dir()


def test_sweep_index_without_setting_is_refused(printing_machine):
    spec = JobSpec(command="a", sweep={"lr": [1, 2]})
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert printing_machine.run(spec, **array) == (2, "no setting has the index 2\n")


def test_log_begins_with_setting_job_and_command(printing_machine):
    output = printing_machine.run(
        JobSpec(command=["a", "b c"], sweep=[{"lr": "1 2"}]), SLURM_ARRAY_TASK_ID="0"
    )[1]
    assert output.splitlines()[:2] == [
        r"setting 0: --lr 1\ 2",
        r"job 7_0, start 0, on node[1-3]: srun --kill-on-bad-exit=1 --cpus-per-task=1 a b\ c "
        r"--lr 1\ 2",
    ]


# --- requeue, and the end of the job


def run_stopped(machine, spec, **env):
    return machine.run(spec, CODE="75", **env)


def test_secret_is_new_for_each_start_and_in_no_command_line_or_log(machine):
    secrets = set()
    for _ in range(3):
        output = machine.run(JobSpec(command="a"))[1]
        secrets.add(machine.variables()["HPCTRAIN_SECRET"])
        assert not [one for one in secrets if one in output or one in str(machine.calls())]
    assert len(secrets) == 3
    assert min(map(len, secrets)) >= 32


def test_no_requeue_prints_sbatch_command_to_resume(machine):
    spec = JobSpec(command="a b", requeue=False)
    code, output = machine.run(spec, "it's", "--lr", "", CODE="75")
    assert code == 75
    run = f"{machine.folder}/runs/name-7"
    script = f"{machine.folder}/runs/job-7.sh"
    go_on = output.splitlines()[-1]
    assert go_on == f"    HPCTRAIN_RUN_DIR='{run}' sbatch {script} it\\'s --lr '' --resume"
    assert Path(script).read_text() == "#!/bin/bash\n"


def test_max_restarts_exit_codes(machine):
    spec = JobSpec(command="a b", max_restarts=2)
    for restarts, expected in ((1, 75), (2, 76), (3, 76)):
        code, output = run_stopped(machine, spec, SLURM_RESTART_COUNT=str(restarts))
        assert code == expected
        assert ("the limit is 2" in output) == (expected == 76)
        assert "/runs/job-7.sh --resume\n" in output


def test_resume_command_of_array_task(machine):
    sweep = JobSpec(command="a b", sweep={"lr": [1]}, requeue=False)
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    output = run_stopped(machine, sweep, **array)[1]
    run, script = (f"{machine.folder}/runs/{name}" for name in ("name-7_0", "job-7_0.sh"))
    assert (
        output.splitlines()[-1]
        == f"    HPCTRAIN_RUN_DIR='{run}' sbatch --array=0 {script} --resume"
    )


def test_variables_of_outer_job_are_ignored(printing_machine):
    """Run with the variables that sbatch passes on from a requeued array task."""
    outer = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    of_outer_job = {
        "HPCTRAIN_STOP_FILE": "/outer/stop",
        "HPCTRAIN_RUN_DIR": "/outer/run",
        "OUTER": "yes",
    }
    code, output = printing_machine.run(
        JobSpec(command="a", max_restarts=1), **outer, **of_outer_job
    )
    assert code == 0
    assert "job 7, start 0, on" in output
    assert f"run={printing_machine.folder}/runs/name-7 " in output


def test_script_never_requeues_another_job(machine):
    """Include a Slurm that does not answer before the end."""
    calls = machine.folder / "calls"
    machine.program(
        "scontrol",
        f"""#!/bin/sh
echo "$@" >>{calls}
[ "$(wc -l <{calls})" -gt 1 ] || exit 1
echo "JobId=5 ArrayJobId=5 ArrayTaskId=3 JobName=a JobState=RUNNING Reason=None"
""",
    )
    outer = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    code, output = run_stopped(machine, JobSpec(command="a"), **outer)
    assert code == 75
    assert "is unknown: this script does not requeue it" in output
    assert "requeue" not in calls.read_text()


def test_cd_in_setup_moves_ranks_not_run_directory(printing_machine):
    (printing_machine.folder / "src").mkdir()
    spec = JobSpec(command="a", run_dir="my-run", setup=("cd src",))
    output = printing_machine.run(spec)[1]
    assert f"run={printing_machine.folder}/my-run here={printing_machine.folder}/src\n" in output


def test_run_directory_shared_by_array_tasks_is_refused(printing_machine):
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "2"}
    spec = JobSpec(command="a", array="0-1")
    code, output = printing_machine.run(spec, HPCTRAIN_RUN_DIR="x", **array)
    assert (code, output) == (2, "HPCTRAIN_RUN_DIR=x: one directory, 2 tasks\n")
    assert (
        printing_machine.run(
            spec, HPCTRAIN_RUN_DIR="x", **{**array, "SLURM_ARRAY_TASK_COUNT": "1"}
        )[0]
        == 0
    )


def test_site_sh_cannot_change_script_variables(printing_machine):
    site_file(
        printing_machine,
        "job=1 command=(echo hijacked) run=/x; set -- other words; code=75 shown=1",
    )
    code, output = printing_machine.run(JobSpec(command="a"), "more")
    assert code == 0
    assert (
        "job 7, start 0, on node[1-3]: srun --kill-on-bad-exit=1 --cpus-per-task=1 a more" in output
    )


def test_site_sh_gets_no_arguments(printing_machine):
    (printing_machine.folder / "site.sh").write_text('echo "site got $#"')
    code, output = printing_machine.run(JobSpec(command="a"), "--lr", "1", HPCTRAIN_SITE="site.sh")
    assert code == 0
    assert output.startswith("site got 0\n")


def test_site_sh_exit_ends_job_with_message(printing_machine):
    path = site_file(printing_machine, "exit 0")
    code, output = printing_machine.run(JobSpec(command="a"))
    assert (code, output) == (2, f"{path} calls exit, which ends the job; it may use return\n")


def test_signal_during_setup_stops_ranks(machine):
    site_file(machine, "kill -USR2 $$")
    machine.program("srun", '#!/bin/sh\n[ -e "$HPCTRAIN_STOP_FILE" ] && echo stop-file; exit 75\n')
    code, output = machine.run(JobSpec(command="a", requeue=False))
    assert code == 75
    assert "\nstop-file\n" in output


@pytest.mark.parametrize("runtime", ["", "pyxis"])
def test_container_refuses_bind_folders_with_comma_or_colon(printing_machine, runtime):
    spec = JobSpec(command="a", container="a.sif", container_runtime=runtime)
    code, output = printing_machine.run(spec, SLURM_JOB_NAME="lr=0.1,seed:2")
    assert code == 2
    assert "a container cannot mount folders with , or :" in output


# --- copies on the local disks of the hosts


def test_stage_code_leaves_out_runs_git_and_venv(machine):
    for name in ("runs/old", ".git", ".venv/bin", "package/runs"):
        (machine.folder / name).mkdir(parents=True)
        (machine.folder / name / "file").touch()
    list_it = "find . -type f; pwd; stat -c %a .."
    machine.program(
        "srun", f'#!/bin/sh\ncase "$*" in *ranks*) {list_it}; exit;; esac\n'
        'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"\n'
    )  # fmt: skip
    code, output = machine.run(JobSpec(command="ranks", stage_code="."))
    scratch = f"{machine.environ['TMPDIR']}/hpctrain-ada-7-0"
    assert (code, output.splitlines()[1:]) == (0, ["./package/runs/file", f"{scratch}/code", "700"])
    assert not Path(scratch).exists()


@pytest.mark.parametrize(
    "existing", ["a link", "another user's", "this user's", "of another start"]
)
def test_staging_never_uses_existing_folder(machine, lacking, existing):
    scratch = Path(machine.environ["TMPDIR"], "hpctrain-ada-7-0")
    if existing == "a link":
        (machine.folder.parent / "target").mkdir()
        scratch.symlink_to(machine.folder.parent / "target")
    else:
        scratch.mkdir()
    (scratch / "my-run").touch()
    if existing == "another user's":
        if os.geteuid():
            lacking("mount", "a folder of another user needs root")
        scratch.chmod(0o777)
        os.chown(scratch, 1, 1)
    if existing == "of another start":
        (scratch / ".start").write_text("0123")
    code, output = machine.run(JobSpec(command="a", stage_code="."))
    assert code == 1
    assert f"a host could not copy code to {scratch}: see the messages above\n" in output
    assert re.search("hpctrain-ada-7-0.: File exists", output)
    assert len(machine.calls()) == 2, "the ranks have started"
    assert (scratch / "my-run").exists()


# Makes the copies, and kills the job where the ranks should start.
KILLED = """#!/bin/sh
case "$*" in *" bash -c "*) ;; *) kill -KILL $PPID; exit ;; esac
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


def test_staging_removes_copies_of_earlier_start_only(machine):
    scratch = Path(machine.environ["TMPDIR"])
    killed = JobSpec(command="a", stage_code=".")
    machine.program("srun", KILLED)
    assert machine.run(killed)[0] == -9
    machine.program("srun", RECORD.format(folder=machine.records))
    assert sorted(os.listdir(scratch / "hpctrain-ada-7-0")) == [".start", "code"]
    others = [f"hpctrain-ada-{rest}" for rest in ("7-4-0", "7-5", "7-results", "77-0")]
    for name in others:
        shutil.copytree(scratch / "hpctrain-ada-7-0", scratch / name)
    shutil.rmtree(scratch / "hpctrain-ada-7-5")
    (scratch / "hpctrain-ada-7-5").mkdir()  # without a .start file
    (scratch / "hpctrain-ada-7-6").write_text("a file")
    (scratch / "hpctrain-ada-7-1").symlink_to("hpctrain-ada-77-0")
    code, output = machine.run(killed, SLURM_RESTART_COUNT="2")
    assert code == 0, output
    others += ["hpctrain-ada-7-1", "hpctrain-ada-7-6"]
    assert sorted(os.listdir(scratch)) == sorted(others)
    assert sorted(os.listdir(scratch / "hpctrain-ada-77-0")) == [".start", "code"]


def test_stage_data_follows_links_and_sets_variable(machine):
    (machine.folder / "far").write_text("image")
    (machine.folder / "my data" / "train").mkdir(parents=True)
    (machine.folder / "my data" / "train" / "x.jpg").symlink_to(machine.folder / "far")
    machine.program(
        "srun", '#!/bin/sh\ncase "$*" in *ranks*) cd "$HPCTRAIN_DATA" && find . ! -type d;'
        ' pwd; exit;; esac\nwhile [ "${1#--}" != "$1" ]; do shift; done; exec "$@"\n'
    )  # fmt: skip
    code, output = machine.run(JobSpec(command="ranks", stage_data="my data/"))
    scratch = f"{machine.environ['TMPDIR']}/hpctrain-ada-7-0"
    assert (code, output.splitlines()[1:]) == (0, ["./my data/train/x.jpg", f"{scratch}/data"])
    assert not Path(scratch).exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stage_code": "missing"}, "missing: Cannot open"),
        ({"stage_data": "images.tar"}, "images.tar is no folder on "),
        ({"stage_environment": "images.tar"}, "images.tar has no bin/ at its top"),
    ],
)
def test_staging_failure_starts_no_rank(machine, more, message):
    with tarfile.open(machine.folder / "images.tar", "w") as archive:
        archive.add(machine.bin, "env/bin")
    code, output = machine.run(JobSpec(command="a", **more))
    assert code == 1
    assert message in output
    assert "a host could not copy " in output
    assert not [call for call in machine.calls() if call[-1] == "a"]
    assert not list(Path(machine.environ["TMPDIR"]).iterdir())


AS_A_USER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
case "$1" in python) exit ;; esac
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
"""


@pytest.fixture
def open_machine():
    """Return a machine in a folder that all users may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Machine(Path(folder) / "machine")


def test_staging_removes_read_only_copies_as_user(open_machine, lacking):
    """Stage read-only folders, like shared data; their files cannot be removed as they are."""
    if os.geteuid():
        lacking("mount", "to become a user that is not root takes root")
    machine = open_machine
    scratch = Path(machine.environ["TMPDIR"])
    scratch.chmod(0o777)
    old = scratch / "hpctrain-ada-7-0"
    for image in (machine.folder / "images" / "a" / "x.jpg", old / "data" / "a" / "x.jpg"):
        image.parent.mkdir(parents=True)
        image.touch()
        image.parent.chmod(0o555)
    (old / ".start").touch()
    for path in (old, *old.rglob("*")):  # copies of a killed start
        os.chown(path, 65534, 65534)
    machine.program("srun", AS_A_USER)
    spec = JobSpec(command="python a", stage_data="images", stage_code=".")
    code, output = machine.run(spec, SLURM_RESTART_COUNT="1")
    assert (code, list(scratch.iterdir())) == (0, []), output
    assert "denied" not in output


# --- scripts for this machine


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"command": "./train"}, "python SCRIPT"),
        ({"container": "x.sif"}, "container on this machine"),
        ({"sweep": {"lr": [1]}}, "sweep on this machine"),
        ({"stage_code": "."}, "stage_code on this machine"),
        ({"stage_data": "images"}, "stage_data on this machine"),
    ],
)
def test_local_script_refuses_cluster_fields(more, names):
    with pytest.raises(UsageError, match=names):
        render_local(JobSpec(**{"command": "python train.py", **more}))
