"""Calls of Slurm's commands, and the reading of their output.

The commands here are fakes: scripts with the output of Slurm 22.05.8. Tests whose file ends with
_on_slurm.py call the real ones.
"""

import time

import environments
import fake_slurm
import pytest
from fake_slurm import job

from hpctrain.cluster import slurm
from hpctrain.cluster.launchers.base import hosts_of_job

SHOWN = (
    "JobId=70 JobName={name} UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 Nice=0 "
    "Account=(null) QOS=(null) JobState={word} Reason=None Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:12 Command=/home/x.sh"
)
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def fake(tmp_path):
    return fake_slurm.FakeSlurm(tmp_path)


@pytest.mark.parametrize(
    ("word", "lives"),
    [
        *[(word, True) for word in ("RUNNING", "PENDING", "COMPLETING", "SUSPENDED", "REQUEUED")],
        *[(word, True) for word in ("CONFIGURING", "REQUEUE_HOLD", "STOPPED", "A_NEW_STATE")],
        *[(word, False) for word in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED")],
        *[(word, False) for word in ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")],
    ],
)
def test_job_states_that_count_as_alive(fake, word, lives):
    fake.command("scontrol", SHOWN.format(name="train", word=word, restarts=2))
    state = slurm.job_state("70", fake.env)
    assert (state.name, state.restarts, state.known, state.active) == (word, 2, True, lives)


def test_job_name_is_not_taken_for_a_job_state(fake):
    name = "x JobState=COMPLETED Restarts=9"
    fake.command("scontrol", SHOWN.format(name=name, word="RUNNING", restarts=0))
    assert slurm.job_state("70", fake.env) == slurm.JobState("RUNNING", 0)


@pytest.mark.parametrize("message", [UNKNOWN, "Job 70_9 not found"])
def test_job_state_of_a_forgotten_job_is_ended(fake, message):
    fake.command("scontrol", error=message, code=1)
    state = slurm.job_state("70_9", fake.env)
    assert (state.known, state.active) == (False, False)
    assert fake.calls.read_text().split()[1:] == ["show", "job", "--oneliner", "70_9"]


def test_squeue_gives_the_job_state_where_scontrol_does_not(fake):
    fake.command("scontrol", error="slurm_load_jobs error: Access/permission denied", code=1)
    fake.command("squeue", "RUNNING             3                   ")
    assert slurm.job_state("70_3", fake.env) == slurm.JobState("RUNNING", 3)
    assert "--states=all --job=70_3" in fake.calls.read_text()
    fake.command("squeue", error=UNKNOWN, code=1)
    assert not slurm.job_state("70", fake.env).known


def test_squeue_format_variables_of_a_user_do_not_change_the_job_state(fake):
    fake.command("squeue", more='[ -z "$SQUEUE_PARTITION$SQUEUE_STATES" ] && echo "RUNNING 0"')
    env = {**fake.env, "SQUEUE_PARTITION": "debug", "SQUEUE_STATES": "PENDING"}
    assert slurm.job_state("70", env) == slurm.JobState("RUNNING", 0)


def test_missing_or_strange_slurm_gives_no_job_state(fake, tmp_path):
    nowhere = {"PATH": str(tmp_path)}
    assert slurm.job_state("70", nowhere) is None
    assert slurm.step_is_active("70", "0", nowhere) is None
    with pytest.raises(slurm.NoAnswerError, match="squeue"):
        slurm.hosts_left(["70"], nowhere)
    fake.jobs(None)
    fake.command("scontrol", "a notice of the site")
    assert slurm.job_state("70", fake.env) is None
    fake.command("scontrol", more="printf '\\377\\376'")
    assert slurm.job_state("70", fake.env) is None
    fake.command(
        "scontrol", error="slurm_load_jobs error: Unable to contact slurm controller", code=1
    )
    assert slurm.job_state("70", fake.env) is None
    assert slurm.step_is_active("70", "0", fake.env) is None


def test_slow_slurm_gives_no_job_state(fake, monkeypatch):
    monkeypatch.setattr("hpctrain.cluster.slurm.asking.SECONDS_TO_ANSWER", 0.2)
    fake.command("scontrol", more="exec sleep 20")
    fake.command("squeue", more="exec sleep 20")
    start = time.monotonic()
    assert slurm.job_state("70", fake.env) is None
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("label", ["", "--help", "70;rm", "70_", "70_x", "12345.server", "f2Zq"])
def test_job_id_of_another_form_is_not_queried(fake, label):
    fake.command("scontrol", SHOWN.format(name="train", word="RUNNING", restarts=0))
    assert slurm.job_state(label, fake.env) is None
    assert slurm.step_is_active(label, "0", fake.env) is None
    assert slurm.step_is_active("70", label, fake.env) is None
    assert not fake.calls.exists()


def test_step_is_active_or_has_ended(fake):
    fake.command("scontrol", "StepId=70.3 UserId=0 State=RUNNING")
    assert slurm.step_is_active("70", "3", fake.env) is True
    fake.command("scontrol", error="Job step 70.3 not found", code=1)
    assert slurm.step_is_active("70", "3", fake.env) is False


def test_hosts_that_remain_in_a_job(fake):
    fake.command("squeue", "72 node5\n70 node[1,3]\n71 ")
    assert slurm.hosts_left(["70"], fake.env) == "node[1,3]"  # the last task of an array
    assert slurm.hosts_left(["71"], fake.env) == ""  # it lost its only host
    fake.command("squeue", error=UNKNOWN, code=1)
    with pytest.raises(slurm.NoAnswerError, match="Invalid job id"):
        slurm.hosts_left(["70"], fake.env)


def test_squeue_jobs_with_any_name(fake):
    names = ["a\nb", "x|y  z", "\x1b[31m", "<0123456789abcdef>", "JobState=COMPLETED", ""]
    fake.jobs(*(job(str(70 + at), Name=name) for at, name in enumerate(names)))
    assert [one.name for one in slurm.jobs(fake.env)] == names


def test_squeue_job_with_all_fields(fake):
    fake.jobs(
        job("70_3", State="FAILED", exit_code="768", RestartCnt="2", Reason="NonZeroExitCode")
    )
    (one,) = slurm.jobs(fake.env, ["70_3"])
    assert (one.label, one.array, one.task, one.state) == ("70_3", "70", "3", "FAILED")
    assert (one.code, one.restarts, one.active, one.uid) == (3, 2, False, "1000")


@pytest.mark.parametrize(
    ("status", "code"),
    [("0", 0), ("768", 3), ("15", 128 + 15), ("0:0", 0), ("3:0", 3), ("0:15", 128 + 15)],
)
def test_squeue_exit_code_in_the_formats_of_slurm_22_05_and_24_11(fake, status, code):
    fake.jobs(job("71", State="CANCELLED", exit_code=status))
    assert slurm.jobs(fake.env)[0].code == code


@pytest.mark.parametrize(
    ("text", "number"), [("768", 768), ("2K", 2048), ("1.50K", 1536), ("?", 0)]
)
def test_squeue_number_of_hosts(fake, text, number):
    fake.jobs(job("71", NumNodes=text))
    assert slurm.jobs(fake.env)[0].nodes == number


def test_squeue_jobs_are_sorted_by_job_id(fake):
    fake.jobs(*(job(one) for one in ("9_[4-7%2]", "9_10", "10", "9_2", "8")))
    assert [one.label for one in slurm.jobs(fake.env)] == ["8", "9_2", "9_10", "9_[4-7%2]", "10"]


def test_squeue_parts_of_a_heterogeneous_job_are_one_job(fake):
    fake.jobs(
        job("70", JobArrayID="70+1", JobID="71", NodeList="node[2-3]"),
        job("70", JobArrayID="70+0", NodeList="node1", NumNodes="1", State="COMPLETING"),
        job("9"),
    )
    single, whole = slurm.jobs(fake.env)
    assert (whole.label, whole.number, whole.state) == ("70", "70", "COMPLETING")
    assert (whole.nodes, whole.hosts) == (3, "node1,node[2-3]")
    assert (single.label, single.nodes) == ("9", 2)


def test_hosts_and_tasks_of_all_parts_of_a_heterogeneous_job():
    env = environments.load("het-batch-shell")["ranks"][0]["env"]
    assert slurm.hosts_of_parts(env) == [["node2"], ["node3", "node4"]]
    assert slurm.ids_of_parts(env) == ["1", "2"]
    whole = slurm.of_all_parts(env)
    assert whole["SLURM_JOB_NODELIST"] == "node2,node[3-4]"
    assert whole["SLURM_TASKS_PER_NODE"] == "2,1(x2)"
    assert (whole["SLURM_JOB_NUM_NODES"], whole["SLURM_NTASKS"]) == ("3", "4")
    assert slurm.of_all_parts(whole) == whole


def test_job_without_parts_stays_as_it_is():
    env = environments.load("batch-shell")["ranks"][0]["env"]
    assert slurm.hosts_of_parts(env) == []
    assert slurm.ids_of_parts(env) == [env["SLURM_JOB_ID"]]
    assert slurm.of_all_parts(env) == env


def test_squeue_leaves_out_forgotten_jobs_and_reports_a_silent_controller(fake):
    assert slurm.jobs(fake.env, ["70"]) == []
    fake.jobs(None)
    with pytest.raises(slurm.NoAnswerError, match="Unable to contact"):
        slurm.jobs(fake.env, ["70"])
    fake.command("squeue", "a notice of the site")
    with pytest.raises(slurm.NoAnswerError, match="notice of the site"):
        slurm.jobs(fake.env)


def test_of_several_lines_of_a_command_that_ends_the_fatal_one_is_shown(fake):
    fake.command("squeue", error="squeue: error: no DNS\nsqueue: fatal: no configuration", code=1)
    with pytest.raises(slurm.NoAnswerError, match=r"^squeue: fatal: no configuration$"):
        slurm.jobs(fake.env)
    fake.command("squeue", error="squeue: error: one\nsqueue: error: two", code=1)
    with pytest.raises(slurm.NoAnswerError, match=r"^squeue: error: one squeue: error: two$"):
        slurm.jobs(fake.env)


def test_sbatch_job_id(fake):
    for output in ("70", "70;cluster", "a notice of the site\n70"):
        fake.command("sbatch", output)
        assert slurm.sbatch(b"", fake.env) == slurm.Answer(0, "70", "")
    fake.command("sbatch", error="sbatch: error: no", code=1)
    assert slurm.sbatch(b"", fake.env) == slurm.Answer(1, "", "sbatch: error: no")
    (fake.folder / "sbatch").unlink()
    with pytest.raises(slurm.NoAnswerError, match="no sbatch"):
        slurm.sbatch(b"", {"PATH": str(fake.folder)})


def test_sinfo_partitions_with_default_and_gpus(fake):
    fake.command(
        "sinfo",
        "main*|infinite|4|up|2|1900|(null)\nv100|2:00:00|1.50K|down|64|512000|gpu:v100:4(S:0-1),nvme:1",
    )
    assert slurm.partitions(fake.env) == [
        slurm.Partition("main", True, "infinite", 4, "", True, 2, 1900),
        slurm.Partition("v100", False, "2:00:00", 1536, "gpu:v100:4", False, 64, 512000),
    ]


def test_sacct_and_sacctmgr_jobs_and_accounts(fake):
    fake.command("sacct", "70_0|COMPLETED|0:0\n70_1|CANCELLED by 1000|0:15\n70_2|FAILED|75:0")
    assert slurm.ended("70", fake.env) == [
        slurm.Ended("70_0", "COMPLETED", 0),
        slurm.Ended("70_1", "CANCELLED", 143),
        slurm.Ended("70_2", "FAILED", 75),
    ]
    more = 'case "$*" in *associations*) printf "b\\na\\nb\\n"; exit;; esac'
    fake.command("sacctmgr", "b", more=more)
    assert slurm.accounts(fake.env) == ["b", "a"]


@pytest.mark.parametrize("output", ["", "no columns"])
def test_accounting_and_partitions_without_an_answer_are_empty(fake, output):
    for name in ("sacct", "sacctmgr", "sinfo"):
        fake.command(name, output, error="Slurm accounting storage is disabled", code=not output)
    assert slurm.ended("70", fake.env) == []
    assert slurm.ended("no label", fake.env) == []
    assert slurm.largest_memory("70", fake.env) == 0
    if not output:
        assert slurm.accounts(fake.env) == slurm.qualities(fake.env) == []
    assert slurm.partitions(fake.env) == []


def test_hosts_of_a_job_are_not_those_of_a_step_of_mpirun():
    """Read the variables that Slurm 26.05 gives to the daemons of mpirun of Open MPI 6."""
    env = {"SLURM_JOB_NODELIST": "node[2-3]", "SLURM_NODELIST": "node[1-3]"}
    assert hosts_of_job(env) == ("node1", "node2", "node3")
    # A heterogeneous job, of all whose parts `of_all_parts` makes one list.
    env = {"SLURM_JOB_NODELIST": "node1,node[2-3]", "SLURM_NODELIST": "node1"}
    assert hosts_of_job(env) == ("node1", "node2", "node3")
