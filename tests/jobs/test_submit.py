"""submit: options, environment, checks, refusals, and waiting for the end."""

import dataclasses
import io
import json
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fake_slurm
import pytest
from fake_slurm import job

from hpctrain import cli
from hpctrain.cli import job_options
from hpctrain.cluster import slurm
from hpctrain.errors import UsageError
from hpctrain.jobs import job_checks, job_paths, job_watching, log_names, sbatch_errors
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import host_ledger


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    keep = f"cat > '{tmp_path}/script'; env > '{tmp_path}/environ'"
    made.command("sbatch", "70", more=keep)
    Path("t.py").touch()
    return made


def submit(*words):
    return cli.main(["submit", *words])


# The command line.


def test_submit_has_an_option_for_each_job_spec_field():
    names = [one.name for one in dataclasses.fields(JobSpec)]
    assert len({job_options.option(name) for name in names}) == len(names)


def test_submit_options_around_job_toml_and_extra_arguments(fake, capsys):
    Path("job.toml").write_text('command = ["python3", "t.py", "--a"]\nnodes = 2\n')
    assert submit("--name", "n", "job.toml", "--nodes", "3", "--", "--wait", "--", "x") == 0
    script = Path("script").read_text()
    assert "#SBATCH --nodes=3\n" in script
    command = script[script.index("exec ") :].replace("\\\n", "")
    assert shlex.split(command)[-6:] == ["t.py", "--a", "--wait", "--", "x", "$@"]
    assert capsys.readouterr().out == "70\n"


@pytest.mark.parametrize(
    ("words", "message", "error"),
    [
        (["python3", "t.py"], "one JOB.toml; a command follows --", ""),
        (["t.py"], "-- before the command", "HT803"),
        ([], "no command to run", "HT803"),
        (["none.toml"], "none.toml cannot be read", "HT802"),
        (["--env", "A", "--", "x"], "--env NAME=VALUE", "HT801"),
        (["--nodes", "x", "--time", "y", "--", "x"], "invalid values in the job (2):", "HT801"),
        (["--", "python3", "none.py"], "none.py is not a file", "HT805"),
        (["--output", "logs/%j/x.log", "--", "python3", "t.py"], "output = logs/x.log", "HT807"),
        (
            ["--run-dir", "t.py", "--", "python3", "t.py"],
            "run_dir = t.py: you cannot",
            "HT809",
        ),
    ],
)
def test_submit_refuses_wrong_command_lines(fake, capsys, words, message, error):
    try:
        code = submit(*words)
    except SystemExit as exit:  # from argparse
        code = exit.code
    assert code == 2
    output = capsys.readouterr()
    assert (output.out, Path("script").exists()) == ("", False)
    assert message in output.err
    assert output.err.endswith(f"  more:     hpctrain explain {error}\n") or not error


def test_submit_repeated_options_make_tables_and_lists(fake):
    words = ["--env", "A=b=c", "--env", "B=", "--extra", "exclusive", "--extra", "nice=5"]
    words += ["--sweep", "lr=0.1,0.2", "--sweep", "seed=1", "--module", "a", "--module", "b"]
    assert submit(*words, "--live", "--", "python3", "t.py") == 0
    script = Path("script").read_text()
    for line in ("#SBATCH --exclusive\n", "#SBATCH --nice=5\n", "#SBATCH --array=0-1\n"):
        assert line in script
    for line in ("module load a || exit 2\nmodule load b", "export A=b=c\nexport B=''\n"):
        assert line in script
    assert "--setting='--lr 0.2 --seed 1' t.py" in script


def test_submit_takes_sbatch_names_of_options(fake):
    words = ("-N3", "--ntasks-per-node=2", "-c4", "--mem=8G", "-t", "1h", "-p", "gpu", "-Jn")
    mail = ("--mail-user=ada@example.org", "--extra", "nice=5")
    assert submit(*words, *mail, "--", "python3", "t.py") == 0
    script = Path("script").read_text()
    assert "#SBATCH --mail-user=ada@example.org\n#SBATCH --nice=5\n" in script
    for line in ("nodes=3", "ntasks-per-node=2", "cpus-per-task=4", "mem=8G", "time=01:00:00"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert "#SBATCH --job-name=n\n" in script


# The script and the environment that reach Slurm.


def submitted_environ():
    return dict(one.split("=", 1) for one in Path("environ").read_text().splitlines() if "=" in one)


def test_submit_outside_a_job_drops_only_sbatch_variables(fake, monkeypatch, capsys):
    kept_variables = {
        "MASTER_PORT": "7",
        "HPCTRAIN_RUN_DIR": "r",
        "CUDA_VISIBLE_DEVICES": "1",
        "SRUN_X": "1",
    }
    for name, value in {**kept_variables, "SBATCH_QOS": "q", "SBATCH_RESERVATION": "r"}.items():
        monkeypatch.setenv(name, value)
    assert submit("--", "python3", "t.py") == 0
    environ = submitted_environ()
    assert kept_variables.items() <= environ.items()
    assert not [name for name in environ if name.startswith("SBATCH_")]
    assert "#SBATCH --qos=q\n" in Path("script").read_text()
    assert "SBATCH_RESERVATION: ignored" in capsys.readouterr().err


def test_submit_inside_a_job_drops_its_variables(fake, monkeypatch):
    outer = ("SLURM_JOB_ID", "SLURM_NTASKS", "PMIX_RANK", "RANK", "MASTER_ADDR", "HPCTRAIN_RUN_DIR")
    outer += (
        "HPCTRAIN_SECRET",
        "HPCTRAIN_STOP_FILE",
        "HPCTRAIN_EXIT_STATUS_FILE",
        "CUDA_VISIBLE_DEVICES",
    )
    kept_variables = {
        "SLURM_CONF": "c",
        "NCCL_DEBUG": "INFO",
        "HPCTRAIN_DATA": "d",
        "WANDB_MODE": "offline",
    }
    for name, value in {**dict.fromkeys(outer, "5"), **kept_variables}.items():
        monkeypatch.setenv(name, value)
    assert submit("--", "python3", "t.py") == 0
    environ = submitted_environ()
    assert not set(outer) & set(environ)
    assert kept_variables.items() <= environ.items()


def test_submit_inside_a_job_drops_staged_folders_from_path(fake, monkeypatch):
    copies = "/tmp/hpctrain-ada-7-0"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("HPCTRAIN_SCRATCH", copies)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{copies}/environment/bin:{path}:{copies}/code")
    monkeypatch.setenv("PYTHONPATH", f"{copies}-not/lib:{copies}/code")
    assert submit("--", "python3", "t.py") == 0
    assert (submitted_environ()["PATH"], submitted_environ()["PYTHONPATH"]) == (
        path,
        f"{copies}-not/lib",
    )
    assert "HPCTRAIN_SCRATCH" not in submitted_environ()


def test_submit_ignores_run_directory_of_the_shell(fake, monkeypatch, capsys):
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", "shells")
    for words in (["--run-dir", "own"], ["--array", "0-3"]):
        assert submit(*words, "--", "python3", "t.py") == 0
        assert "HPCTRAIN_RUN_DIR" not in submitted_environ()
        assert "HPCTRAIN_RUN_DIR=shells: ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "folder"),
    [("logs/%j.log", "logs"), ("a/%x/%%/%A.log", "a/job/%"), ("x.log", ".")],
)
def test_submit_makes_log_folder(fake, output, folder):
    assert submit("--name", "job", "--output", output, "--", "python3", "t.py") == 0
    assert Path(folder).is_dir()


def test_submit_refuses_log_folder_that_cannot_be_made(fake, capsys):
    Path("file").touch()
    for folder in ("file", "/proc/none", "a" * 300):
        assert submit("--output", f"{folder}/a.log", "--", "python3", "t.py") == 2
        assert f"output = {folder}/a.log" in capsys.readouterr().err
    assert not Path("script").exists()


def test_submit_refuses_read_only_folders(fake, capsys, monkeypatch):
    Path("others").mkdir()
    Path("others", "own.log").touch()
    own = ("others/own.log", "/dev/null")
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: access(path, mode) and (mode < os.W_OK or str(path) in own)
    )
    for words in (["--output", "others/%j.log"], ["--output", "others/new/%j.log"], []):
        for dry in ([], ["--dry-run"]):
            assert submit(*words, *dry, "--", "python3", "t.py") == 2
            assert "you cannot write" in capsys.readouterr().err
    # The run directory would be in runs here.
    assert submit("--output", "/dev/null", "--", "python3", "t.py") == 2
    assert f"you cannot write in {Path.cwd()}/runs" in capsys.readouterr().err
    assert not Path("script").exists()
    Path("own").mkdir()
    own += (f"{Path.cwd()}/own",)
    for path in own[:2]:
        for run in ("own/run", "/only/on/the/hosts/of/jobs"):
            assert submit("--output", path, "--run-dir", run, "--", "python3", "t.py") == 0


@pytest.mark.parametrize(
    ("words", "refuses", "excluded"),
    [
        ((), "never", "node4"),
        (("--nodelist", "node[3-4]"), "never", ""),
        (("--nodelist", "node[3"), "never", ""),
        (("--exclude", "node1"), "never", "node1"),
        # No other node has these features.
        (("--constraint", "a100"), "exclude=node4", ""),
    ],
)
def test_submit_excludes_a_faulty_node_unless_the_job_needs_it(
    fake, tmp_path, capsys, words, refuses, excluded
):
    host_ledger.note(Path(), ["node4"], host_ledger.PREFLIGHT, "5")
    fake.command("sinfo", "".join(f"main* node{n} idle 2 9 (null) a\n" for n in range(1, 5)))
    no = "{ echo 'Requested node configuration is not available' >&2; exit 1; }"
    keep = f"cat > '{tmp_path}/script'; ! grep -q '{refuses}' '{tmp_path}/script' || {no}"
    fake.command("sbatch", "70", more=keep)
    assert submit(*words, "--", "python", "t.py") == 0
    line = f"#SBATCH --exclude={excluded}\n"
    assert (line in Path(tmp_path, "script").read_text()) == bool(excluded)
    assert ("without node4" in capsys.readouterr().err) == (excluded == "node4")


def test_submit_needs_a_command(fake, capsys):
    Path("job.toml").write_text('launcher = "none"\nnodes = 2\n')
    assert cli.main(["render", "job.toml"]) == 0
    assert "#SBATCH --nodes=2\n" in capsys.readouterr().out
    for more in ([], ["--dry-run"]):
        assert submit("job.toml", *more) == 2
        assert "no command to run" in capsys.readouterr().err
    assert not Path("script").exists()
    assert submit("job.toml", "--", "python3", "t.py") == 0
    assert cli.main(["render", "--launcher", "srun", "job.toml"]) == 2


def test_submit_from_deleted_folder_is_refused(fake, capsys, monkeypatch, tmp_path):
    deleted = tmp_path / "gone"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    for more in ([], ["--dry-run"]):
        assert submit(*more, "--", "python3", "t.py") == 2
        assert "the current folder" in capsys.readouterr().err


# Checks before Slurm is called.


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"command": "python3 none.py"}, "none.py is not a file"),
        ({"command": "python3 ."}, ". is not a file"),
        ({"command": "python3 t.py", "venv": "none"}, "no bin/activate"),
        ({"command": "python3 t.py", "stage_code": "none"}, "stage_code = none"),
        ({"command": "python3 t.py", "stage_data": "none"}, "stage_data = none"),
        ({"command": "python3 t.py", "stage_environment": "none.tar"}, "none.tar does not exist"),
    ],
)
def test_submit_refuses_missing_files(fake, values, found):
    with pytest.raises(UsageError, match=re.escape(found)) as caught:
        job_checks.check(JobSpec(**values), fake.env)
    assert caught.value.code == "HT805"


@pytest.mark.parametrize(
    ("words", "fix"),
    [(["t.py", "--x"], "python t.py --x"), (["env python t.py"], "-- env python t.py")],
)
def test_submit_refuses_commands_that_can_only_fail(fake, words, fix):
    with pytest.raises(UsageError) as caught:
        job_checks.check(JobSpec(command=words), fake.env)
    assert (caught.value.code, caught.value.fixes) == ("HT806", (fix,))


@pytest.mark.parametrize(
    "values",
    [
        {"command": "python3 -m none"},
        {"command": "python3 -m none", "time": "4m"},
        {"command": "python3 -m none", "time": "1m", "requeue": False},
        {"command": "python3 none.py", "setup": ["cd elsewhere"]},
        {"command": "python none.py", "container": "image.sif"},
        {"command": "no-such-program x", "modules": ["m"]},
        {"command": "python3 code.py", "stage_code": "code"},
    ],
)
def test_submit_check_has_no_false_alarms(fake, values):
    Path("code").mkdir()
    Path("code", "code.py").touch()
    fake.command("python")
    assert job_checks.check(JobSpec(**values), fake.env) == []


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"command": "no-such-program x"}, "not on the PATH"),
        ({"command": "none.py"}, "none.py is not on the PATH"),
        ({"command": "env a '&&' b"}, "no shell reads the command: &&"),
        ({"command": "python3 made.py", "dependency": "afterok:1"}, "made.py is not a file"),
        ({"command": "python3 t.py", "venv": "/node/venv"}, "on this node"),
        ({"command": "x", "time": "1m"}, "leaves 0 s to start and train"),
        ({"command": "x", "time": "3m"}, "comes 90 s before the end, or up to 60 s earlier"),
        ({"command": "x", "time": "12m", "signal_time": 610}, "leaves 50 s"),
    ],
)
def test_submit_notes_what_may_be_missing(fake, values, note):
    assert note in " ".join(job_checks.check(JobSpec(**values), fake.env))


# Refusals.

FULL = {
    "command": "x", "partition": "p", "account": "a", "qos": "q", "time": "5h", "memory": "9T",
    "cpus_per_task": 900,
}  # fmt: skip


@pytest.mark.parametrize(
    ("message", "option"),
    [
        ("Batch job submission failed: Invalid partition name specified", "--partition NAME"),
        ("Required partition not available (inactive or drain)", "--partition NAME"),
        ("Invalid account or account/partition combination specified", "--account NAME"),
        ("Invalid qos specification", "--qos NAME"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "--time TIME"),
        ("Job violates accounting/QOS policy (job submit limit, user's size)", "--qos NAME"),
        ("Node count specification invalid", "--partition NAME"),
        ("More processors requested than permitted", "--cpus-per-task N"),
        ("Memory required by task is not available", "--memory SIZE"),
        ("Invalid generic resource (gres) specification", "--gpus-per-node N"),
        ("Invalid feature specification", "--constraint EXPR"),
        ("Job dependency problem", "--dependency JOBS"),
        ("Invalid job array specification", "--array INDICES"),
        ("Requested node configuration is not available", "--memory SIZE"),
        ("Invalid --mail-type specification", "--extra"),
        ("sbatch: unrecognized option '--bogus'", "--extra"),
    ],
)
def test_sbatch_refusal_names_the_option_to_fix(fake, message, option):
    error = sbatch_errors.refused(f"sbatch: error: {message}", JobSpec(**FULL), fake.env)
    assert error.exit_code == 2
    assert message.removeprefix("sbatch: ") in error.found
    assert error.code == "HT817"
    assert error.fixes[0].startswith(f"{option} ("), error.fixes
    assert not [fix for fix in error.fixes if " or " in fix]


@pytest.mark.parametrize(
    "message",
    [
        "Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "Batch job submission failed: Socket timed out on send/recv operation",
        "s_p_parse_file: cannot stat file /etc/slurm/slurm.conf",
        "resolve_ctls_from_dns_srv: res_nsearch error: Unknown host",
        "An unknown message",
        "",
    ],
)
def test_sbatch_failure_without_mistake_is_exit_code_1(fake, capsys, message):
    fake.command("sbatch", error=message, code=1)
    assert submit("--", "python3", "t.py") == 1
    err = capsys.readouterr().err
    assert message in err
    assert "JOB.toml" not in err


@pytest.mark.parametrize(
    ("words", "message", "expected", "fix"),
    [
        (("--nodelist", "node9"), "Invalid node name specified", "node[1-4]",
         "--nodelist … (it is node9; extra.nodelist in JOB.toml and JobSpec)"),
        (("--exclude", "node9"), "Invalid node name specified", "node[1-4]",
         "--exclude HOSTS (it is node9; exclude in JOB.toml and JobSpec)"),
        (("--memory", "500G"), "Memory specification can not be satisfied",
         "main has 4 nodes of 8 CPUs and 32000 MB",
         "--memory SIZE (it is 500G; memory in JOB.toml and JobSpec)"),
        (("--gres", "nvme:1"), "Invalid generic resource (gres) specification", "N or TYPE:N",
         "--gres … (it is nvme:1; extra.gres in JOB.toml and JobSpec)"),
    ],
)  # fmt: skip
def test_sbatch_refusal_has_the_option_that_was_given_and_what_there_is(
    fake, capsys, words, message, expected, fix
):
    listed = "main*|2:00:00|4|up|8|32000|(null)"
    fake.command("sinfo", listed, more='case "$*" in *=%N*) echo "node[1-4]"; exit ;; esac')
    fake.command("sbatch", error=f"sbatch: error: {message}", code=1)
    assert submit(*words, "--", "python", "t.py") == 2
    error = capsys.readouterr().err
    assert expected in error
    assert f"  fix:      {fix}\n" in error


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("--nodes", "4"), ""),
        (("--nodes", "9"), "it asks for 9 nodes, but main has 2 nodes of 8 CPUs and 32000 MB; main "
         "has 2 nodes of 64 CPUs and 2000 MB"),
        (("--nodes", "3", "--memory", "16G"), "it asks for 3 nodes and 16G, but main has"),
        (("--cpus-per-task", "64"), ""),
        (("--cpus-per-task", "65"), "it asks for 1 nodes of 65 CPUs, but main has"),
        (("--nodes", "9", "--partition", "main,big"), ""),
        (("--partition", "none", "--nodes", "99"), ""),  # which sbatch refuses
    ],
)  # fmt: skip
def test_submit_says_that_no_partition_is_large_enough(fake, capsys, words, note):
    fake.command(
        "sinfo",
        "main*|2:00:00|2|up|8|32000|\nmain*|2:00:00|2|up|64|2000|\nbig|2:00:00|40|up|8|32000|",
    )
    for more in ((), ("--dry-run",)):
        assert submit(*more, *words, "--", "python", "t.py") == 0
        error = capsys.readouterr().err
        assert ("the job may never start" in error) == bool(note)
        assert note in error


def test_sbatch_refusal_lists_valid_values(fake):
    fake.command("sinfo", "main*|2:00:00|4|up|8|32000|gpu:v100:4\nold|1:00|4|down|8|32000|(null)")
    fake.command("sacctmgr", "physics\nroot")
    spec = JobSpec(command="x", partition="p", gpus_per_node="9", account="fisics", qos="high")
    for message, expected, fix in (
        ("invalid partition", "a partition of this cluster: main (up to 2:00:00)", "--partition "),
        ("Invalid generic resource (gres)", "gpu:v100:4", "--gpus-per-node N (it is 9; "),
        ("invalid account", "physics, root", "--account NAME (it is fisics; account in JOB.toml"),
        ("invalid qos", "physics, root", "--qos NAME (it is high; "),
    ):
        error = sbatch_errors.refused(message, spec, fake.env)
        assert expected in error.expected
        assert error.fixes[0].startswith(fix)


# Waiting.


class Timeline:
    """A fake Slurm whose jobs change at each sleep of the waiting process.

    Args:
        fake: the fake Slurm.
        states: the jobs at one moment after the other; the last one remains.
    """

    def __init__(self, fake, *states):
        self.fake, self.states, self.messages, self.slept = fake, list(states), [], []
        self.next()

    def next(self, seconds=None):
        self.slept.append(seconds)
        if self.states:
            self.fake.jobs(*self.states.pop(0))

    def wait(self, log=None, sleep=None):
        clock = SimpleNamespace(sleep=sleep or self.next)
        with mock.patch.object(job_watching, "time", clock):
            return job_watching.wait("70", self.fake.env, self.messages.append, log)


RUNS, WAITS = job("70"), job("70", State="PENDING", Reason="BeginTime", RestartCnt="1", NodeList="")
DONE = job("70", State="COMPLETED")


def ended_job(word, status=0):
    return job("70", State=word, exit_code=str(status), Reason="None")


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (DONE, 0),
        (ended_job("FAILED", 3 << 8), 3),
        (ended_job("FAILED", 75 << 8), 75),
        (ended_job("FAILED", 76 << 8), 76),
        (ended_job("CANCELLED", 15), 1),
        (ended_job("CANCELLED"), 1),
        (ended_job("CANCELLED", 75 << 8), 1),  # 75 would ask to be run again
        (ended_job("TIMEOUT"), 1),
        (ended_job("NODE_FAIL"), 1),
        (ended_job("OUT_OF_MEMORY", 125 << 8), 125),
    ],
)
def test_wait_gives_exit_code_of_job(fake, last, code):
    (outcome,) = Timeline(fake, [RUNS], [last]).wait()
    assert outcome == job_watching.JobOutcome("70", last["State"], code)


def test_wait_continues_through_requeue_and_lost_host(fake):
    again = job("70", RestartCnt="1")
    timeline = Timeline(fake, [RUNS], [ended_job("NODE_FAIL")], [WAITS], [again], [again], [DONE])
    (outcome,) = timeline.wait()
    assert outcome.exit_code == 0
    assert timeline.messages == [
        "job 70: running on node[1-2]",
        "job 70: node_fail",
        "job 70: pending after 1 restart: waits a while after it was requeued, or for its --begin "
        "(BeginTime)",
        "job 70: running after 1 restart on node[1-2]",
        "job 70: completed",
    ]


def test_wait_polls_less_often_and_continues_without_answers_of_slurm(fake):
    timeline = Timeline(fake, [RUNS], *[[None]] * 3, *[[RUNS]] * 25, [DONE])
    assert timeline.wait()[0].exit_code == 0
    assert min(timeline.slept[1:]) >= 1
    assert max(timeline.slept[1:]) == 10
    assert len([line for line in timeline.messages if "does not answer" in line]) == 1


def test_wait_reads_forgotten_job_from_sacct(fake):
    fake.command("sacct", "70|FAILED|75:0")
    assert Timeline(fake, [RUNS], []).wait() == [job_watching.JobOutcome("70", "FAILED", 75)]
    fake.command("sacct", error="Slurm accounting storage is disabled", code=1)
    assert Timeline(fake, [RUNS], []).wait() == [
        job_watching.JobOutcome("70", "unknown to Slurm", 1)
    ]


def test_wait_gives_outcome_of_each_array_task(fake):
    waiting = job("70_[1-2]", State="PENDING", JobID="70")
    none = job("70_0", State="COMPLETED")
    one = job("70_1", State="FAILED", exit_code=str(2 << 8))
    two = job("70_2", State="COMPLETED")
    # Slurm no longer knows the first task when the last one ends.
    timeline = Timeline(
        fake, [waiting, job("70_0")], [waiting, none], [one, job("70_2")], [one, two]
    )
    outcomes = {each.label: each.exit_code for each in timeline.wait()}
    assert outcomes == {"70_0": 0, "70_1": 2, "70_2": 0}


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 75], 75), ([75, 76], 76), ([76, 1, 75], 1), ([1, 143, 0], 143)],
)
def test_wait_exit_code_is_the_worst_of_an_array(codes, code):
    assert job_watching.worst([job_watching.JobOutcome("1", "", one) for one in codes]) == code


def test_follow_shows_late_log_and_continues_after_requeue(fake):
    path, out = Path("l-70.log"), io.BytesIO()
    states = [{**one, "STDOUT": f"{os.getcwd()}/l-%j.log"} for one in (RUNS, WAITS, RUNS, DONE)]
    timeline = Timeline(fake, *([one] for one in states))

    def next_state(seconds):
        if len(timeline.states) < 3:
            with path.open("ab") as file:
                file.write(b"%d\xff\r" % len(timeline.states))
        timeline.next()

    timeline.wait(job_watching.Log(0, out), next_state)
    assert out.getvalue() == path.read_bytes()
    assert out.getvalue().startswith(b"2\xff\r1\xff\r0\xff\r")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("%x-%j.log", "a%j/../x-71.log"), ("%A_%3a.log", "70_003.log"), ("%%j-%5j", "%j-00071"),
        ("%N-%u", "node1-ada"), ("/abs/%j", "/abs/71"),
    ],
)  # fmt: skip
def test_follow_expands_log_file_pattern(fake, pattern, name):
    fake.jobs(job("70_3", JobID="71", Name="a%j/../x", STDOUT=str(Path("/nowhere", pattern))))
    (one,) = slurm.jobs(fake.env)
    assert log_names.of_job(one) == Path("/nowhere", name)


def test_follow_skips_log_of_earlier_job(fake):
    Path("train.log").write_text("earlier\n")
    spec = JobSpec(command="x", output="train.log")
    assert job_paths.log_size(spec, fake.env) == 8
    assert job_paths.log_size(JobSpec(command="x"), fake.env) == 0
    fake.jobs({**DONE, "STDOUT": f"{os.getcwd()}/train.log"})
    out = io.BytesIO()
    log = job_watching.Log(8, out)
    Path("train.log").write_text("earlier\nlater\n")
    log.read(slurm.jobs(fake.env)[0])
    assert out.getvalue() == b"later\n"


def test_follow_shows_whole_lines_and_the_rest_at_the_end(fake):
    fake.jobs({**DONE, "STDOUT": f"{os.getcwd()}/train.log"})
    (job,) = slurm.jobs(fake.env)
    path, out = Path("train.log"), io.BytesIO()
    log = job_watching.Log(0, out)
    shown = []
    for text in ("loss", " 0.5\nlo", "x" * (1 << 20), "\nend"):
        with path.open("a") as file:
            file.write(text)
        log.read(job)
        shown.append(len(out.getvalue()))
    assert shown == [0, 9, 9 + (1 << 20), 12 + (1 << 20)]
    log.read(job, last=True)
    assert out.getvalue() == path.read_bytes()


def test_wait_ctrl_c_detaches_and_job_continues(fake, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(job_watching, "wait", interrupt)
    assert submit("--wait", "--", "python3", "t.py") == 130
    output = capsys.readouterr()
    assert output.out == "70\n"
    assert "job 70 continues" in output.err
    assert "hpctrain status 70" in output.err
    assert "scancel" not in fake.calls.read_text()


def test_submit_prints_the_number_and_what_to_type_next(fake, capsys):
    assert submit("--live", "--", "python3", "t.py") == 0
    output = capsys.readouterr()
    assert output.out == "70\n"
    assert output.err.splitlines() == [
        "  log:      tail -F runs/t-70.log",
        "  run:      runs/t-70",
        "  follow:   hpctrain logs -f 70",
        "  state:    hpctrain status 70",
        "  cancel:   hpctrain cancel 70",
    ]
    assert Path("runs").is_dir()  # without it, Slurm ends the job without a message
    assert "#SBATCH --output=runs/%x-%j.log\n" in Path("script").read_text()


@pytest.mark.parametrize(
    ("words", "log", "run"),
    [
        (["--array", "3,5-7"], "runs/t-70_3.log (task 3)", "runs/t-70_3 (task 3)"),
        (["--sweep", "a=1,2", "--run-dir", "r"], "runs/t-70_0.log (task 0)", "r/0 (task 0)"),
        (["--output", "l o/%5j.log", "--run-dir", "r"], "'l o/00070.log'", "r"),
        (["--output", "%N.log"], "", "runs/t-70"),
    ],
)
def test_submit_prints_log_and_run_directory_of_any_job(fake, capsys, words, log, run):
    assert submit(*words, "--", "python3", "t.py") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())
    assert lines.get("log:", "") == (f"tail -F {log}" if log else "")
    assert lines["run:"] == run
    fake.jobs(job("70", WorkDir=os.getcwd()))
    assert submit("--", "python3", "t.py", "--run-dir", "own") == 0
    assert "  run:      own\n" in capsys.readouterr().err


def test_wait_shows_first_failure_log_and_how_to_continue(fake, capsys):
    failed = {"State": "FAILED", "exit_code": "256", "WorkDir": os.getcwd(), "Name": "t"}
    fake.jobs(job("70", **failed))
    run = Path("runs/t-70")
    Path("runs").mkdir()
    Path("runs/t-70.log").touch()
    (run / "checkpoints/step-00000040").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    cause = "rank 2 on node3 failed, with exit code 1: ValueError: x"
    (run / "summary.json").write_text(json.dumps({"status": "failed", "reason": cause}))
    assert submit("--wait", "--", "python3", "t.py") == 1
    assert capsys.readouterr().err.splitlines()[-5:] == [
        "hpctrain: job 70 has ended: failed, exit code 1",
        f"  cause:    {cause}",
        "  log:      runs/t-70.log",
        "  continue: hpctrain requeue 70",
        "  or:       hpctrain submit … --run-dir runs/t-70 -- … --resume (with other code or "
        "options)",
    ]


@pytest.mark.parametrize(("code", "shown"), [(75, True), (1, False)])
def test_wait_shows_the_end_of_this_start_of_a_run(fake, capsys, code, shown):
    """A start that fails before its Session leaves the summary of the start before."""
    columns = {"State": "FAILED", "exit_code": str(code << 8), "WorkDir": os.getcwd()}
    fake.jobs(job("70", Name="t", **columns))
    Path("runs/t-70").mkdir(parents=True)
    Path("runs/t-70/run.json").write_text("{}")
    summary = {"status": "stopped", "reason": "the file stop"}
    Path("runs/t-70/summary.json").write_text(json.dumps(summary))
    Path("runs/t-70.log").write_text("ImportError: x\n")
    assert submit("--wait", "--", "python3", "t.py") == code
    cause = "  stopped:  the file stop" if shown else "  cause:    ImportError: x"
    error = capsys.readouterr().err
    assert f"{cause}\n" in error
    assert ("job 70 has ended: stopped, exit code 75" in error) == shown


def test_wait_shows_first_failure_of_program_without_a_run(fake, capsys):
    fake.jobs(job("70", State="FAILED", exit_code="256", WorkDir=os.getcwd(), Name="t"))
    log = Path("runs/t-70.log")
    log.parent.mkdir()
    for text, cause in (
        (
            "0: hpctrain: error: rank 0 lost another rank\n"
            "hpctrain: rank 2 on node3 failed first, with signal SIGKILL. Its last lines:\n  x\n",
            "rank 2 on node3 failed first, with signal SIGKILL",
        ),
        (
            "0: hpctrain: error: rank 0 lost another rank\n"
            "hpctrain: rank 0 on node1 ended, with exit code 1: rank 0 lost another rank\n",
            "rank 0 on node1 ended, with exit code 1: rank 0 lost another rank",
        ),
        ("0: hpctrain: error: --lr x\n0:   fix:      train.py --help\n", "--lr x"),
        ("Traceback\nValueError: \x1b[2J\n\nsrun: error: task 0\n", r"ValueError: \x1b[2J"),
    ):
        log.write_text(text)
        assert submit("--wait", "--", "python3", "t.py") == 1
        assert f"  cause:    {cause}\n  log:      {log}\n" in capsys.readouterr().err
    # Its last line would be no cause of what Slurm has done.
    fake.jobs(job("70", State="TIMEOUT", WorkDir=os.getcwd(), Name="t"))
    assert submit("--wait", "--", "python3", "t.py") == 1
    assert "cause:" not in capsys.readouterr().err


def test_wait_names_logs_of_failed_tasks(fake, capsys):
    columns = {"Name": "t", "WorkDir": os.getcwd()}
    fake.jobs(
        job("70_0", State="COMPLETED", **columns),
        job("70_1", State="FAILED", exit_code="256", **columns),
        job("70_2", State="CANCELLED", NodeList="", **columns),  # has no log
    )
    Path("runs").mkdir()
    for index in range(2):
        Path(f"runs/t-70_{index}.log").write_text("done\n")
    assert submit("--wait", "--array", "0-2", "--", "python3", "t.py") == 1
    assert capsys.readouterr().err.splitlines()[-4:] == [
        "hpctrain: job 70_1: failed",
        "  cause:    done",
        "  log:      runs/t-70_1.log",
        "hpctrain: job 70_2: cancelled",
    ]


def test_wait_of_sweep_ends_with_its_tasks_in_order_and_their_settings(fake, capsys):
    # Slurm gives the last task the number of the array.
    columns = {"State": "COMPLETED", "Name": "t", "WorkDir": os.getcwd()}
    fake.jobs(job("70_1", JobID="70", **columns), job("70_0", JobID="71", **columns))
    for index in range(2):
        Path(f"runs/t-70_{index}").mkdir(parents=True)
    assert submit("--wait", "--sweep", "lr=0.1,0.2", "--", "python3", "t.py") == 0
    rows = [line for line in capsys.readouterr().err.splitlines() if line.startswith("70_")]
    assert [(row.split()[0], re.split("  +", row)[-1]) for row in rows] == [
        ("70_0", "--lr 0.1; runs/t-70_0"), ("70_1", "--lr 0.2; runs/t-70_1")
    ]  # fmt: skip
