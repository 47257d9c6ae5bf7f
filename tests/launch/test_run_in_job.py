"""`hpctrain run` in a batch job: options, signals, exit codes and requeue, with a fake Slurm.

tests/jobs/test_sbatch_script_on_slurm.py and tests/training/test_resume_on_slurm.py use a real one.
"""

import contextlib
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from time import sleep

import fake_slurm
import faults
import launches
import processes
import pytest
import survivor
from fake_slurm import job

from hpctrain import rundir
from hpctrain.cli import main
from hpctrain.cluster.launchers import Process
from hpctrain.launch import slurm_job
from hpctrain.launch.supervisor import SECONDS_OF_ONE_SIGNAL
from hpctrain.rundir import effective_time, host_ledger

EXIT_STATUS = 'echo "{\\"code\\": %d, \\"reason\\": \\"so\\"}" > "$HPCTRAIN_EXIT_STATUS_FILE"; '
# Runs what follows its options as the task of a step on one host.
SRUN = """
case " $* " in *" -m hpctrain.launch.agent "*) ;; *) exit 9 ;; esac
[ -z "$SLURM_EXPORT_ENV" ] || exit 9
export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1
export SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=node1 SLURM_STEP_TASKS_PER_NODE=1
export SLURM_NTASKS=1
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return a fake Slurm; this process is in the batch script of its job 7."""
    monkeypatch.setattr(slurm_job, "_SECONDS_UNTIL_END", 0.0)
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    made.jobs(job("7", NodeList="node1"))
    made.command("scontrol")
    for name, value in {
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_TASKS_PER_NODE": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def task(slurm, monkeypatch):
    """Return a function that makes the job a task of an array."""

    def task(index, count=4):
        slurm.jobs(job(f"7_{index}", JobID="9", NodeList="node1"))
        monkeypatch.setenv("SLURM_JOB_ID", "9")
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", str(count))

    return task


def run(line, *options):
    """Run a line of sh once in the job; return the exit code."""
    return main(["run", "--once", *options, "--", "sh", "-c", line, "x"])


def calls(slurm):
    """Return the calls that change something."""
    lines = slurm.calls.read_text().splitlines() if slurm.calls.exists() else []
    return [line for line in lines if not line.startswith("scontrol show")]


def files_left():
    return [str(path) for path in Path().rglob("*") if "launch" in path.name]


# --- exit codes, and the requeue


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ("true", 0),
        (EXIT_STATUS % 0, 0),
        (EXIT_STATUS % 0 + "exit 3", 3),  # after the session
        ("exit 1", 1),  # no exit status: the launcher's code
        ('echo "{\\"co" >"$HPCTRAIN_EXIT_STATUS_FILE"; exit 3', 3),  # a truncated exit status file
        (EXIT_STATUS % 1 + "exit 1", 1),
        (EXIT_STATUS % 2 + "exit 143", 2),
        (EXIT_STATUS % 76 + "exit 143", 76),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),  # srun ended the ranks because one failed
    ],
)
def test_ended_ranks_give_the_exit_code_and_no_requeue(slurm, ranks, code):
    assert run(ranks) == code
    assert not calls(slurm)
    assert not files_left()


@pytest.mark.parametrize(
    "ranks",
    [
        EXIT_STATUS % 75 + "exit 75",
        EXIT_STATUS % 75 + "exit 1",  # torchrun's
        EXIT_STATUS % 75 + "exit 143",  # srun's
        "exit 75",
        "kill -USR1 $$",  # before the session
        "kill -USR2 $$",
    ],
)
def test_stopped_ranks_are_requeued(slurm, ranks):
    assert run(ranks) == 75
    assert calls(slurm) == ["scontrol requeue incomplete 7"]
    assert not files_left()


def test_max_restarts_ends_with_76(slurm, monkeypatch, capfd):
    slurm.jobs(job("7", NodeList="node1", RestartCnt="2"))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert run("exit 75", "--max-restarts", "2") == 76
    assert not calls(slurm)
    assert "the limit is 2" in capfd.readouterr().err


def test_shell_of_an_allocation_is_never_requeued(slurm, monkeypatch):
    monkeypatch.delenv("ENVIRONMENT")
    assert run("exit 75", "--run-dir", "mine") == 75
    assert not calls(slurm)


def test_array_task_is_requeued_by_its_label_in_a_run_directory_of_its_own(slurm, task, tmp_path):
    task(3)
    assert run('echo "$HPCTRAIN_RUN_DIR" >seen; exit 75') == 75
    assert calls(slurm) == ["scontrol requeue incomplete 7_3"]
    assert Path("seen").read_text() == f"{tmp_path}/runs/train-7_3\n"
    run('echo "$HPCTRAIN_RUN_DIR" >seen', "--run-dir", "sweep")
    assert Path("seen").read_text() == f"{tmp_path}/sweep/3\n"


def test_run_directory_that_an_array_shares_starts_no_rank(slurm, task, monkeypatch, capfd):
    task(0)
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", "x")
    assert run("touch began") == 2
    assert "HPCTRAIN_RUN_DIR=x: one directory for the 4 tasks" in capfd.readouterr().err
    assert not Path("began").exists()
    task(0, count=1)
    assert run("touch began") == 0


# --- signals


def test_signal_before_the_ranks_start_stops_them(slurm):
    """Send it during the first question to Slurm."""
    once = "[ -e sent ] || kill -USR2 $PPID; touch sent; echo 7 node1"
    slurm.command("squeue", more=once)
    assert run('[ -e "$HPCTRAIN_STOP_FILE" ] && touch saw; exit 75') == 75
    assert Path("sent").exists()
    assert Path("saw").exists()


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_signal_after_the_ranks_have_ended_changes_nothing(slurm, name):
    slurm.command("squeue", more=f"[ ! -e ended ] || kill -{name} $PPID; echo 7 node1")
    assert run(EXIT_STATUS % 75 + "touch ended; exit 75") == 75


@pytest.fixture
def begin():
    """Return a function that starts `hpctrain run` in the background."""
    with processes.background() as begin:
        command = [launches.PYTHON, "-m", "hpctrain", "run", "--once"]
        yield lambda line, *options: begin([*command, *options, "--", "sh", "-c", line])


def recorded(rank, **fields):
    """Return a line of sh by which a rank of a step without agents records an event."""
    line = json.dumps({"rank": rank, **fields})
    return f"echo '{line}' >>\"$HPCTRAIN_EVIDENCE/ranks-node{rank + 1}\"; "


OPENS_A_SESSION = recorded(0, host="node1")


@pytest.mark.parametrize(
    ("number", "opens", "does"),
    [
        (signal.SIGUSR2, "", "SIGUSR2 stops the run as soon as its Session is open"),
        (signal.SIGUSR2, OPENS_A_SESSION, "SIGUSR2 stops the run, which saves first"),
        (signal.SIGTERM, OPENS_A_SESSION, "SIGTERM stops the run, which saves first"),
        (signal.SIGUSR2, 'rm -r "$HPCTRAIN_RUN_DIR"; ', "SIGUSR2 stops the run as soon as"),
    ],
)
def test_signal_becomes_a_stop_file_and_spares_the_ranks(slurm, begin, number, opens, does):
    save = EXIT_STATUS % 75 + "echo saved; exit 75"
    wait = 'until [ -e "$HPCTRAIN_STOP_FILE" ]; do sleep 0.02; done; '
    slurm.command("scontrol", more="kill -TERM $PPID")  # as Slurm ends the job
    process = begin(f"{opens}echo ready; {wait}{save}")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=processes.PATIENCE)
    assert (process.returncode, out) == (-signal.SIGTERM, "saved\n")
    assert does in err
    assert calls(slurm) == ["scontrol requeue incomplete 7"]


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGUSR2, signal.SIGUSR2]])
def test_sigterm_or_a_second_signal_ends_ranks_without_a_session(slurm, begin, numbers):
    slurm.command("scontrol", more="kill -TERM $PPID")
    process = begin("trap : USR2; echo ready; while :; do sleep 0.02; done")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(numbers[0])
    for number in numbers[1:]:
        assert "stops the run" in process.stderr.readline()
        sleep(SECONDS_OF_ONE_SIGNAL)
        process.send_signal(number)
    process.communicate(timeout=processes.PATIENCE)
    assert process.returncode == -signal.SIGTERM
    assert calls(slurm) == ["scontrol requeue incomplete 7"]


@pytest.mark.parametrize("code", [0, 1])
def test_requeue_plain_ends_a_program_without_a_session_by_sigterm(slurm, begin, code):
    slurm.command("scontrol", more="kill -TERM $PPID")
    save = f"trap 'echo saved; exit {code}' TERM; "
    process = begin(f"{save}echo ready; while :; do sleep 0.02; done", "--requeue-plain")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    out, _ = process.communicate(timeout=processes.PATIENCE)
    assert (process.returncode, out) == (-signal.SIGTERM, "saved\n")
    assert calls(slurm) == ["scontrol requeue incomplete 7"]


def test_requeue_plain_starts_no_rank_after_a_signal(slurm):
    slurm.command("squeue", more="[ -e sent ] || kill -USR2 $PPID; touch sent; echo 7 node1")
    assert run("touch ran", "--requeue-plain") == 75
    assert Path("sent").exists()
    assert not Path("ran").exists()


# --- options of a job


SETTINGS = ("--setting=--lr 0.1 --name 'a b'", "--setting=", "--setting=--name ''")


@pytest.mark.parametrize(
    ("index", "words"), [(0, ["--lr", "0.1", "--name", "a b"]), (1, []), (2, ["--name", ""])]
)
def test_setting_of_an_array_task_follows_the_command(task, index, words):
    task(index)
    assert run('printf "%s\\0" "$@" >words', *SETTINGS) == 0
    assert Path("words").read_text() == "".join(f"{word}\0" for word in words or [""])


def test_setting_without_its_index_is_refused(slurm, task, capfd):
    assert run("touch began", *SETTINGS) == 2
    assert "--setting options: 3; SLURM_ARRAY_TASK_ID: not set" in capfd.readouterr().err
    task(3)
    assert run("touch began", *SETTINGS) == 2
    assert "--setting options: 3; SLURM_ARRAY_TASK_ID: 3" in capfd.readouterr().err
    assert not Path("began").exists()


def test_finish_runs_after_success_only(slurm, tmp_path, capfd):
    lines = 'echo "finish in $HPCTRAIN_RUN_DIR"\nfalse\necho never'
    assert run("echo ranks", "--finish", lines) == 1
    assert capfd.readouterr().out == f"ranks\nfinish in {tmp_path}/runs/train-7\n"
    for ranks, code in (("exit 3", 3), ("exit 75", 75)):
        assert run(ranks, "--finish", lines) == code
    assert not capfd.readouterr().out
    for end, code in (("exit 75", 75), ("kill -TERM $$", 143), ("true", 0)):
        assert run("true", "--finish", end) == code
    assert len(calls(slurm)) == 1, "the job was requeued after its ranks had succeeded"


def test_program_is_not_found(slurm, capfd):
    code = main(["run", "--once", "--", "no-such-program"])
    assert code not in (0, 75)
    assert "no-such-program" in capfd.readouterr().err
    assert main(["run", "--once", "--"]) == 2
    assert "no program" in capfd.readouterr().err


def test_words_of_the_command_are_read_by_no_shell(slurm):
    words = ["", " ", "it's", '"', "\\", "$(touch canary)", "`touch canary`", "a\nb", "*", "--once"]
    Path("write.sh").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >words\n')
    os.chmod("write.sh", stat.S_IRWXU)
    assert main(["run", "--once", "--", "./write.sh", *words]) == 0
    assert Path("words").read_text() == "".join(f"{word}\0" for word in words)
    assert not Path("canary").exists()


# --- ranks that srun starts


@pytest.mark.parametrize("cpus", [None, "5"])
def test_direct_starts_each_rank_as_a_task_of_srun(slurm, monkeypatch, cpus):
    """Not every version of Slurm passes the CPUs of a task from sbatch to srun."""
    # After sbatch --export=NONE, srun would pass no variable on to the ranks.
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    slurm.command("srun", more='printf "%s\\0" "$@" >words; exit ${SLURM_EXPORT_ENV:-3}')
    if cpus:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    assert main(["run", "--direct", "--", "program", "a b"]) == 3
    more = ["--cpus-per-task=5"] if cpus else []
    words = Path("words").read_text().split("\0")[:-1]
    assert words == ["--quiet", "--kill-on-bad-exit=1", *more, "program", "a b"]


def test_direct_names_a_killed_rank_which_has_left_no_record(slurm, capfd):
    """The others have lost it, and srun ends as a process that was killed."""
    lost = {"time": 1, "caused_by_other_rank": True, "description": "lost", "pid": 1}
    lines = [recorded(rank, host=f"node{rank}") for rank in range(3)]
    lines += [recorded(rank, failure=lost) for rank in range(2)]
    slurm.command("srun", more=f"{''.join(lines)}exit 137")
    assert main(["run", "--direct", "--max-attempts", "1", "--", "program"]) == 137
    assert "rank 2 on node2 failed first, with signal SIGKILL\n" in capfd.readouterr().err


def test_direct_in_a_container_is_that_of_pyxis(slurm, tmp_path, monkeypatch):
    slurm.command("srun", more='printf "%s\\0" "$@" >words')
    inside = ("--container", "./a.sqsh", "--container-env", "A,B")
    assert main(["run", "--direct", *inside, "--", "program"]) == 0
    words = Path("words").read_text().split("\0")[:-1]
    run = f"{tmp_path}/runs/train-7"
    names = [*filter(os.environ.get, ("PYTHONPATH", "OMP_NUM_THREADS")), "A", "B"]
    assert words[2:] == [
        f"--container-image={tmp_path}/./a.sqsh",
        f"--container-mounts={tmp_path}:{tmp_path},{run}:{run}",
        f"--container-workdir={Path.cwd()}",
        *([f"--container-env={','.join(names)}"]),
        "program",
    ]


# --- agents, with an srun that starts one


@pytest.fixture
def agent(slurm, tmp_path, monkeypatch):
    """Return a function that runs a command by the agent of one host; it returns the output."""
    slurm.command("srun", more=SRUN)

    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")

    def run(*words, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", "run", *words],
            env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    (tmp_path / "disk").mkdir()
    return run


def test_secret_is_new_for_each_start_and_in_no_command_line_or_output(slurm, agent):
    secrets = set()
    for _ in range(2):
        output = agent("--", "sh", "-c", 'echo "$HPCTRAIN_SECRET" >secret')
        secrets.add(Path("secret").read_text().strip())
        assert not [one for one in secrets if one in output or one in str(calls(slurm))]
    assert len(secrets) == 2
    assert min(map(len, secrets)) >= 32


def test_ranks_of_an_agent_start_in_the_copies_and_in_the_container(agent, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "disk"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("import os; print(os.getcwd())")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "python").write_text("#!/bin/sh\necho $0 $(pwd) $@\n")
    (tmp_path / "tools" / "python").chmod(0o755)
    with tarfile.open("tools.tar", "w") as archive:
        archive.add(tmp_path / "tools", "bin")
    copies = f"{tmp_path}/disk/hpctrain-{slurm_user()}-7-00"
    assert agent("--stage-code", "code", "train.py") == f"{copies}/code\n"
    output = agent("--stage-code", "code", "--stage-environment", "tools.tar", "train.py")
    assert output == f"{copies}/environment/bin/python {copies}/code train.py\n"
    program = tmp_path / "fakes" / "apptainer"
    program.write_text('#!/bin/sh\necho "$APPTAINERENV_A" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("A", "its value")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    inside = ("--container", "a.sif", "--container-env", "A", "--stage-code", "code")
    words = shlex.split(agent(*inside, "train.py"))
    binds = [f"--bind {one}" for one in (tmp_path, f"{tmp_path}/runs/train-7", copies)]
    assert " ".join(words) == (
        f"its value exec --pwd {copies}/code {' '.join(binds)} {tmp_path}/a.sif python train.py"
    )
    assert not list((tmp_path / "disk").iterdir())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "exec --nv --pwd " in agent(*inside, "--", "python", "train.py")


def test_copy_that_fails_starts_no_rank_and_no_other_attempt(agent):
    output = agent("--retry", "--stage-data", "missing", "--", "touch", "began", code=1)
    assert output.count("cannot copy files to ") == 1
    assert "HT218" in output
    assert "attempt 2" not in output
    assert not Path("began").exists()


def slurm_user():
    return os.environ.get("LOGNAME") or os.environ.get("USER") or "root"


@pytest.mark.parametrize("variable", ["SLURM_PTY_PORT", "JPY_PARENT_PID"])
def test_shell_or_notebook_in_a_task_of_srun_is_no_rank(slurm, agent, monkeypatch, variable):
    """Check that the ranks are those of the job, and not the single task of the step."""
    step = "ID=0 NUM_TASKS=1 NUM_NODES=1 NODELIST=node1 TASKS_PER_NODE=1"
    task = "PROCID=0 LOCALID=0 NODEID=0 TASKS_PER_NODE=1 NTASKS=1 NTASKS_PER_NODE=2"
    words = [f"STEP_{word}" for word in step.split()] + task.split()
    for name, value in [(variable, "40000"), *(f"SLURM_{word}".split("=") for word in words)]:
        monkeypatch.setenv(name, value)
    output = agent("--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert {"0: 0 of 2", "1: 1 of 2"} <= set(output.splitlines())
    assert "requeue" not in str(calls(slurm))


def test_shell_of_srun_starts_the_ranks_of_the_job(slurm, monkeypatch):
    shell = Process(terminal=True, task=("bash", ""))
    monkeypatch.setattr(Process, "current", lambda: shell)
    monkeypatch.delenv("ENVIRONMENT")
    for name in ("STEP_ID", "PROCID", "LOCALID", "NODEID", "PTY_PORT"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert run("echo ran >ran; exit 75", "--run-dir", "mine") == 75
    assert Path("ran").exists()
    assert not calls(slurm)


def records(**ranks):
    """Return lines of sh by which ranks of a step with `--direct` record failures."""
    lines = []
    for rank, (time, date, caused) in enumerate(ranks.values()):
        found = {
            "time": time,
            "date": date,
            "caused_by_other_rank": caused,
            "description": f"ValueError: of {rank}",
            "pid": 1,
        }
        lines += [recorded(rank, host=f"node{rank + 1}"), recorded(rank, failure=found)]
    return "".join(lines)


def test_first_failure_of_direct_is_that_of_the_wall_clock(slurm, capfd):
    """The clocks of hosts that count from their own starts do not compare."""
    lines = records(a=(9.0, 100.0, False), b=(5.0, 101.0, False), c=(1.0, 99.0, True))
    assert run(f"{lines}exit 1") == 1
    assert "rank 0 on node1 failed first, ValueError: of 0" in capfd.readouterr().err


@pytest.mark.parametrize("killed", [1, 2])
def test_killed_rank_of_direct_is_named_if_it_is_the_only_one(slurm, capfd, killed):
    lines = records(a=(9.0, 100.0, True), b=(9.0, 100.0, True))
    lines += "".join(recorded(5 + rank, host="n") for rank in range(killed))
    run(f"{lines}kill -9 $$", "--max-attempts", "1")
    assert ("rank 5 on n failed first" in capfd.readouterr().err) == (killed == 1)


# --- the next attempt


@pytest.mark.slow
@pytest.mark.e2e
def test_killed_rank_goes_on_from_the_newest_checkpoint(agent):
    """Kill a rank by kill -9 two steps after a checkpoint; the next attempt resumes there."""
    words = (*faults.OPTIONS, "--epochs", "1", "--pace", "0.3", "--run-dir", "run")
    output = agent("--nproc-per-node", "2", survivor.__file__, *words, "--fault=kill@7:rank1")
    assert "attempt 2: 1 of 1 hosts; from step 5 on" in output
    assert faults.begins("run") == [0, 5], output
    done = faults.start(2, "--epochs", "1", run="quiet")
    assert done.code == 0
    faults.same("run", "quiet", twice=2)


# Takes more checkpoints than its disk has room for, from the third epoch on.
FILLS_ITS_DISK = """
import contextlib, torch, hpctrain
with hpctrain.Session(batch_size=2, workers=0, checkpoint_every=2, device="cpu") as session:
    model = torch.nn.Linear(8, 8)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    loader = session.loader(data)
    with session.run() as run:
        for epoch in run.epochs(10):
            if epoch == 2 and session.is_main:
                filler = open(run.directory.path / "filler", "wb", 0)
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(4096))
            for (batch,) in run.batches(loader):
                session.step(model(batch).square().mean())
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_full_disk_is_two_messages_one_attempt_and_no_traceback(slurm, agent, small_disk):
    """Fill the disk of the run directory during a job, and launch the job again on it."""
    Path("train.py").write_text(FILLS_ITS_DISK)
    words = ("--nproc-per-node", "2", "train.py", "--run-dir", f"{small_disk}/run")
    output = agent(*words, code=1)
    full = f"the disk that holds {small_disk}/run is full ("
    lines = output.splitlines()
    assert "Traceback" not in output
    assert "attempt 2" not in output
    assert "exclude" not in output
    assert sum(line.startswith(f"0: hpctrain: {full}") for line in lines) == 1
    assert sum(f"hpctrain: error: {full}" in line for line in lines) == 1
    assert sum("failed first" in line and full in line for line in lines) == 1
    assert output.count("fix:") == 2
    assert len(lines) < 40
    assert not host_ledger.LEDGER.exists()
    run = rundir.RunDirectory(small_disk / "run")
    assert max(run.steps()) < 20
    with open(run.path / "filler", "ab", 0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    again = agent(*words, code=1)
    assert "the files of this launch could not be written (No space left on device)" in again
    assert (again.count("fix:"), again.count("Traceback")) == (1, 0)
    assert not list(run.path.glob(".launch-*"))
    (run.path / "filler").unlink()


@pytest.mark.slow
@pytest.mark.e2e
def test_effective_training_time_over_two_attempts(slurm, agent, monkeypatch):
    """Kill a rank with kill -9; the second attempt resumes, and each second is attributed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    slurm.command("srun", more="[ -e began ] || date +%s.%N >began\n" + SRUN)
    paced = ("--global-batch", "12", "--pace", "0.6", "--checkpoint-every", "3", "--max-steps", "9")
    words = ("--nproc-per-node", "2", survivor.__file__, *paced, "--run-dir", "run")
    output = agent(*words, "--fault", "kill@5:rank1")
    assert "attempt 2" in output
    directory = rundir.RunDirectory("run")
    marks = directory.lines(directory.events)
    names = [mark["event"] for mark in marks if mark["event"] != "saved"]
    start = ["launched", "rendezvous", "connected", "restored", "training"]
    second = [*start, "done", "ended"]
    # Rank 0 may be ended before it has noticed the failure itself.
    assert names in (
        [*start, "last step", *("noticed",) * times, "ended", *second] for times in (1, 2)
    )
    launched = [mark for mark in marks if mark["event"] == "launched"]
    assert [mark["again"] for mark in launched] == [False, True]
    assert launched[0]["time"] < float(Path("began").read_text())  # that of `hpctrain run`
    found = effective_time.measure(directory)
    lost = found.lost_seconds
    assert found.effective_seconds + sum(lost.values()) == pytest.approx(found.wall_seconds)
    assert found.wall_seconds == pytest.approx(marks[-2]["time"] - marks[0]["time"])
    assert found.effective_seconds > 9 * 0.6
    assert (lost["queue"], lost["start"] > 1) == (0, True)  # two times the imports of torch
    assert lost["redo"] > 0.3  # step 4, and maybe step 5
    assert f"effective  {found.share:.2f} of" in output
