"""What Slurm is asked, and what its answers mean.

The commands here are fakes: scripts that print what Slurm 22.05.8 printed. tests/slurm asks the
real ones.
"""

import time

import pytest

from hpctrain import slurm

SHOWN = (
    "JobId=70 JobName={name} UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 Nice=0 "
    "Account=(null) QOS=(null) JobState={word} Reason=None Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:12 Command=/home/x.sh"
)
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def put(tmp_path):
    """A function that puts a fake command on a PATH of its own; and the environment with that."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, says="", error="", code=0, more=""):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\n{more}\necho "$0 $*" >> {tmp_path}/calls\n'
            f"cat <<'EOF'\n{says}\nEOF\ncat >&2 <<'EOF'\n{error}\nEOF\nexit {code}\n"
        )
        program.chmod(0o755)
        return {"PATH": f"{folder}:/usr/bin:/bin"}

    write.calls = tmp_path / "calls"
    # Hides what is installed on this machine.
    for name in ("scontrol", "squeue"):
        write(name, error=f"{name}: not here", code=127)
    return write


@pytest.mark.parametrize(
    ("word", "lives"),
    [
        *[(word, True) for word in ("RUNNING", "PENDING", "COMPLETING", "SUSPENDED", "REQUEUED")],
        *[(word, True) for word in ("CONFIGURING", "REQUEUE_HOLD", "STOPPED", "A_NEW_STATE")],
        *[(word, False) for word in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED")],
        *[(word, False) for word in ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")],
    ],
)
def test_the_states_in_which_a_job_has_processes_or_will_have_some(put, word, lives):
    env = put("scontrol", SHOWN.format(name="train", word=word, restarts=2))
    state = slurm.job_state("70", env)
    assert (state.word, state.restarts, state.known, state.lives) == (word, 2, True, lives)


def test_a_job_name_is_not_taken_for_a_state(put):
    name = "x JobState=COMPLETED Restarts=9"
    env = put("scontrol", SHOWN.format(name=name, word="RUNNING", restarts=0))
    assert slurm.job_state("70", env) == slurm.JobState("RUNNING", 0)


@pytest.mark.parametrize("said", [UNKNOWN, "Job 70_9 not found"])
def test_a_job_that_slurm_has_forgotten_is_over(put, said):
    env = put("scontrol", error=said, code=1)
    state = slurm.job_state("70_9", env)
    assert (state.known, state.lives) == (False, False)
    assert put.calls.read_text().split()[1:] == ["show", "job", "--oneliner", "70_9"]


def test_squeue_answers_where_scontrol_does_not(put):
    put("scontrol", error="slurm_load_jobs error: Access/permission denied", code=1)
    env = put("squeue", "RUNNING             3                   ")
    assert slurm.job_state("70_3", env) == slurm.JobState("RUNNING", 3)
    assert "--states=all --job=70_3" in put.calls.read_text()
    env = put("squeue", error=UNKNOWN, code=1)
    assert not slurm.job_state("70", env).known


def test_lists_as_a_user_likes_them_do_not_change_the_answer(put):
    env = put("squeue", "", more='[ -z "$SQUEUE_PARTITION$SQUEUE_STATES" ] && echo "RUNNING 0"')
    env |= {"SQUEUE_PARTITION": "debug", "SQUEUE_STATES": "PENDING"}
    assert slurm.job_state("70", env) == slurm.JobState("RUNNING", 0)


def test_no_slurm_and_a_slurm_that_says_strange_things_are_no_answer(put, tmp_path):
    nowhere = {"PATH": str(tmp_path)}
    assert slurm.job_state("70", nowhere) is None
    assert slurm.step_lives("70", "0", nowhere) is None
    with pytest.raises(slurm.NoAnswerError, match="squeue"):
        slurm.hosts_left("70", nowhere)
    env = put("scontrol", "a notice of the site")
    assert slurm.job_state("70", env) is None
    put("scontrol", more="printf '\\377\\376'")
    assert slurm.job_state("70", env) is None
    put("scontrol", error="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert slurm.job_state("70", env) is None
    assert slurm.step_lives("70", "0", env) is None


def test_a_slow_slurm_is_no_answer(put, monkeypatch):
    monkeypatch.setattr(slurm, "_SECONDS_TO_ANSWER", 0.2)
    put("scontrol", more="exec sleep 20")
    env = put("squeue", more="exec sleep 20")
    begun = time.monotonic()
    assert slurm.job_state("70", env) is None
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("label", ["", "--help", "70;rm", "70_", "70_x", "12345.server", "f2Zq"])
def test_what_is_no_number_of_slurms_is_not_asked_for(put, label):
    env = put("scontrol", SHOWN.format(name="train", word="RUNNING", restarts=0))
    assert slurm.job_state(label, env) is None
    assert slurm.step_lives(label, "0", env) is None
    assert slurm.step_lives("70", label, env) is None
    assert not put.calls.exists()


def test_a_step_lives_or_has_ended(put):
    env = put("scontrol", "StepId=70.3 UserId=0 State=RUNNING")
    assert slurm.step_lives("70", "3", env) is True
    put("scontrol", error="Job step 70.3 not found", code=1)
    assert slurm.step_lives("70", "3", env) is False


def test_the_hosts_that_a_job_has_left(put):
    env = put("squeue", "node[1,3]")
    assert slurm.hosts_left("70", env) == "node[1,3]"
    env = put("squeue", error=UNKNOWN, code=1)
    with pytest.raises(slurm.NoAnswerError, match="Invalid job id"):
        slurm.hosts_left("70", env)
