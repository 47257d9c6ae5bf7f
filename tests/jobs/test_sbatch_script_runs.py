"""Rendered scripts, run by bash with a stand-in for `hpctrain`: what comes before `hpctrain run`.

tests/jobs/test_sbatch_script_on_slurm.py runs them on a real Slurm.
"""

import pytest
from stand_ins import Machine

from hpctrain.jobs.spec import JobSpec

PRINTS = """#!/bin/sh
echo "run: A=$A B=$B threads=$OMP_NUM_THREADS here=$(pwd) $*"
"""


@pytest.fixture
def machine(tmp_path):
    """Return a machine on which `hpctrain` prints some variables."""
    made = Machine(tmp_path / "machine")
    made.program("hpctrain", PRINTS)
    return made


def site_file(machine, text):
    path = machine.folder.parent / ".config" / "hpctrain" / "site.sh"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def module_system(text="export A=module"):
    """Return a `module` function as a login shell exports it; only `absent` is unknown."""
    body = f'[ "$2" != absent ] || return 1; {text}; unset "$never_set"'
    return {"BASH_FUNC_module%%": f"() {{ {body}; }}"}


def venv(machine, text):
    (machine.folder / "my env" / "bin").mkdir(parents=True)
    (machine.folder / "my env" / "bin" / "activate").write_text(text)
    return "my env"


def test_environment_order_site_modules_setup_venv_spec(machine):
    site_file(machine, "export A=site OMP_NUM_THREADS=7; B=$never_set")
    modules = module_system()
    more = {}
    for name, field, value in (
        ("site", "setup", ()),
        ("module", "modules", ("there",)),
        ("setup", "setup", ("export A=setup",)),
        ("venv", "venv", venv(machine, 'export A=venv B="$A"')),
        ("spec", "environment", {"A": "spec"}),
    ):
        more[field] = value
        code, output = machine.run(JobSpec(command="a", **more), A="inherited", **modules)
        assert code == 0
        assert f"A={name} " in output
        assert "threads=7 " in output
    # Without a value in the job, the agents choose the number of threads.
    assert "threads= " in machine.run(JobSpec(command="a"), HPCTRAIN_SITE="/dev/null")[1]
    more["environment"] = {"OMP_NUM_THREADS": "3"}
    assert "threads=3 " in machine.run(JobSpec(command="a", **more), **modules)[1]


def test_site_sh_failure_is_printed_and_job_continues(machine):
    path = site_file(machine, '[ "$unset" = x ] && true\nno-such-program\nexport A=site\nfalse')
    code, output = machine.run(JobSpec(command="a"))
    assert (code, "A=site " in output) == (0, True)
    assert f"{path}: line 2: no-such-program: command not found\n" in output
    path.write_text("if then")
    code, output = machine.run(JobSpec(command="a"))
    assert (code, f"{path}: line 1: syntax error" in output) == (0, True)
    code, output = machine.run(JobSpec(command="a"), HPCTRAIN_SITE="/no/such/file")
    assert (code, output.startswith("run: ")) == (0, True)


@pytest.mark.parametrize(
    ("more", "code", "reason"),
    [
        ({"modules": ("there", "absent")}, 2, ""),
        ({"setup": ("false", "echo next")}, 1, ""),
        ({"setup": ("exit 0",)}, 2, ""),
        ({"setup": ("exit 75",)}, 75, ""),  # only `hpctrain run` requeues a job
        ({"setup": ('echo "got $unset_before"', "exit 3")}, 3, "got \n"),
        ({"venv": "my env"}, 2, "./my env/bin/activate: No such file or directory\n"),
        ({"conda": "torch"}, 2, "conda: command not found\n"),
    ],
)
def test_failure_before_hpctrain_run_ends_the_job(machine, more, code, reason):
    ended, output = machine.run(JobSpec(command="a", **more), **module_system())
    assert ended == code
    assert reason in output
    shown = 0 if more.get("setup") == ("exit 0",) else code
    assert output.endswith(f"ended before hpctrain run, code {shown}\n")
    assert "run: " not in output
    assert "next" not in output


def test_site_sh_exit_ends_the_job(machine):
    site_file(machine, "exit 0")
    code, output = machine.run(JobSpec(command="a"))
    assert (code, output) == (2, "ended before hpctrain run, code 0\n")


def test_missing_hpctrain_ends_the_job_with_a_message(machine):
    (machine.bin / "hpctrain").unlink()
    code, output = machine.run(JobSpec(command="a"))
    assert code == 127
    assert "hpctrain: not found" in output
    assert output.endswith("ended before hpctrain run, code 127\n")


CONDA = """#!/bin/sh
echo 'conda() { [ "$2" = torch ] && export A=conda; }'
"""


def test_conda_environment_is_activated(machine):
    machine.program("conda", CONDA)
    assert "A=conda " in machine.run(JobSpec(command="a", conda="torch"))[1]
    code, output = machine.run(JobSpec(command="a", conda="it's $(id)"))
    assert (code, output) == (2, "ended before hpctrain run, code 2\n")
    other = {"CONDA_EXE": f"{machine.bin}/other"}
    machine.program("other", CONDA.replace("A=conda", "A=other"))
    assert "A=other " in machine.run(JobSpec(command="a", conda="torch"), **other)[1]


def test_exit_code_is_that_of_hpctrain_run(machine):
    machine.program("hpctrain", "#!/bin/sh\nexit 76\n")
    assert machine.run(JobSpec(command="a")) == (76, "")


def test_cd_in_setup_moves_the_ranks(machine):
    (machine.folder / "src").mkdir()
    output = machine.run(JobSpec(command="a", setup=("cd src",)))[1]
    assert f"here={machine.folder}/src run " in output


@pytest.mark.parametrize("signal", ["USR2", "HUP", "TERM"])
def test_save_signal_in_setup_does_not_end_the_job(machine, signal):
    """`hpctrain run` handles the signal; Slurm sends it only once."""
    spec = JobSpec(command="a", signal=signal, setup=(f"kill -{signal} $$",))
    code, output = machine.run(spec)
    assert (code, output.startswith("run: ")) == (0, True)
    none = JobSpec(command="a", signal=signal, signal_time=0, setup=(f"kill -{signal} $$",))
    assert machine.run(none)[0] < 0
