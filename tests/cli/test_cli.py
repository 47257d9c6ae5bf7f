"""The output of the command line, without torch and on any Python."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import hpctrain
from hpctrain import __main__, rendezvous
from hpctrain.cli import COMMANDS, main, parser_of
from hpctrain.cluster import env_vars, visible_gpus
from hpctrain.errors import StartError
from hpctrain.errors.codes import codes

PACKAGE = Path(hpctrain.__file__).parent
TOP = Path(__file__).resolve().parents[2]
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def hpctrain_command(*arguments, env=None, python=("-m", "hpctrain")):
    """Run the command as a user does; return the completed process."""
    return subprocess.run(
        [sys.executable, *python, *arguments],
        env={**env_vars.scrubbed(os.environ), "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command_and_each_has_its_own_help(capsys):
    assert COMMANDS
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name} " in output or f"\n    {name}\n" in output
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert f"usage: hpctrain {name}" in capsys.readouterr().out


def test_commands_for_programs_are_those_of_the_command_line():
    lines = re.findall(r"^    hpctrain (.+?)(?:  +#.*)?$", (TOP / "llms.txt").read_text(), re.M)
    assert len(lines) == 10
    for line in lines:
        words = shlex.split(line)
        parsed = parser_of(words[:1]).parse_args(words)
        assert callable(parsed.command), line


def test_hpctrain_alone_shows_the_first_commands(capsys):
    assert main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("usage: hpctrain COMMAND")
    shown = [line.split()[1] for line in lines if line.startswith("  hpctrain ")]
    assert len(shown) == 5
    assert {*shown} <= {*COMMANDS}


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["no-such-command"], "[-h]"),
        (["explain", "--no-such-option"], "explain [-h]"),
        (["export", "runs/a", "-o", "x"], "export [-h]"),
        (["status", "--json", "--no"], "status [-h]"),
        (["bench", "step", "--no-such-option"], "bench step [-h]"),
    ],
)
def test_wrong_use_exits_with_code_2_and_the_usage_of_the_command(arguments, usage, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: hpctrain {usage}")


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hpctrain {hpctrain.__version__}\n"


@pytest.fixture
def alone(monkeypatch):
    """Let no other rank be there."""

    def fail(*_, **__):
        raise StartError.of_text("HT201", "no other rank is there", "all ranks")

    monkeypatch.setattr(rendezvous, "meet", fail)


@pytest.mark.usefixtures("alone")
def test_explain_prints_each_value_with_its_variable(monkeypatch, capsys):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["explain"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for field, value, source in (
        ("rank", "3", "RANK"),
        ("world_size", "4", "WORLD_SIZE"),
        ("local_rank", "1", "LOCAL_RANK"),
        ("node_rank", "1", "GROUP_RANK"),
    ):
        assert [field, value, source] in lines
    assert ["hosts", "?", "set", "by", "the", "rendezvous"] in lines
    assert lines[0][:2] == ["launcher", "torchrun"]


@pytest.mark.usefixtures("alone")
def test_explain_shows_the_values_that_follow_from_the_variables(monkeypatch, capsys):
    sizes = {"RANK": 1, "SIZE": 3, "LOCAL_RANK": 1, "LOCAL_SIZE": 3}
    for name, value in sizes.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    assert main(["explain"]) == 0
    rows = capsys.readouterr().out.splitlines()
    found = {row.split()[0]: row.split(maxsplit=2)[1:] for row in rows}
    assert found["local_world_size"] == ["3", "HOROVOD_LOCAL_SIZE"]
    assert found["num_nodes"] == ["1", "follows from the other values"]
    assert found["node_rank"] == ["0", "follows from the other values"]
    assert main(["explain", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert (explained["num_nodes"], explained["node_rank"]) == (1, 0)
    assert "num_nodes" not in explained["sources"]


@pytest.mark.e2e
def test_explain_of_several_ranks_is_one_table(tmp_path):
    """Start explain on two hosts as srun would; rank 0 prints its values and a row for each."""
    command = ["run", "--as", "slurm", "--nodes", "2", "--nproc-per-node", "2,1"]
    done = hpctrain_command(*command, "-m", "hpctrain", "explain")
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("0: ") for line in done.stdout.splitlines()]
    assert lines[0].split()[:2] == ["launcher", "slurm"]
    assert [line.split()[:2] for line in lines].count(["world_size", "3"]) == 1
    rows = [line.split() for line in lines[lines.index("ranks:") + 1 :]]
    assert rows[0][:5] == ["RANK", "HOST", "NODE", "LOCAL", "RANK"]
    assert [row[:4] for row in rows[1:]] == [
        ["0", "127.0.0.1", "0", "0"],
        ["1", "127.0.0.1", "0", "1"],
        ["2", "127.0.0.2", "1", "0"],
    ]
    cores = str(len(os.sched_getaffinity(0)))
    assert {row[4] for row in rows[1:]} == {cores}


@pytest.mark.usefixtures("alone")
def test_explain_of_a_rank_that_finds_no_other_prints_its_values(monkeypatch, capsys):
    for name, value in {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["explain"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("launcher          torchrun ")
    assert "ranks:" not in output
    assert "warning: no other rank is there\n  expected: all ranks\n" in output


def test_explain_json_refuses_a_contradiction_with_one_error():
    done = hpctrain_command("explain", "--json", env={"RANK": "1"})
    assert done.returncode == 2
    assert done.stderr.startswith("hpctrain: error: RANK=1, but no WORLD_SIZE")
    assert done.stderr.count("error") == 1
    assert "Traceback" not in done.stderr
    explained = json.loads(done.stdout)
    assert explained.pop("sources") == {}
    assert explained.pop("warnings") == []
    (found,) = explained.pop("ignored")
    assert (found["variable"], found["value"], found["launcher"]) == ("RANK", "1", "env")
    assert set(explained.values()) == {None}


def test_explain_strict_turns_warnings_into_errors(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "815")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert main(["explain"]) == 0
    output = capsys.readouterr().out
    assert main(["explain", "--strict"]) == 2
    assert capsys.readouterr().out == output
    assert main(["explain", "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert list(warning) == ["code", "found", "fixes"]
    assert warning["found"].startswith("this process trains alone")
    first, *others = warning["fixes"]
    lines = output[output.index("warning: ") :].splitlines()
    assert lines[0] == f"warning: {warning['found']}"
    assert lines[1].startswith("  expected: ")
    assert lines[2 : 4 + len(others)] == [
        f"  fix:      {first}",
        *(f"  or:       {fix}" for fix in others),
        f"  more:     hpctrain explain {warning['code']}",
    ]


def test_explain_names_gpus_that_the_launch_leaves_idle(monkeypatch, capsys):
    """The GPUs are stand-ins for device files."""
    monkeypatch.setattr(visible_gpus, "here", lambda: ["0", "1", "2", "3"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["explain"]) == 0
    assert "warning: 3 of the 4 GPUs on " in capsys.readouterr().out
    for name, value in {"JOB_ID": "815", "NTASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main(["explain"]) == 0
    output = capsys.readouterr().out
    assert output.count("warning: ") == 1, "idle GPUs follow from idle tasks"
    assert "HT110" in output


@pytest.mark.parametrize("spelt", [str.upper, str.lower])
def test_explain_code_prints_meaning_causes_and_fix(spelt, capsys):
    code, entry = "HT614", codes()["HT614"]
    assert main(["explain", spelt(code)]) == 0
    first, *more = entry.fixes
    assert capsys.readouterr().out.splitlines() == [
        f"{code}: {entry.meaning}",
        *(f"  cause:    {cause}" for cause in entry.causes),
        f"  fix:      {first}",
        *(f"  or:       {fix}" for fix in more),
    ]


def test_explain_code_json_is_the_entry_of_the_table(capsys):
    code, entry = "HT614", codes()["HT614"]
    assert main(["explain", code.lower(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "code": code,
        "meaning": entry.meaning,
        "causes": list(entry.causes),
        "fixes": entry.fixes,
    }


def test_explain_unknown_code_names_near_ones(capsys):
    code = min(codes())
    assert main(["explain", f"{code}0"]) == 2
    output = capsys.readouterr()
    first, second, third, *others = output.err.splitlines()
    assert first == f"hpctrain: error: hpctrain explain {code}0: unknown code"
    assert second == f"  expected: a code from {code} to {max(codes())}"
    assert third.startswith("  fix:      hpctrain explain HT")
    assert f"hpctrain explain {code}" in [line[12:] for line in (third, *others)]
    assert output.out == ""
    assert main(["explain", "nonsense"]) == 2
    assert "fix:" not in capsys.readouterr().err


def test_closed_pipe_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", "hostlist", "n[1-60000]"],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_run_passes_arguments_and_exit_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from hpctrain import detect\n"
        "world = detect()\n"
        "print(world.rank, world.world_size, *sys.argv[1:])\n"
        "sys.exit(5 * world.rank)\n"
    )
    arguments = ["run", "--nodes", "1", "--nproc-per-node", "2"]
    arguments += [str(script), "--nodes", "9", "--json"]
    done = hpctrain_command(*arguments, env={"RANK": "7"})
    assert done.returncode == 5
    assert sorted(done.stdout.splitlines()) == [
        "0: 0 2 --nodes 9 --json",
        "1: 1 2 --nodes 9 --json",
    ]


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py", "_lazy.py", "_version.py"])
def test_old_python_parses_the_module_that_refuses_it(name):
    ast.parse((PACKAGE / name).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("version", [(2, 7), (3, 6), (3, 10)])
def test_old_python_is_refused_with_one_line(monkeypatch, capsys, version):
    info = namedtuple("info", "major minor micro releaselevel serial")
    with monkeypatch.context() as patch:
        patch.setattr(__main__.sys, "version_info", info(*version, 8, "final", 0))
        code = __main__.main()
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "needs Python 3.11 or newer, this is {}.{}".format(*version) in output.err


def test_import_on_windows_says_where_hpctrain_runs():
    code = "import sys; sys.platform = 'win32'; import hpctrain"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith(
        "ImportError: hpctrain runs on Linux and macOS; on Windows, install it inside of WSL2\n"
    )


def test_oldest_python_is_that_of_requires_python():
    from importlib.metadata import metadata

    assert metadata("hpctrain")["Requires-Python"] == ">={}.{}".format(*__main__.OLDEST)


def test_import_hpctrain_and_detect_are_lazy():
    code = (
        "import sys, hpctrain, hpctrain.errors\n"
        "hpctrain.World; hpctrain.detect(); dir(hpctrain)\n"
        "hpctrain.JobSpec(nodes=2); hpctrain.jobs.find; hpctrain.submit\n"
        "later = {'torch', 'numpy', 'submitit', 'matplotlib', 'IPython', 'cloudpickle'}\n"
        "print(sorted(later & sys.modules.keys()))"
    )
    done = hpctrain_command(python=("-S", "-c", code), env={"PYTHONPATH": str(PACKAGE.parent)})
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", ["hpctrain", "hpctrain.jobs"])
def test_public_names_are_imported_and_listed(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        assert getattr(module, public) is not None
    namespace = {}
    exec(f"from {name} import *", namespace)
    assert set(module.__all__) <= namespace.keys()
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        module.trainer  # noqa: B018


def test_dir_of_hpctrain_lists_the_public_names():
    assert dir(hpctrain) == sorted(hpctrain.__all__)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--nods", "2"), "did you mean --nodes?"),
        (("--ntasks=4",), "did you mean --ntasks-per-node?"),
    ],
)
def test_unknown_submit_option_suggests_the_right_one(words, hint, capsys):
    try:
        code = main(["submit", *words, "--dry-run", "--", "true"])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rum", "no command 'rum'; did you mean run?"),
        ("train.py", "no command 'train.py'; hpctrain --help lists all commands"),
    ],
)
def test_unknown_command_suggests_the_right_one(word, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
