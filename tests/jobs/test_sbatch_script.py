"""Rendered scripts: their text, and the words and variables that reach the ranks unchanged."""

import difflib
import importlib.util
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from stand_ins import Machine, make_files

from hpctrain.cli import main
from hpctrain.errors import UsageError
from hpctrain.jobs import values
from hpctrain.jobs.lint import lint
from hpctrain.jobs.script import render, render_local
from hpctrain.jobs.spec import JobSpec

TOP = Path(__file__).resolve().parents[2]
_found = importlib.util.spec_from_file_location(
    "renew", TOP / "tests" / "jobs" / "golden" / "renew.py"
)
renew = importlib.util.module_from_spec(_found)
_found.loader.exec_module(renew)


# --- the text of the scripts


@pytest.mark.parametrize("path", renew.scripts(), ids=lambda path: str(path.relative_to(TOP)))
def test_rendered_scripts_match_golden_files(path):
    expected = renew.scripts()[path]
    found = path.read_text() if path.exists() else ""
    diff = "".join(
        difflib.unified_diff(found.splitlines(True), expected.splitlines(True), "there", "rendered")
    )
    assert not diff, f"python tests/jobs/golden/renew.py writes it anew:\n{diff}"


def test_every_golden_file_has_a_spec():
    files = {*(TOP / "tests" / "jobs" / "golden").glob("*.sh"), *(TOP / "sbatch").glob("*.sh")}
    assert files == set(renew.scripts())


def test_shellcheck_finds_nothing_in_rendered_scripts(lacking, tmp_path):
    if not shutil.which("shellcheck"):
        lacking("shellcheck", "apt-get install shellcheck")
    for name, text in renew.more().items():
        (tmp_path / f"{name}.sh").write_text(text)
    scripts = [*renew.scripts(), *tmp_path.glob("*.sh"), *(TOP / "sbatch").glob("*/*.sh")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert not done.stdout


def test_lint_finds_nothing_in_rendered_scripts(tmp_path):
    (tmp_path / "logs").mkdir()  # one of the scripts needs this folder
    for path, text in {**renew.scripts(), **renew.more()}.items():
        if "#SBATCH" in text:
            assert not lint(text, tmp_path), path


def test_render_without_requeue_and_signal_leaves_them_out():
    less = render(JobSpec(command="python train.py", requeue=False, signal_time=0))
    assert "scontrol requeue" not in less
    assert "--signal" not in less
    assert "USR2 TERM" not in less


def test_render_about_text_stays_a_comment():
    about = "One\n#SBATCH --nodes=9\r\ntouch canary\x1b"
    head = render(JobSpec(about=about, command="a")).partition("#SBATCH --job-name")[0]
    assert head.splitlines() == [
        *("#!/bin/bash", "# One", "# #SBATCH --nodes=9", r"# touch canary\x1b", "#")
    ]


def test_render_refuses_options_without_command():
    for more in ({"sweep": {"lr": [1]}}, {"backend": "ddp"}):
        with pytest.raises(UsageError, match="without a command"):
            render(JobSpec(launcher="none", **more))


def test_job_environment_cannot_set_variables_of_the_script():
    """Compare the names that the script assigns with the list of those that a job may not set."""
    assigned = set()
    for text in [*renew.scripts().values(), *renew.more().values()]:
        assigned |= set(re.findall(r"^ *(?:export |for )?([A-Za-z_]+)(?:=|\+=| in )", text, re.M))
    assigned -= {"GREETING", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "APPTAINERENV_NCCL_DEBUG"}
    assigned -= {"HPCTRAIN_DATA"}  # refused beside stage_data
    assigned -= {"old"}  # in a separate shell on the hosts
    assigned -= {"SLURM_RESTART_COUNT"}  # refused with all of this prefix
    assert assigned <= set(values.SCRIPT_VARIABLES)
    for name in values.SCRIPT_VARIABLES:
        with pytest.raises(UsageError, match=f"not '{name}'"):
            JobSpec(command="a", environment={name: "x"})


@pytest.fixture
def job_toml(tmp_path, monkeypatch):
    """Write a JOB.toml in a home without settings; return its path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "job.toml"
    path.write_text('command = ["python", "é.py", "a\\nb"]\nnodes = 2\n')
    return path


def test_render_command_prints_or_writes_script(job_toml, capfdbinary, tmp_path):
    spec = JobSpec(command=["python", "é.py", "a\nb"], nodes=2)
    assert main(["render", str(job_toml)]) == 0
    assert capfdbinary.readouterr().out == render(spec).encode()
    assert main(["render", "--nodes", "2", "--", *spec.command]) == 0
    assert capfdbinary.readouterr().out == render(spec).encode()
    assert main(["render", "-o", str(tmp_path / "job.sh"), str(job_toml)]) == 0
    assert (tmp_path / "job.sh").read_bytes() == render(spec).encode()
    assert not capfdbinary.readouterr().out


def test_render_command_names_an_output_that_cannot_be_written(job_toml, capfd, tmp_path):
    assert main(["render", "-o", str(tmp_path / "no" / "job.sh"), str(job_toml)]) == 2
    assert "No such file" in capfd.readouterr().err


# --- what reaches the ranks

PIECES = (
    *("'", '"', "\\", "\n", "\r", "\t", " ", "$", "`", "%", "-", "--", "é", "日本", "\x7f", "\x01"),
    *("\udcff", "*", "?", "~", "!", "#", "=", ":", ",", ";", "&", "|", "<", ">", "(", ")"),
    *("{a,b}", "[a]", "$HOME", "${PATH}", "$'\\n'", "$((1+1))", "\u2028", "EOF", "x", "\\x41", "."),
    *("\n#SBATCH --nodes=9", "%j", "\\'", "'\"'\"'", "$@", '"$@"', "\n}\n", "\nfi\n", "esac"),
    *("$(touch {})", "`touch {}`", ";touch {};", "\ntouch {}\n", "'$(touch {})'", '"$(touch {})"'),
    *("&& touch {} #", "| touch {}", "<(touch {})", ") touch {} (", "';touch {};'"),
    "${x-$(touch {})}",
)  # fmt: skip


class Hostile:
    """Random texts that would run code if they were not quoted."""

    def __init__(self, seed, canary):
        self.chance = random.Random(seed)
        self.canary = str(canary)

    def text(self):
        """Return a random text, which may be empty."""
        pieces = self.chance.choices(PIECES, k=self.chance.randrange(6))
        return "".join(pieces).replace("{}", self.canary)

    def path(self, without="", end=""):
        """Return a random relative path that a file system accepts."""
        text = "".join(one for one in self.text() if one not in without).lstrip("/")
        return f"{text}{end}" if text.strip("./") else f"x{end}"

    def spec(self):
        """Return a spec with such texts in all fields except those in lines of #SBATCH."""
        some = self.chance.random
        more = {
            "launcher": self.chance.choice(("srun", "srun", "torchrun", "horovodrun", "none")),
            "environment": {name: self.text() for name in ("A", "b_1", "http_proxy", "PYTHONPATH")},
            "requeue": some() < 0.5,
        }
        contained = more["launcher"] in ("srun", "torchrun") and some() < 0.3
        if contained:
            more["container"] = self.path() or "x"
            more["container_runtime"] = self.chance.choice(("apptainer", "pyxis"))
        if some() < 0.5:
            more["run_dir"] = self.path(",:" if contained else "")
        if some() < 0.3:
            more["sweep"] = [{"a": self.text(), "b-c": self.text()} for _ in range(3)]
        if some() < 0.3:
            more["stage_code"] = self.path()
        if some() < 0.2:
            more["stage_data"] = f"{self.path()}/data"
        if not contained and some() < 0.5:
            name = self.chance.choice(("venv", "stage_environment"))
            more[name] = self.path(end=".tar" if name == "stage_environment" else "")
        return JobSpec(command=("program", *(self.text() for _ in range(3))), **more)


def expected_words(spec, machine, run, index, more):
    """Return the expected words of the launcher, from the first one that the spec determines."""
    setting = spec.sweep[index] if spec.sweep else ()
    command = [*spec.command, *(word for name, text in setting for word in (f"--{name}", text))]
    command += more
    submit = str(machine.folder)
    scratch = f"{machine.environ['TMPDIR']}/hpctrain-ada-7{f'_{index}' if spec.sweep else ''}-0"
    start = f"{scratch}/code" if spec.stage_code else submit
    if not spec.container:
        return command
    if spec.container_runtime == "pyxis":
        mounts = f"{submit}:{submit},{run}:{run}"
        mounts += f",{scratch}:{scratch}" if spec.stage_code or spec.stage_data else ""
        near = spec.container.startswith(("./", "../"))
        image = f"{submit}/{spec.container}" if near else spec.container
        inside = [f"--container-image={image}", f"--container-mounts={mounts}"]
        return [*inside, f"--container-workdir={start}", command]
    binds = ["--bind", submit, "--bind", run]
    binds += ["--bind", scratch] if spec.stage_code or spec.stage_data else []
    inside = ["apptainer", "exec", "--pwd", start, *binds, f"{submit}/{spec.container}"]
    return [*inside, command] if spec.launcher == "torchrun" else [*inside, *command]


def ends_with(words, expected):
    """Return whether words end with the expected ones; a list in these is the end of the rest."""
    if expected and isinstance(expected[-1], list):
        *first, last = expected
        at = words.index(first[0])
        return words[at : at + len(first)] == first and words[-len(last) :] == last
    return words[-len(expected) :] == expected


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_hostile_texts_reach_ranks_and_run_no_code(tmp_path, seed):
    canary = tmp_path / "canary"
    for number in range(25):
        machine = Machine(tmp_path / str(number))
        hostile = Hostile(1000 * seed + number, canary)
        spec = hostile.spec()
        make_files(spec, machine.folder)
        more = [hostile.text() for _ in range(2)]
        index = 1
        array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"} if spec.sweep else {}
        code, output = machine.run(spec, *more, **array)
        label = "7_1" if spec.sweep else "7"
        run = f"{machine.folder}/{spec.run_dir or 'runs/name-' + label}"
        run += f"/{index}" if spec.run_dir and spec.sweep else ""
        ranks = [call for call in machine.calls() if more == call[-2:]]
        assert (code, len(ranks)) == (0, 1), (spec, output)
        assert ends_with(ranks[0], expected_words(spec, machine, run, index, more)), (spec, ranks)
        found = machine.variables(machine.calls().index(ranks[0]))
        assert {**spec.environment, "HPCTRAIN_RUN_DIR": run}.items() <= found.items(), (spec, found)
        assert ("ACTIVE" in found) == bool(spec.venv)
        assert Path(run).is_dir()
        assert not canary.exists(), spec
        assert not list((tmp_path / str(number) / "scratch").iterdir())
        shutil.rmtree(tmp_path / str(number))


def test_hostile_texts_reach_local_ranks_and_run_no_code(tmp_path):
    canary = tmp_path / "canary"
    for number in range(10):
        machine = Machine(tmp_path / str(number))
        hostile = Hostile(number, canary)
        words = [hostile.text() for _ in range(3)]
        environment = {"A": hostile.text(), "PYTHONPATH": hostile.text()}
        run, venv, more = hostile.path(), hostile.path(), hostile.text()
        spec = JobSpec(
            command=["python", "x.py", *words], environment=environment, run_dir=run, venv=venv
        )
        make_files(spec, machine.folder)
        code, output = machine.bash(render_local(spec), more, cwd=machine.folder)
        assert code == 0, (spec, output)
        start = ["python", "-m", "hpctrain", "run", "--nproc-per-node", "1", "x.py"]
        assert machine.calls() == [[*start, *words, more]]
        expected = {**environment, "HPCTRAIN_RUN_DIR": f"{machine.folder}/{run}", "ACTIVE": "yes"}
        assert expected.items() <= machine.variables().items()
        assert not canary.exists(), spec
