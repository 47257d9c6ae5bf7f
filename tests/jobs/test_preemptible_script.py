"""sbatch/preemptible.sh after the end of its ranks: requeue, or exit with a code.

scontrol is a fake: a script on the PATH that records its arguments.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hpctrain.jobs import job_files
from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec

TOML = Path(__file__).resolve().parents[2] / "sbatch" / "preemptible.toml"
SCONTROL = """#!/bin/sh
echo "$@" >> calls
case "$1" in
show)
    index="${{SLURM_ARRAY_TASK_ID:+ ArrayJobId=7 ArrayTaskId=$SLURM_ARRAY_TASK_ID}}"
    restarts="Restarts=${{SLURM_RESTART_COUNT:-0}} BatchFlag=1"
    echo "JobId=$SLURM_JOB_ID$index JobName=a JobState={state} Reason=None $restarts";;
write) echo '#!/bin/bash' >"$4";;
requeue) {requeue};;
esac
"""
EXIT_STATUS = 'echo "{\\"code\\": %d, \\"reason\\": \\"so\\"}" > "$HPCTRAIN_EXIT_STATUS_FILE"; '
# Slurm ends the script and its child processes before scontrol returns.
ACCEPTED = "kill -TERM 0"


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the script with a line of shell as ranks: exit code, output."""

    script = tmp_path / "preemptible.sh"
    script.write_text(render(JobSpec(**job_files.read(TOML))))

    def run(ranks, state="RUNNING", requeue=ACCEPTED, meanwhile=None, **env):
        program = tmp_path / "bin" / "scontrol"
        program.parent.mkdir(exist_ok=True)
        if state:
            program.write_text(SCONTROL.format(state=state, requeue=requeue))
            program.chmod(0o755)
        environ = {
            "PATH": f"{program.parent}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "a/name",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            **env,
        }
        process = subprocess.Popen(
            ["bash", script, "sh", "-c", ranks],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if meanwhile:
            meanwhile(process)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    return run


def files_left():
    """Return the names of the stop files and exit status files that remain."""
    return sorted(path.name for path in Path("runs").glob(".*"))


def calls():
    return Path("calls").read_text().splitlines() if Path("calls").exists() else []


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ("true", 0),
        (EXIT_STATUS % 0, 0),
        (EXIT_STATUS % 0 + "exit 3", 3),  # after the session
        ("exit 1", 1),  # no exit status: the launcher's code
        ('echo "{\\"co" >"$HPCTRAIN_EXIT_STATUS_FILE"; exit 3', 3),  # a truncated exit status file
        (EXIT_STATUS % 1, 1),
        (EXIT_STATUS % 2 + "exit 143", 2),
        (EXIT_STATUS % 76 + "exit 143", 76),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),  # srun ended the ranks because one failed
    ],
)
def test_preemption_script_does_not_requeue_ended_ranks(run, ranks, code):
    assert run(ranks)[0] == code
    assert not calls()
    assert not files_left()


@pytest.mark.parametrize(
    "ranks",
    [
        EXIT_STATUS % 75,
        EXIT_STATUS % 75 + "exit 1",  # torchrun's
        EXIT_STATUS % 75 + "exit 143",  # srun's
        "exit 75",  # hpctrain run's
        'touch "$HPCTRAIN_STOP_FILE"; kill -TERM $$',  # before the first step
        "kill -USR1 $$",
        "kill -USR2 $$",
    ],
)
def test_preemption_script_requeues_stopped_ranks_last(run, ranks):
    code, output = run(ranks, state="SIGNALING" if "USR2" in ranks else "RUNNING")
    assert code == -signal.SIGTERM, output
    assert calls() == ["show job --oneliner 7", "requeue incomplete 7"]
    assert not files_left()


def test_preemption_script_requeues_array_task_by_its_own_name(run):
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    _, output = run(
        'echo "$HPCTRAIN_RUN_DIR $HPCTRAIN_STOP_FILE"; exit 75', **array, SLURM_JOB_ID="9"
    )
    assert calls() == ["show job --oneliner 9", "show job --oneliner 7_3", "requeue incomplete 7_3"]
    folder = os.getcwd()
    assert f"{folder}/runs/a_name-7_3 {folder}/runs/.stop-7_3-2\n" in output


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
def test_preemption_script_does_not_requeue_cancelled_job(run, state):
    code, output = run(EXIT_STATUS % 75, state=state)
    assert code == 75
    assert calls() == ["show job --oneliner 7"]
    assert f"job 7 is {state}: this script does not requeue it" in output


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"requeue": "echo Requested operation is disabled >&2; exit 1"}, "operation is disabled"),
        ({"state": None, "PATH": "/usr/bin:/bin"}, "scontrol"),
    ],
)
def test_preemption_script_prints_sbatch_command_when_requeue_fails(run, tmp_path, more, why):
    if "PATH" in more:  # the PATH of a machine without Slurm
        tools = tmp_path / "tools"
        tools.mkdir()
        for tool in ("bash", "sh", "env", "mkdir", "rm", "od", "tr", "sed", "touch"):
            (tools / tool).symlink_to(f"/usr/bin/{tool}")
        more["PATH"] = str(tools)
    code, output = run(EXIT_STATUS % 75, **more)
    assert code == 75
    assert why in output
    script = "THE_SCRIPT" if "PATH" in more else f"{tmp_path}/runs/job-7.sh"
    assert f"    HPCTRAIN_RUN_DIR='{tmp_path}/runs/a_name-7' sbatch {script} sh -c " in output
    assert output.endswith(" --resume\n")


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_preemption_script_turns_signal_into_stop_file(run, number):
    def send_signals(process):
        for line in process.stdout:
            if line == "ready\n":
                break
        process.send_signal(number)
        process.send_signal(number)

    wait = 'echo ready; until [ -e "$HPCTRAIN_STOP_FILE" ]; do sleep 0.02; done; sleep 0.3; '
    code, output = run(f"{wait}echo saved; {EXIT_STATUS}" % 75, meanwhile=send_signals)
    assert code == -signal.SIGTERM
    assert output == "saved\n"
    assert calls()[-1] == "requeue incomplete 7"


def test_preemption_script_ignores_stop_file_of_killed_start(run):
    Path("runs").mkdir()
    for name in (".stop-7-0", ".exit-status-7-0", ".stop-70-0"):
        Path("runs", name).write_text('{"code": 75}')
    code, _ = run('[ ! -e "$HPCTRAIN_STOP_FILE" ] && [ ! -e "$HPCTRAIN_EXIT_STATUS_FILE" ]')
    assert code == 0
    assert files_left() == [".stop-70-0"]
