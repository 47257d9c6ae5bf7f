"""submit: the options of a training script are checked before its job is sent to Slurm."""

import re
from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.jobs import job_checks, job_files
from hpctrain.jobs.spec import JobSpec

TOP = Path(__file__).resolve().parents[2]
SCRIPT = """
import hpctrain
parser = hpctrain.options(description="x")
parser.add_argument("--width", type=int)
with hpctrain.Session(parser.parse_args()) as session:
    pass
"""


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """Return a function that checks the job of a command line for the script in t.py."""
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(SCRIPT)

    def check(words, script="t.py", **job):
        job_checks.check(JobSpec(command=["python3", script, *words.split()], **job), {})

    return check


@pytest.mark.parametrize(
    ("words", "job", "code", "found"),
    [
        ("--epochs two", {}, "HT523", "argument --epochs: two is not a whole number from 1 on"),
        ("--own 1 --seed=-1", {}, "HT523", "argument --seed: -1 is not a whole number from 0 on"),
        ("--precision fp4", {}, "HT523", "argument --precision: invalid choice: 'fp4'"),
        ("--ddp bukcet-mb=1", {}, "HT523", "argument --ddp: bukcet-mb: expected one of compr"),
        ("--ddp bucket-mb=0", {}, "HT523", "argument --ddp: bucket-mb=0: expected a number"),
        ("--fsdp hybrid=often", {}, "HT523", "argument --fsdp: hybrid=often: expected hybrid or"),
        ("--horovod op=averag", {}, "HT523", "did you mean op=average?"),
        ("", {"sweep": {"epochs": [9, 0]}}, "HT523", "argument --epochs: 0 is not"),
        ("", {"sweep": {"ddp": ["static-graph", "static"]}}, "HT523", "argument --ddp: static:"),
        ("--global-batch 64", {"nodes": 3, "tasks_per_node": 2}, "HT505", "--global-batch 64"),
        ("--global-batch 64", {"gpus_per_node": 3}, "HT505", "--global-batch 64"),
        ("--elastic", {"tasks_per_node": 2}, "HT504", "--elastic without --global-batch"),
        (
            "--horovod groups=1 --backend ddp", {"tasks_per_node": 2},
            "HT503", "--horovod groups=1 with --backend ddp",
        ),
        ("--epochs two", {"setup": ["export A=b"]}, "HT523", "argument --epochs"),
    ],
)  # fmt: skip
def test_submit_refuses_options_with_which_the_script_cannot_train(
    submitted, words, job, code, found
):
    with pytest.raises(UsageError, match=re.escape(found)) as caught:
        submitted(words, **job)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("words", "job"),
    [
        ("--epochs 2 --width 4 --fsdp blocks=A+B,hybrid --backend fsdp", {"tasks_per_node": 2}),
        ("--unknown --epochs 2 -- --epochs two", {}),
        ("--help", {}),
        ("--epochs two", {"setup": ["cd elsewhere"]}),
        ("--epochs two", {"stage_code": "code"}),
        ("--global-batch 64", {"nodes": 3}),  # perhaps with GPUs that Slurm does not know
        ("--global-batch 64", {"nodes": 3, "tasks_per_node": 2, "launcher": "none"}),
        (
            "--global-batch 64 --batch-size 16 --accumulate 1 --backend dataparallel",
            {"gpus_per_node": 4, "tasks_per_node": 1},
        ),
    ],
)
def test_submit_leaves_options_that_may_be_right_to_the_job(submitted, words, job):
    Path("code").mkdir()
    Path("code/t.py").write_text(SCRIPT)
    submitted(words, **job)


def test_submit_ignores_arguments_of_the_script_with_names_of_keywords(submitted):
    Path("t.py").write_text(SCRIPT.replace('"--width"', '"--clip-norm"'))
    submitted("--clip-norm none --same-data maybe --handle-signals -1")
    with pytest.raises(UsageError, match="is not a whole number from"):
        submitted("--clip-norm none --epochs two")


def test_submit_ignores_the_command_line_of_another_parser(submitted):
    """It sets no option of hpctrain, even if the script uses its values."""
    own = "import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
    Path("t.py").write_text(own + "import hpctrain\nhpctrain.Session(args)\n")
    submitted("--epochs two --ddp bukcet-mb=1 --backend nccl --resume ''")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hpctrain.options(", "argparse.ArgumentParser("),
        ("hpctrain.options(", "hpctrain.options(conflict_handler='resolve', "),
        ("hpctrain.options(", "hpctrain.options(**settings, "),
        ("parse_args()", "parse_args([])"),
        ("parse_args()", "parse_args(namespace=other)"),
        ("import hpctrain", "import hpctrain, sys; sys.argv.append('--epochs'); 0"),
        ("Session(parser", "Session(**settings) or (parser"),
        ('"--width"', '"--width", nargs=argparse.REMAINDER'),
        ("hpctrain.Session", "mine.train"),
        ("import hpctrain", "import hpctrain;; syntax of a later Python"),
    ],
)
def test_submit_checks_no_script_whose_command_line_may_mean_anything(submitted, old, new):
    assert old in SCRIPT
    Path("t.py").write_text(SCRIPT.replace(old, new))
    submitted("--epochs two", tasks_per_node=2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hpctrain.Session(args, global_batch=8)", "--global-batch 7"),
        ("args.epochs = 9; args.batch_size = None", "--global-batch 7"),
        ("setattr(args, 'epochs', 9); vars(args)['global_batch'] = 8", "--global-batch 7"),
        ("parser.set_defaults(epochs=9, accumulate=2)", "--global-batch 7"),
        ("args.horovod = None", "--horovod groups=1 --backend ddp"),
    ],
)
def test_submit_concludes_nothing_from_options_that_the_script_sets(submitted, line, words):
    with pytest.raises(UsageError, match=r"--global-batch 7 cannot|--horovod groups=1 with"):
        submitted(words, tasks_per_node=2)
    Path("t.py").write_text(SCRIPT + line + "\n")
    submitted(words, tasks_per_node=2)
    with pytest.raises(UsageError, match="is not a whole number from"):
        submitted("--epochs two")


def test_submit_checks_a_script_that_imports_the_parser_alone(submitted):
    text = SCRIPT.replace("import hpctrain", "from hpctrain import Session, options")
    Path("t.py").write_text(text.replace("hpctrain.", ""))
    with pytest.raises(UsageError, match="is not a whole number from"):
        submitted("--epochs two")


def test_submit_accepts_the_jobs_of_the_imagenet_page(monkeypatch):
    """Check the options after the script as those of sbatch/imagenet.toml."""
    monkeypatch.chdir(TOP)
    command = job_files.read(Path("sbatch/imagenet.toml"))["command"]
    text = Path("docs/imagenet.md").read_text().replace("\\\n", " ")
    jobs = re.findall(r"^(?:sbatch|hpctrain submit) .*?imagenet\.(?:sh|toml)(.*)$", text, re.M)
    assert len(jobs) >= 6
    for options in jobs:
        words = [word for word in options.partition("#")[0].split() if word != "--"]
        job_checks.check(JobSpec(command=[*command, *words]), {})
    with pytest.raises(UsageError, match="argument --epochs: two is not"):
        job_checks.check(JobSpec(command=[*command, "--epochs", "two"]), {})


@pytest.mark.parametrize("name", ["cifar10", "imagenet", "mnist"])
def test_submit_checks_the_options_of_the_examples(submitted, name):
    script = f"{TOP}/examples/{name}.py"
    submitted("--epochs 2", script)
    with pytest.raises(UsageError, match="argument --epochs: two is not"):
        submitted("--epochs two", script)
