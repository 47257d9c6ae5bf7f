"""status, cancel and requeue: their output, and the job that an argument selects."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import fake_slurm
import pytest
from fake_slurm import job

from hpctrain import cli, rundir
from hpctrain.cluster import slurm
from hpctrain.errors import UsageError
from hpctrain.jobs import job_facts, job_status, job_watching
from hpctrain.rundir import frozen_code


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    return made


def make_run(name, status="", label="", **row):
    """Make a run directory in ./runs."""
    path = Path("runs", name)
    path.mkdir(parents=True)
    path.joinpath("run.json").write_text("{}")
    if row:
        path.joinpath("metrics.jsonl").write_text(json.dumps(row) + "\n")
    if status:
        path.joinpath("summary.json").write_text(json.dumps({"status": status, "step": 9}))
    if label:
        array, _, task = label.partition("_")
        start = {
            "job_id": array,
            "array_job_id": array,
            "array_task": int(task) if task else None,
        }
        path.joinpath("starts.jsonl").write_text(json.dumps({"job": start}) + "\n")
    return path


def run_status(capsys, *words, code=0):
    assert cli.main(["status", *words]) == code
    return capsys.readouterr()


def launched(name, label, *words, commit="a" * 40, tree=""):
    """Make a run directory whose job has launched a command, with its frozen code."""
    path = make_run(name, label=label, step=1)
    start = json.loads(path.joinpath("starts.jsonl").read_text())
    start |= {"command": ["/somewhere/train.py", *words], "commit": commit}
    path.joinpath("starts.jsonl").write_text(json.dumps(start) + "\n")
    Path("runs/.code").mkdir(exist_ok=True)
    if tree:
        frozen_code.note_job(frozen_code.STORE, label.partition("_")[0], tree)


CHANGES = [
    ((("--lr", "0.1"), {}), (("--lr=0.2",), {}), "--lr 0.1 -> 0.2"),
    ((("data",), {}), (("data", "--bf16"), {}), "--bf16 added"),
    ((("-j", "4", "a"), {}), (("b",), {}), "-j 4 a removed, b added"),
    (((), {}), ((), {"commit": "b" * 40 + "-dirty"}), "commit aaaaaaaaaa -> bbbbbbbbbb-dirty"),
    (((), {"tree": "1"}), ((), {"tree": "2"}), "files that are not committed"),
    ((("--lr", "0.1"), {"tree": "1"}), (("--lr=0.1",), {"tree": "1"}), ""),
]


@pytest.mark.parametrize(("before", "now", "line"), CHANGES, ids=lambda value: str(value)[:40])
def test_status_of_a_job_shows_what_changed_since_the_previous_one(before, now, line, fake, capsys):
    launched("train-8", "8", "--of", "an older job")
    launched("train-70", "70", *before[0], **before[1])
    launched("train-71", "71", *now[0], **now[1])
    launched("train-72", "72", "--of", "a newer job")
    launched("other-train-70", "70", "--of", "another name")
    fake.jobs(job("71", WorkDir=os.getcwd()))
    output = run_status(capsys, "71").out
    assert output.count("changed:") == bool(line)
    assert f"  changed:  since job 70: {line}\n" in output or not line


def test_status_compares_the_same_tasks_of_two_arrays_and_no_broken_records(fake, capsys):
    launched("train-70_1", "70_1", "--lr", "1")
    launched("train-70_2", "70_2", "--lr", "2")
    launched("train-71_1", "71_1", "--lr", "3")
    launched("once-3", "3", "--lr", "1")
    launched("broken-70", "70", "--lr", "1")
    launched("broken-71", "71")
    Path("runs/broken-71/starts.jsonl").write_text('{"job": {"job_id": "71"}, "command": 7}\n')
    outputs = [run_status(capsys, f"runs/{name}").out for name in ("train-71_1", "once-3")]
    assert "changed:  since job 70_1: --lr 1 -> 3\n" in outputs[0]
    assert "changed:" not in outputs[1]
    assert "--lr 1 removed" in run_status(capsys, "runs/broken-71").out


def test_status_shows_running_and_pending_jobs(fake, capsys):
    make_run("train-70", step=40, epoch=2, loss=0.25, samples_per_second=512.3)  # the third one
    fake.jobs(
        job("70", WorkDir=os.getcwd(), RestartCnt="1"),
        job("71", State="PENDING", Reason="Resources", NodeList="", StartTime="N/A"),
        job("72", UserID="7"),
    )
    first, second = run_status(capsys).out.splitlines()[1:]
    assert first.split() == [
        *("70", "train", "running", "2", "node[1-2]", "1", "0:12", "47:48"),
        *("40", "3", "0.25", "512", "runs/train-70"),
    ]
    assert second.split()[:4] == ["71", "train", "pending", "2"]
    assert "waits for hosts to become free; it is the next in line (Resources)" in second


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("None", ""),
        ("BeginTime", "requeued"),
        ("Dependency", "waits for the jobs of its dependency"),
        ("QOSMaxJobsPerUserLimit", "a limit of the qos (QOSMaxJobs"),
        ("AssocGrpGRES", "a limit of your account (Assoc"),
        ("QOSMaxGRESPerUser", "a limit of the qos (QOSMaxGRES"),
        ("MaxGRESPerAccount", "MaxGRESPerAccount"),
        ("DependencyNeverSatisfied", "cancel it"),
        (
            "ReqNodeNotAvail, UnavailableNodes:node[1-4]",
            "a shorter time may let it start",
        ),
        ("ReqNodeNotAvail(Unavailable:node1)", "a shorter time"),
        ("PartitionNodeLimit", "it would never start"),
        ("SomethingNew", "SomethingNew"),
        ("(\x1b[31mx)", r"\x1b[31mx"),
    ],
)
def test_status_explains_slurm_reasons(reason, words):
    assert words in job_facts.reason_text(reason)
    assert job_facts.reason_text(reason).isprintable()


def test_status_of_job_that_slurm_refused(fake, capsys):
    fake.jobs(
        job("70", State="FAILED", Reason="BadConstraints", exit_code="1", NodeList=""),
        job("71", State="CANCELLED", Reason="DependencyNeverSatisfied", NodeList=""),
        job("72", State="FAILED", Reason="PartitionDown", exit_code="512"),
    )
    refused, cancelled, ran = run_status(capsys).out.splitlines()[1:]
    reason = "Slurm refused it: no host satisfies its request (BadConstraints)"
    assert refused.endswith(reason)
    assert cancelled.split()[:3] == ["71", "train", "cancelled"]
    assert "exit code 2; its partition is down: " in ran
    assert "exit code" not in refused
    assert "cancel it" not in refused + cancelled
    assert cli.main(["requeue", "70"]) == 2
    assert f"job 70 never started: {reason}" in capsys.readouterr().err
    assert "requeue" not in fake.calls.read_text()


def test_status_escapes_control_characters(fake, capsys):
    fake.jobs(
        job(
            "70",
            Name="\x1b]0;x\x07\r\n\u202e\udcff",
            Reason="\x1b[2J",
            NodeList="\x9b1m",
        )
    )
    out = run_status(capsys).out
    assert out.isascii()
    assert all(character.isprintable() or character == "\n" for character in out)
    assert len(out.splitlines()) == 2
    assert r"\x1b]0;x\x07\r\n" in out


def test_status_table_is_cut_for_terminal_only():
    rows = [("JOB", "NAME", "LOSS"), ("70", "", "x" * 50)]
    assert job_watching.aligned(rows) == f"JOB  {'LOSS':>50}\n70   {'x' * 50}\n"
    assert [len(line) for line in job_watching.aligned(rows, 20).splitlines()] == [20, 20]


def test_status_without_slurm_shows_local_runs(fake, capsys):
    make_run("train-69", "done", loss=0.5)
    make_run("train-70", label="70", step=3)
    for absent in (lambda: fake.jobs(None), (fake.folder / "squeue").unlink):
        absent()
        output = run_status(capsys)
        assert "Slurm does not answer" in output.err
        rows = [line.split() for line in output.out.splitlines()[1:]]
        assert rows == [
            ["69", "train", "done", "9", "0.5", "runs/train-69"],
            ["70", "train", "not", "ended", "3", "runs/train-70"],
        ]
    assert run_status(capsys, "train-69").out.splitlines()[1].startswith("69")


def test_status_the_next_day_shows_the_newest_runs(fake, capsys, monkeypatch):
    """Slurm has forgotten the jobs: runs without a recorded end are interrupted."""
    monkeypatch.setattr(os, "getuid", os.geteuid)
    for number in range(1, 13):
        make_run(f"train-{number}", "done" if number % 2 else "", step=number)
    Path("runs/train-13").mkdir()
    make_run("by-hand")
    for number, name in enumerate([*(f"train-{n}" for n in range(1, 14)), "by-hand"]):
        os.utime(Path("runs", name), (number, number))
    shown = run_status(capsys)
    rows = [line.split()[:3] for line in shown.out.splitlines()[1:]]
    assert rows[:2] == [["5", "train", "done"], ["6", "train", "interrupted"]]
    assert rows[-1][:2] == ["not", "ended"]
    assert ["13", "train", "never"] in rows
    assert "4 older runs below ./runs" in shown.err
    fake.jobs(job("13", WorkDir=os.getcwd(), UserID=str(os.geteuid())))
    shown = run_status(capsys)
    assert shown.out.splitlines()[1].split()[:3] == ["13", "train", "running"]
    assert "never began" not in shown.out
    fake.command("sacct", "12|FAILED|3:0")
    assert "interrupted" not in run_status(capsys, "train-12").out


def test_pending_job_shows_since_when_and_for_what_it_waits(fake, capsys):
    submitted = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 7500))
    waits = {"State": "PENDING", "NodeList": "", "StartTime": "N/A", "SubmitTime": submitted}
    fake.jobs(job("71", Reason="Dependency", Dependency="afterok:70(unfulfilled)", **waits))
    line = run_status(capsys).out.splitlines()[1]
    assert f"since {submitted.replace('T', ' ')} (2 h 5 min); after afterok:70(unfulfilled)" in line
    shown = run_status(capsys, "71").out
    assert "  options:  --dependency afterok:70(unfulfilled) (squeue)\n" in shown
    assert "  before it: 0 pending jobs of its partition have a higher priority (squeue)\n" in shown


# Starts at 10:00 as it is, at 09:00 with half its time, and never with fewer nodes.
TEST_ONLY = """
case "$*" in
*--test-only*--nodes=1*) echo "allocation failure: Requested node configuration" >&2; exit 1 ;;
*--test-only*--time=12*) start=10:00:00 ;;
*--test-only*--time=24*) start=09:00:00 ;;
*) start=10:00:00 ;;
esac
echo "sbatch: Job 9 to start at 2026-11-30T$start using 4 processors on nodes n1" >&2
exit 0
"""


# A partition with nodes of two kinds, and two others.
SINFO = """main*|1:00:00|2|up|8|32000|gpu:4
main*|1:00:00|2|up|64|2000|(null)
big|infinite|40|up|8|32000|(null)
old|1:00|1|down|8|32000|"""


def test_pending_job_shows_what_would_start_sooner(fake, capsys):
    waits = {"State": "PENDING", "NodeList": "", "Reason": "Priority", "PriorityLong": "50"}
    fake.jobs(
        job("71", **waits),
        job("72", **waits | {"PriorityLong": "90", "UserID": "7"}),
        job("73", PriorityLong="95"),
        job("74", **waits | {"PriorityLong": "90", "Partition": "big"}),
    )
    fake.command("scontrol", "#!/bin/bash\nexec hpctrain run t.py")
    fake.command("sinfo", SINFO)
    fake.command("sbatch", more=TEST_ONLY)
    shown = run_status(capsys, "71").out
    assert "  options:  --nodes 2 --time 48:00 --partition main (squeue)\n" in shown
    assert "  before it: 1 pending job of its partition has a higher priority (squeue)\n" in shown
    sooner = "--time=24: a new job would start at 2026-11-30 09:00, 1 h 0 min sooner"
    assert [line for line in shown.splitlines() if "sooner:" in line] == [
        f"  sooner:   {sooner} (sbatch --test-only)"
    ]
    calls = [line for line in fake.calls.read_text().splitlines() if "--test-only" in line]
    assert len(calls) == 5  # as it is, two times, fewer nodes, one other partition
    fake.jobs(job("71", **waits | {"Reason": "PartitionTimeLimit", "TimeLimit": "2:00:00"}))
    assert (
        "--time 2:00:00 --partition main; main has 2 nodes of 8 CPUs and 32000 MB, "
        "2 nodes of 64 CPUs and 2000 MB, and allows 1:00:00 (sinfo) (squeue)"
        in run_status(capsys, "71").out
    )


# Of Slurm 22.05.8, without the keys that are not read.
ASKED = (
    "JobId=71 JobName=a ReqNodeList=x ExcNodeList=y UserId=ada(1000) Partition=main "
    "ReqNodeList=node[3-4] ExcNodeList=node4 NodeList= NumNodes=2-2 NumCPUs=128 NumTasks=2 "
    "CPUs/Task=64 ReqB:S:C:T=0:0:*:* Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=* "
    "MinCPUsNode=64 MinMemoryNode=500G MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00"
)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (ASKED, "--cpus-per-task 64 --memory 500G --nodelist node[3-4] --exclude node4 "),
        (ASKED.replace("=(null)", "=a100").replace("=64", "=1"),
         "--memory 500G --constraint a100 --nodelist node[3-4] --exclude node4 "),
    ],
)  # fmt: skip
def test_pending_job_shows_the_options_that_no_node_satisfies(fake, capsys, asked, options):
    fake.command("scontrol", asked)
    fake.jobs(job("71", State="PENDING", NodeList="", Reason="BadConstraints"))
    line = f"  options:  --nodes 2 {options}--time 48:00 --partition main (squeue, scontrol)\n"
    assert line in run_status(capsys, "71").out


@pytest.mark.parametrize(
    "output", ["", "sbatch: error: Batch job submission failed", "to start at 7"]
)
def test_pending_job_without_an_answer_of_slurm_shows_no_guess(fake, capsys, output):
    fake.jobs(
        job("71", State="PENDING", NodeList="", Reason="Resources", SubmitTime="N/A",
            PriorityLong="N/A")
    )  # fmt: skip
    fake.command("scontrol", "#!/bin/bash")
    fake.command("sbatch", error=output)
    shown = run_status(capsys, "71").out
    assert "sooner" not in shown
    assert "waits:" not in shown
    assert "before it" not in shown


def test_status_of_finished_run_by_name_and_number(fake, capsys):
    make_run("train-69", "given-up")
    out = run_status(capsys, "train-69", "runs/train-69", "69").out
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [["69", "train", "given-up"]] * 3


def test_status_of_unknown_word_lists_jobs_and_runs(fake, capsys):
    make_run("other-69", "done")
    fake.jobs(job("70"))
    err = run_status(capsys, "no\x1bne", code=2).err
    assert "70 (train)" in err
    assert "runs/other-69" in err
    assert "\x1b" not in err


def test_status_finds_run_directory_in_batch_script(fake):
    path = Path("my runs", "x", "3")
    path.mkdir(parents=True)
    fake.jobs(job("70_3", WorkDir=os.getcwd()))
    (one,) = slurm.jobs(fake.env)
    for line in (
        "export HPCTRAIN_RUN_DIR='my runs/x'",
        "exec hpctrain run --code 1a \\\n    --run-dir 'my runs/x' t.py --lr 1",
        "srun python t.py --run-dir='my runs/x/3' # --run-dir other",
    ):
        fake.command("scontrol", f"#!/bin/bash\n{line}\n")
        assert job_facts.run_of(one, fake.env) == Path.cwd() / path, line
    for hostile in ("$(touch x)", "`touch x`", "'a", "'my runs/none'"):
        fake.command("scontrol", f"#!/bin/bash\nHPCTRAIN_RUN_DIR={hostile}\n")
        assert job_facts.run_of(one, fake.env) is None
    assert not Path("x").exists()


def test_status_of_a_named_job_shows_first_failure_log_and_commands(fake, capsys):
    path = make_run("train-70", "given-up", label="70")
    path.joinpath("checkpoints", "step-00000009").mkdir(parents=True)
    cause = "rank 2 on node3 failed, with signal SIGKILL"
    path.joinpath("summary.json").write_text(json.dumps({"status": "given-up", "reason": cause}))
    Path("runs/train-70.log").touch()
    failed = job("70", State="FAILED", exit_code="19456", WorkDir=os.getcwd())
    fake.jobs(failed, job("71", WorkDir=os.getcwd()))
    assert "cause:" not in run_status(capsys).out
    block = [
        "job 70",
        f"  cause:    {cause}",
        "  log:      runs/train-70.log",
        "  continue: hpctrain requeue 70",
        "  or:       hpctrain submit … --run-dir runs/train-70 -- … --resume (with other code or "
        "options)",
    ]
    assert run_status(capsys, "71", "70").out.splitlines()[3:] == block
    # Also when Slurm has forgotten the job, whose log may be in the submit directory.
    Path("runs/train-70.log").rename("train-70.log")
    fake.jobs()
    block[2:5] = ["  log:      train-70.log", block[4].replace("or:      ", "continue:")]
    assert run_status(capsys, "train-70").out.splitlines()[2:] == block


STOPPED_BY = """\
0: step 40
hpctrain: job 70 is not started again: {}
hpctrain: its checkpoints are in /home/ada/runs/train-70
  fix:      hpctrain requeue 70
  or:       HPCTRAIN_RUN_DIR=/home/ada/runs/train-70 sbatch SCRIPT --resume (if Slurm refuses that)
"""


@pytest.mark.parametrize("reason", ["", "the file stop in the run directory, after step 40"])
def test_job_that_a_person_has_stopped_has_not_failed(fake, capsys, reason):
    """Without a reason, it was stopped before its Session was open."""
    path = make_run("train-70", label="70", step=40)
    path.joinpath("checkpoints", "step-00000040").mkdir(parents=True)
    if reason:
        summary = {"status": "stopped", "reason": reason}
        path.joinpath("summary.json").write_text(json.dumps(summary))
    Path("runs/train-70.log").write_text(STOPPED_BY.format("stopped by the file stop"))
    fake.jobs(job("70", State="FAILED", exit_code=str(75 << 8), WorkDir=os.getcwd()))
    _, row, *block = run_status(capsys, "70").out.splitlines()
    assert row.split()[2] == "stopped"
    assert "cause:" not in "".join(block)
    assert block[1:4] == [
        f"  stopped:  {reason or 'stopped by the file stop'}",
        "  log:      runs/train-70.log",
        "  continue: hpctrain requeue 70",
    ]
    (entry,) = json.loads(run_status(capsys, "70", "--json").out)["jobs"]
    assert (entry["state"], entry["exit_code"], entry["failure"]) == ("FAILED", 75, None)


def test_job_refused_in_the_run_directory_of_another_one_does_not_show_its_figures(fake, capsys):
    """Job 71 was started with the run directory of job 70, which trains there."""
    path = make_run("shared", label="70", step=40, loss=0.25)
    path.joinpath("checkpoints", "step-00000040").mkdir(parents=True)
    refused = "runs/shared already has a run, at step 40; its .lock names job 70 (restart 0)"
    Path("runs/train-71.log").write_text(
        f"0: hpctrain: error: {refused}\n0:   fix:      --run-dir DIR, for a new run\n"
    )
    own = {"WorkDir": os.getcwd()}
    fake.command("scontrol", "#!/bin/bash\nexec hpctrain run --run-dir runs/shared t.py")
    fake.jobs(job("70", **own), job("71", State="FAILED", exit_code=str(2 << 8), **own))
    _, other, row, *block = run_status(capsys, "70", "71").out.splitlines()
    assert other.split()[-3:] == ["40", "0.25", "runs/shared"]
    assert "40" not in row.split()
    assert row.endswith("runs/shared, which has the run of job 70; exit code 2")
    assert block[-3:] == ["job 71", f"  cause:    {refused}", "  log:      runs/train-71.log"]
    # One that has failed before its Session can go on there.
    fake.jobs(job("71", State="FAILED", exit_code=str(1 << 8), **own))
    assert "  continue: hpctrain requeue 71\n" in run_status(capsys, "71").out
    # While it waits, the run that it will continue is its own.
    fake.jobs(job("71", State="PENDING", NodeList="", **own))
    assert "0.25" in run_status(capsys, "71").out


def test_status_of_a_failed_job_names_a_disk_that_is_full_now(fake, capsys, monkeypatch):
    """Neither the run nor the log could record it."""
    make_run("train-70", label="70")
    monkeypatch.setattr(rundir, "full_now", lambda folder: f"the disk that holds {folder} is full")
    failed = job("70", State="FAILED", exit_code="256", WorkDir=os.getcwd())
    fake.jobs(failed, job("71", WorkDir=os.getcwd()))
    output = run_status(capsys, "71", "70").out
    assert output.count("cause:    the disk that holds ") == 1
    assert "/runs/train-70 is full\n" in output
    make_run("alone", step=3)  # without a job, its end is not known
    make_run("done", "done")
    output = run_status(capsys, "alone", "done").out
    assert output.count("cause: ") == output.count("runs/alone is full\n") == 1


def test_status_finds_run_that_later_job_resumes(fake):
    path = make_run("train-12", label="70")
    fake.jobs(job("70", WorkDir=os.getcwd()))
    assert job_facts.run_of(slurm.jobs(fake.env)[0], fake.env) == Path.cwd() / path
    assert job_facts.label_of(path) == "70"


def test_status_reads_odd_metrics(tmp_path):
    path = make_run("odd-1", step="many", epoch=True, loss=None, samples_per_second=[1])
    path.joinpath("summary.json").write_text("[1")
    made = job_facts.progress(path)
    assert (made.step, made.epoch, made.loss, made.speed, made.status) == (
        *(None,) * 4,
        "",
    )
    with path.joinpath("metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 2}\n' * 9000 + '{"step": 9001, "lo')
    assert (job_facts.progress(path).step, job_facts.progress(path).loss) == (1, 2.0)
    assert job_facts.progress(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", '{"loss": 1' + "0" * 400 + "}"),
        ("metrics.jsonl", '{"loss": Infinity, "step": NaN, "epoch": -Infinity}'),
        ("metrics.jsonl", "[" * 60000),
        ("summary.json", "[" * 100000),
        ("summary.json", '{"status": ' + "[" * 900 + "]" * 900 + ', "reason": {}}'),
        ("summary.json", '{"metrics": {"top1": ' + "[" * 900 + "]" * 900 + "}}"),
        ("summary.json", '{"status": "done"}' + " " * 2**21),
        ("events.jsonl", '{"time": 1e400, "event": "launched"}\n{"time": 1' + "0" * 400 + "}"),
        ("events.jsonl", '{"time": 1.0, "event": "launched", "step": ' + "[" * 900 + "]" * 900),
        ("starts.jsonl", '{"job": {"array_job_id": {}, "array_task": 7}}'),
        *((f"{name}.jsonl", None) for name in ("metrics", "starts", "events")),
        ("summary.json", None),
    ],
)
def test_status_reads_damaged_run_files(fake, capsys, file, content):
    path = make_run("odd-1")
    if content is None:
        os.mkfifo(path / file)
    else:
        path.joinpath(file).write_text(content)
    make_run("train-2", "done")
    fake.jobs(None)
    odd, other = run_status(capsys).out.splitlines()[1:]
    assert odd.endswith("runs/odd-1")
    assert len(odd) < 200
    assert other.split() == ["2", "train", "done", "9", "runs/train-2"]


def test_status_ignores_hostile_job_number(fake, capsys):
    path = make_run("evil-9")
    start = {"job_id": "\x1b]0;pwn\x07X\nfake row"}
    path.joinpath("starts.jsonl").write_text(json.dumps({"job": start}) + "\n")
    assert job_facts.label_of(path) == ""
    out = run_status(capsys, "evil-9").out
    assert len(out.splitlines()) == 2
    assert "pwn" not in out
    assert cli.main(["cancel", "evil-9"]) == 2
    assert "its job number: none" in capsys.readouterr().err


def test_status_prints_to_ascii_terminal(fake):
    fake.jobs(job("70", UserID=str(os.geteuid()), Name="\xe9" * 40))
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "status"],
        env={**os.environ, **plain}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    head, row = done.stdout.splitlines()
    assert f"70   {'?' * 32}  running" in row
    assert row.index("running") == head.index("STATE")


def test_status_from_deleted_folder(fake, capsys, monkeypatch, tmp_path):
    fake.jobs(job("70", WorkDir=os.getcwd()))
    path = make_run("train-70", step=3).absolute()
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    assert str(path) in run_status(capsys).out
    fake.jobs()
    assert "no jobs" in run_status(capsys).err


def test_status_of_impossible_file_name(fake, capsys):
    for word in ("a" * 300, "a\0b"):
        assert "neither a job nor a run" in run_status(capsys, word, code=2).err


def test_status_of_job_with_too_long_name(fake):
    fake.jobs(job("70", Name="x" * 300, WorkDir=os.getcwd()))
    Path("runs").mkdir()
    Path("runs", "deleted").symlink_to("nowhere")
    path = make_run("other", label="70")
    assert job_facts.run_of(slurm.jobs(fake.env)[0], fake.env) == Path.cwd() / path


def test_cancel_calls_scancel_and_shows_how_to_resume(fake, capsys):
    path = make_run("train-70")
    (path / "checkpoints" / "step-00000040").mkdir(parents=True)
    fake.jobs(job("70", WorkDir=os.getcwd()), job("71"), job("9_1"), job("9_[2-5]"))
    fake.command("scancel")
    assert cli.main(["cancel", "train-70"]) == 0
    out = capsys.readouterr().out
    assert "job 70 (train) is cancelled" in out
    assert "the newest of step 40 or later" in out
    assert f"--run-dir {shlex.quote(str(path.absolute()))} -- … --resume" in out
    assert cli.main(["cancel", "9"]) == 0
    calls = [line for line in fake.calls.read_text().splitlines() if line.startswith("scancel")]
    assert calls == ["scancel 70", "scancel 9"]


@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_cancel_and_requeue_refuse_ambiguous_or_foreign_jobs(fake, capsys, command):
    fake.jobs(
        job("70"),
        job("71"),
        job("72", UserID="7", UserName="bob"),
        job("73", Name="one"),
    )
    fake.command("scancel")
    make_run("old-12", "done")
    for word, message in (
        ("train", "several jobs have the name 'train'"),
        ("72", "job 72 belongs to bob"),
        ("99", "neither a job nor a run"),
        ("old-12", "Slurm lists no job with this"),
        ("..", "neither a job nor a run"),
        ("", "neither a job nor a run"),
    ):
        assert cli.main([command, "73", word]) == 2
        assert message in capsys.readouterr().err
    assert not fake.calls.exists()


def test_cancel_refuses_run_without_a_job(fake, capsys):
    make_run("exp-70")  # started manually: that of the job is runs/train-70
    make_run("train-71").joinpath("starts.jsonl").write_text('{"job": null}\n')
    Path("train").mkdir()  # a folder of sources, with the name of the job
    fake.jobs(job("70", WorkDir=os.getcwd()), job("71", Name="other"))
    fake.command("scancel")
    for word, message in (
        ("exp-70", "no job with this run directory"),
        ("train-71", "its job number: none"),
    ):
        assert cli.main(["cancel", word]) == 2
        assert message in capsys.readouterr().err
    assert "scancel" not in fake.calls.read_text()
    assert cli.main(["cancel", "train"]) == 0
    assert fake.calls.read_text().splitlines()[-1] == "scancel 70"


def test_cancel_by_name_takes_the_active_job(fake, capsys):
    fake.jobs(job("70", State="COMPLETED"), job("71"), job("72_1", Name="two", State="FAILED"))
    fake.command("scancel")
    assert cli.main(["requeue", "train"]) == 2
    assert "several jobs have the name 'train'" in capsys.readouterr().err
    assert cli.main(["cancel", "train"]) == 0
    assert fake.calls.read_text().splitlines()[-1] == "scancel 71"
    assert cli.main(["cancel", "two"]) == 0
    assert "has ended already" in capsys.readouterr().out


def test_requeue_of_array_takes_running_and_failed_tasks(fake, capsys):
    states = ("COMPLETED", "RUNNING", "FAILED", "CANCELLED", "PENDING")
    tasks = [job(f"7_{index}", State=word) for index, word in enumerate(states)]
    fake.jobs(*tasks, job("7_[5-9]", State="PENDING"), job("8_0", Name="b", State="COMPLETED"))
    fake.command("scontrol")
    assert cli.main(["requeue", "train"]) == 0
    assert [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        *("job 7_1", "job 7_2"),
    ]
    assert cli.main(["requeue", "7_0"]) == 0
    assert cli.main(["requeue", "b"]) == 2
    assert "done or cancelled" in capsys.readouterr().err
    calls = [line for line in fake.calls.read_text().splitlines() if "requeue" in line]
    assert calls == [f"scontrol requeue {label}" for label in ("7_1", "7_2", "7_0")]


def test_status_reads_no_batch_script_of_pending_jobs(fake, capsys):
    fake.jobs(*(job(str(number), State="PENDING") for number in (70, 71)))
    run_status(capsys)
    assert not fake.calls.exists()
    Path("goes on").mkdir()
    fake.jobs(job("70", State="PENDING", WorkDir=os.getcwd()))
    fake.command("scontrol", "#!/bin/bash\nhpctrain run --run-dir 'goes on' t.py\n")
    assert "goes on" in run_status(capsys, "70").out


def test_requeue_reports_slurm_error(fake, capsys):
    fake.jobs(job("70"), job("71", State="PENDING"))
    assert cli.main(["requeue", "71"]) == 2
    assert "is already pending" in capsys.readouterr().err
    fake.command("scontrol", error="Requested operation is presently disabled for job 70", code=1)
    assert cli.main(["requeue", "70"]) == 1
    assert "presently disabled" in capsys.readouterr().err
    fake.command("scontrol")
    assert cli.main(["requeue", "70"]) == 0
    assert fake.calls.read_text().splitlines()[-1] == "scontrol requeue 70"


def test_cancel_and_requeue_fail_when_slurm_does_not_answer(fake, capsys):
    fake.jobs(None)
    for command in ("cancel", "requeue"):
        assert cli.main([command, "70"]) == 1
        assert "Unable to contact" in capsys.readouterr().err


def test_run_directory_of_a_folder_a_number_and_a_name(fake):
    path = make_run("train-69", "done")
    make_run("a/model-7", "done")
    elsewhere = Path("elsewhere/runs/train-70")
    elsewhere.mkdir(parents=True)
    fake.jobs(job("70", Name="long", WorkDir=str(Path("elsewhere").absolute())))
    fake.command("scontrol", "#!/bin/bash\nhpctrain run --run-dir runs/train-70 t.py")
    for name, found in {
        "runs/a/model-7": "runs/a/model-7", "train-69": path, "69": path,
        "70": elsewhere.absolute(), "long": elsewhere.absolute(),
    }.items():  # fmt: skip
        assert job_status.run_directory(name, fake.env) == Path(found), name
    for name, words in {"71": "neither a job nor a run", "none": "neither"}.items():
        with pytest.raises(UsageError, match=words):
            job_status.run_directory(name, fake.env)
    fake.command("scontrol", "#!/bin/bash\nhpctrain run t.py")
    with pytest.raises(UsageError, match="runs of 70: none"):
        job_status.run_directory("70", fake.env)
    fake.jobs(None)
    assert job_status.run_directory("69", fake.env) == path
    with pytest.raises(UsageError, match="is not a run here"):
        job_status.run_directory("71", fake.env)
