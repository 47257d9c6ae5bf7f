"""Rendered scripts: their text, and the words and variables that reach `hpctrain run`."""

import argparse
import difflib
import importlib.util
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from stand_ins import Machine

from hpctrain.cli import main
from hpctrain.cli import run as run_command
from hpctrain.errors import UsageError
from hpctrain.jobs import values
from hpctrain.jobs.lint import lint
from hpctrain.jobs.script import render
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
    # Files that are sourced exist on a cluster only.
    command = ["shellcheck", "--exclude=SC1091", *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stdout


def test_lint_finds_nothing_in_rendered_scripts(tmp_path):
    (tmp_path / "logs").mkdir()  # one of the scripts needs this folder
    for path, text in {**renew.scripts(), **renew.more()}.items():
        if "#SBATCH" in text:
            assert not lint(text, tmp_path), path


def test_render_without_requeue_and_signal_leaves_them_out():
    less = render(JobSpec(command="python train.py", requeue=False, signal_time=0))
    assert "#SBATCH --no-requeue\n" in less
    assert "--signal" not in less
    assert "trap ''" not in less


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"command": "python train.py -x"}, "hpctrain run train.py -x"),
        ({"command": "python3 -m my.train -x"}, "python3 -m hpctrain run -m my.train -x"),
        ({"command": "/opt/python3.12 a.py"}, "/opt/python3.12 -m hpctrain run a.py"),
        ({"command": "python -u train.py"}, "hpctrain run -- python -u train.py"),
        ({"command": "./train -x"}, "hpctrain run -- ./train -x"),
        ({}, "hpctrain run --"),
        ({"command": "a.out", "launcher": "none"}, "hpctrain run --once -- a.out"),
        ({"command": "python x.py", "launcher": "srun"}, "hpctrain run --direct -- python x.py"),
        ({"command": "python x.py", "elastic": True}, "hpctrain run --elastic x.py"),
        ({"command": "python x.py", "max_restarts": 2}, "hpctrain run --max-restarts 2 x.py"),
        (
            {"command": "python x.py", "stage_environment": "a.tar"},
            "hpctrain run --stage-environment a.tar -- python x.py",
        ),
        (
            {"command": "python x.py", "container": "a.sif", "environment": {"A": "1", "B": "2"}},
            "hpctrain run --container a.sif --container-env A,B -- python x.py",
        ),
        (
            {"command": "python x.py", "container": "a#b", "container_runtime": "pyxis"},
            "hpctrain run --direct --container 'a#b' -- python x.py",
        ),
    ],
)
def test_script_ends_with_one_command(more, words):
    assert render(JobSpec(**more)).splitlines()[-1] == f'exec {words} "$@"'


def test_long_command_is_wrapped_between_words():
    words = [f"word {number}" for number in range(30)]
    spec = JobSpec(command=["python", "train.py", *words], run_dir="runs/one")
    command = render(spec)[render(spec).index("exec ") :]
    assert max(map(len, command.splitlines())) <= 100
    assert shlex.split(command.replace("\\\n", ""))[5:] == ["train.py", *words, "$@"]


def test_render_about_text_stays_a_comment():
    about = "One\n#SBATCH --nodes=9\r\ntouch canary\x1b"
    head = render(JobSpec(about=about, command="a")).partition("#SBATCH --job-name")[0]
    assert head.splitlines() == [
        *("#!/bin/bash", "# One", "# #SBATCH --nodes=9", r"# touch canary\x1b", "#")
    ]


# --- other schedulers


@pytest.mark.parametrize("scheduler", ["pbs", "flux"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qos", "normal"), ("constraint", "a100"), ("exclude", "node1"), ("max_restarts", 3),
        ("extra", {"exclusive": True}), ("sweep", {"lr": [1]}), ("elastic", True), ("spares", 1),
        ("part", [{"nodes": 2}]), ("container", "a.sif"), ("stage_data", "/data"),
        ("requeue_plain", True), ("finish", ["date"]), ("launcher", "srun"),
    ],
)  # fmt: skip
def test_other_scheduler_refuses_what_its_scripts_cannot_say(scheduler, name, value):
    spec = JobSpec(command="python train.py", **{name: value})
    with pytest.raises(UsageError, match=f"{name}.* with the scheduler {scheduler}") as caught:
        render(spec, scheduler=scheduler)
    assert caught.value.code == "HT801"


@pytest.mark.parametrize(
    ("scheduler", "more", "found"),
    [
        ("pbs", {"array": "1,3"}, "array = 1,3"),
        ("pbs", {"array": "4"}, "array = 4"),
        ("pbs", {"dependency": "singleton"}, "dependency = singleton"),
        ("pbs", {"output": "%j.log"}, "output = %j.log"),
        ("pbs", {"memory": "0"}, "memory = 0"),
        ("pbs", {"array": "0-3", "requeue": False}, "requeue = false with an array"),
        ("pbs", {"gpus_per_node": "a100:4"}, "gpus_per_node = a100:4"),
        ("pbs", {"partition": "a b"}, "partition = 'a b'"),
        ("pbs", {"account": "a\n#PBS -q b"}, "account = "),
        ("flux", {"array": "1-5"}, "array with the scheduler flux"),
        ("flux", {"memory": "4G"}, "memory with the scheduler flux"),
    ],
)
def test_other_scheduler_refuses_values_that_it_would_read_otherwise(scheduler, more, found):
    with pytest.raises(UsageError, match=re.escape(found)):
        render(JobSpec(**{"command": "python train.py", **more}), scheduler=scheduler)


def test_command_in_a_job_of_another_scheduler_gets_the_signal_once_before_the_end(tmp_path):
    """Run the script by bash, with a time limit of 4 s and a margin of 3 s."""
    program = tmp_path / "hpctrain"
    program.write_text(
        '#!/bin/bash\necho "$@" >words; trap "echo signal >>signals; exit 75" USR2\n'
        "echo ready; while :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    text = render(JobSpec(command="python x.py", time="4s", signal_time=3), scheduler="pbs")
    (tmp_path / "job.sh").write_text(text)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PBS_O_WORKDIR": str(tmp_path), "HOME": "/"}
    done = subprocess.run(["bash", "job.sh"], env=env, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 75
    assert (tmp_path / "words").read_text() == "run --nproc-per-node 1 x.py\n"
    assert (tmp_path / "signals").read_text() == "signal\n"


def test_render_refuses_options_without_command():
    with pytest.raises(UsageError, match="without a command"):
        render(JobSpec(launcher="none", sweep={"lr": [1]}))


def test_job_environment_cannot_set_variables_of_the_script():
    """Compare the names that the script assigns with the list of those that a job may not set."""
    assigned = set()
    for text in [*renew.scripts().values(), *renew.more().values()]:
        code = re.sub(r"^ *#.*", "", text, flags=re.M)
        assigned |= set(re.findall(r"(?:^|[{; ])([A-Za-z_]+)(?::?=| in )", code, re.M))
    assigned -= {"GREETING", "NCCL_DEBUG"}
    assert {"HPCTRAIN_SITE", "file"} <= assigned <= set(values.SCRIPT_VARIABLES)
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
    *("${x-$(touch {})}", "--once", "--setting"),
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
        # A JobSpec refuses "--".
        return f"{text}{end}" if text.strip("./") not in ("", "--") else f"x{end}"

    def spec(self):
        """Return a spec with such texts in all fields except those in lines of #SBATCH."""
        some, choice = self.chance.random, self.chance.choice
        launcher = choice(("hpctrain", "hpctrain", "srun", "none"))
        program = choice((("program",), ("python", "x y.py"), ("python3", "-m", "a.b")))
        more = {
            "launcher": launcher,
            "environment": {name: self.text() for name in ("A", "b_1", "http_proxy", "PYTHONPATH")},
        }
        contained = launcher != "none" and some() < 0.3
        if contained:
            more["container"] = self.path()
            runtimes = ("apptainer", "pyxis") if launcher == "hpctrain" else ("pyxis",)
            more["container_runtime"] = choice(runtimes)
        if some() < 0.5:
            more["run_dir"] = self.path(",:" if contained else "")
        if some() < 0.3:
            more["sweep"] = [{"a": self.text(), "b-c": self.text()} for _ in range(3)]
        if some() < 0.3:
            more["finish"] = (self.text(), self.text())
        if launcher == "hpctrain" and more.get("container_runtime") != "pyxis":
            if some() < 0.3:
                more["stage_code"] = self.path()
            if some() < 0.2:
                more["stage_data"] = f"{self.path()}/data"
            if not contained and some() < 0.2:
                more["stage_environment"] = self.path(end=".tar")
        if not contained and "stage_environment" not in more and some() < 0.5:
            more["venv"] = self.path()
        return JobSpec(command=(*program, *(self.text() for _ in range(3))), **more)


def parsed(words):
    """Return the arguments that `hpctrain run` reads from the words of a call."""
    parser = argparse.ArgumentParser()
    run_command.add(parser)
    return parser.parse_args(words[words.index("run") + 1 :])


def command_of(words, found):
    """Return the command that the ranks run."""
    if found.program[0] == "--":
        return found.program[1:]
    python = "python" if words[0] == "hpctrain" else words[0]
    return [python, *["-m"] * found.module, *found.program]


def make_venv(spec, folder):
    if spec.venv:
        (folder / spec.venv / "bin").mkdir(parents=True, exist_ok=True)
        (folder / spec.venv / "bin" / "activate").write_text("export ACTIVE=yes\n")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_hostile_texts_reach_hpctrain_run_and_run_no_code(tmp_path, seed):
    canary = tmp_path / "canary"
    for number in range(25):
        machine = Machine(tmp_path / str(number))
        hostile = Hostile(1000 * seed + number, canary)
        spec = hostile.spec()
        make_venv(spec, machine.folder)
        more = [hostile.text() for _ in range(2)]
        code, output = machine.run(spec, *more)
        assert code == 0, (spec, output)
        (words,) = machine.calls()
        found = parsed(words)
        for name in ("run_dir", "container", "stage_code", "stage_environment", "stage_data"):
            assert (getattr(found, name) or "") == getattr(spec, name), (spec, words)
        assert (found.finish or "") == "\n".join(spec.finish), (spec, words)
        settings = [
            [word for name, text in one for word in (f"--{name}", text)] for one in spec.sweep
        ]
        assert [shlex.split(text) for text in found.setting] == settings, (spec, words)
        assert found.once == (spec.launcher == "none")
        assert command_of(words, found) == [*spec.command, *more], (spec, words)
        variables = machine.variables()
        assert spec.environment.items() <= variables.items(), (spec, variables)
        assert ("ACTIVE" in variables) == bool(spec.venv)
        assert not canary.exists(), spec
        shutil.rmtree(tmp_path / str(number))
