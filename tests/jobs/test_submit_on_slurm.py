"""submit, status, cancel and requeue on a real Slurm."""

import re
import subprocess
import time
from pathlib import Path

import launches
import pytest

HPCTRAIN = (launches.PYTHON, "-m", "hpctrain")
HOSTILE = "$(touch x);`id` 'a' \x1b]0;b\x07\n#SBATCH --nodes=9"


@pytest.fixture(scope="module")
def hpctrain(cluster, tmp_path_factory):
    """Return a function that runs a command of hpctrain on the login host."""
    home = str(tmp_path_factory.mktemp("home"))

    def run(*words, env=None, **more):
        clean = {**cluster.environ(), "HOME": home, **(env or {})}
        return cluster.run([*HPCTRAIN, *map(str, words)], env=clean, **more)

    run.home = home
    return run


@pytest.fixture(autouse=True)
def clear_cluster(cluster):
    yield
    cluster.clear()


def script(name, text):
    """Write a script; return the words that submit it."""
    Path(name).write_text(f"import os, sys, time\n{text}\n")
    return ("--", launches.PYTHON, name)


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


LEAVES = """
code = int(os.environ["CODE"])
if code == 75 and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
    code = 0
print(f"leaves with {code}", flush=True)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def followed(cluster, hpctrain, tmp_path_factory):
    """Run `submit --follow` for several jobs at once; return the outputs by exit code."""
    folder = tmp_path_factory.mktemp("followed")
    (folder / "leaves.py").write_text(f"import os, sys\n{LEAVES}")
    started = {}
    for code in (0, 3, 75):
        argv = [*HPCTRAIN, "submit", "--follow", "--output", f"logs/{code}.log"]
        argv += ["--env", f"CODE={code}", "--", launches.PYTHON, "leaves.py"]
        started[code] = subprocess.Popen(
            cluster.command(argv), cwd=folder, env={**cluster.environ(), "HOME": hpctrain.home},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    outputs = {}
    for code, process in started.items():
        try:
            outputs[code] = (*process.communicate(timeout=120), process.returncode)
        finally:
            process.kill()
    return outputs


@pytest.mark.parametrize("code", [0, 3])
def test_submit_follow_shows_log_and_exit_code(followed, code):
    out, err, code_of_submit = followed[code]
    assert code_of_submit == code, err
    assert re.fullmatch(r"\d+\n", out)
    assert len(re.findall(f"^leaves with {code}$", err, re.M)) == 1
    assert f"job {out.strip()} has ended: {'failed' if code else 'completed'}" in err


def test_submit_follow_continues_through_requeue(followed):
    out, err, code_of_submit = followed[75]
    assert code_of_submit == 0, err
    assert re.fullmatch(r"\d+\n", out)
    assert err.index("leaves with 75\n") < err.index("leaves with 0\n")
    assert "after 1 restart" in err


def test_wait_and_status_show_the_rank_that_failed_first(hpctrain):
    text = "if os.environ['RANK'] == '2': raise ValueError('why')\ntime.sleep(60)"
    done = hpctrain("submit", "--wait", "--nodes", "3", *script("ranks.py", text))
    number = done.stdout.strip()
    assert done.returncode == 1, done.stderr
    expected = (
        "  cause:    rank 2 on node3 failed first, with exit code 1: ValueError: why\n"
        f"  log:      runs/ranks-{number}.log\n"
    )
    assert done.stderr.endswith(expected)
    assert f"  log:      tail -F runs/ranks-{number}.log\n" in done.stderr
    assert "ValueError: why" in Path(f"runs/ranks-{number}.log").read_text()
    assert hpctrain("status", number).stdout.endswith(f"job {number}\n{expected}")


def test_submit_wait_of_array_prints_table(hpctrain):
    text = """
code = int(sys.argv[sys.argv.index("--code") + 1])
run = os.environ["HPCTRAIN_RUN_DIR"]
with open(run + "/run.json", "w") as file:
    file.write("{}")
with open(run + "/summary.json", "w") as file:
    file.write('{"status": "done", "step": %d}' % (10 + code))
sys.exit(code)
"""
    command = script("settings.py", text)
    done = hpctrain("submit", "--wait", "--name", "grid", "--sweep", "code=0,5,4", *command)
    number = done.stdout.strip()
    assert done.returncode == 5, done.stderr
    lines = done.stderr.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("JOB "))
    for index, (code, state) in enumerate(((0, "completed"), (5, "failed"), (4, "failed"))):
        row = rf"{number}_{index} +grid +{state} .* {10 + code}  --code {code}; runs/grid-{number}_"
        assert re.match(row, lines[at + 1 + index]), lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--partition", "nope"],
            r"main \(up to infinite\), .*--partition NAME \(it is nope; partition in JOB.toml",
        ),
        (["--gpus-per-node", "a100:1"], r"gpu:4.*--gpus-per-node N \(it is a100:1; "),
        (["--memory", "900G"], r"--memory SIZE \(it is 900G; memory in JOB.toml"),
        (["--constraint", "fast"], r"--constraint EXPR \(it is fast; "),
        (["--extra", "reservation=x"], r"fix: +--reservation "),
        (["--extra", "nodelist=node9"], r"node\[1-4\].*fix: +--nodelist "),
        (["--extra", "no-such-option"], r"unrecognized option.*\n.*sbatch --help"),
        (["--array", "0-5000000"], r"MaxArraySize.*\n.*--array"),
    ],
)
def test_submit_refused_by_slurm_names_option(hpctrain, options, message):
    done = hpctrain("submit", *options, *script("x.py", ""))
    assert (done.returncode, done.stdout) == (2, "")
    assert "sbatch rejected the job: " in done.stderr
    assert re.search(message, done.stderr, re.DOTALL), done.stderr


def test_submit_dry_run_asks_slurm_and_writes_nothing(cluster, hpctrain):
    command = script("x.py", "")
    before = sorted(Path().rglob("*")), cluster.run(["squeue", "-h"]).stdout
    done = hpctrain("submit", "--dry-run", "--output", "logs/%j.log", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=x\n")
    assert "would create the folder logs" in done.stderr
    assert "to start at" in done.stderr
    assert (sorted(Path().rglob("*")), cluster.run(["squeue", "-h"]).stdout) == before
    refused = hpctrain("submit", "--dry-run", "--gpus-per-node", "99", *command)
    assert refused.returncode == 2
    assert "--gpus-per-node" in refused.stderr


def test_status_requeue_and_cancel_of_a_job(cluster, hpctrain):
    """Take one job through pending, running, requeued and cancelled."""
    rows = '{"step": 40, "epoch": 2, "time": 1, "loss": 0.25, "samples_per_second": 512.0}\\n'
    command = script(
        "trains.py",
        "import signal\nrun = os.environ['HPCTRAIN_RUN_DIR']\n"
        # Exits as a Session after a save; this code alone must not requeue the job.
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"open(run + '/metrics.jsonl', 'w').write('{rows}')\n"
        "os.makedirs(run + '/checkpoints/step-00000040', exist_ok=True)\n"
        "open('began', 'a').write('x')\ntime.sleep(300)",
    )
    began = Path("began")
    held = hpctrain("submit", "--name", "held", "--extra", "hold", *command).stdout.strip()
    number = hpctrain("submit", *command).stdout.strip()
    until(began.exists)
    until(lambda: began.read_text() == "x")

    output = hpctrain("status").stdout
    lines = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert "held by you: scontrol release" in lines[held]
    row = lines[number].split()
    assert row[1:4] == ["trains", "running", "1"], output
    assert row[-5:] == ["40", "3", "0.25", "512", f"runs/trains-{number}"], output

    again = hpctrain("requeue", f"runs/trains-{number}")
    assert again.returncode == 0, again.stderr
    assert cluster.job(number)["Restarts"] == "1"
    until(lambda: began.read_text() == "xx")

    ended = hpctrain("cancel", "trains")
    assert ended.returncode == 0, ended.stderr
    assert "newest of step 40" in ended.stdout
    cluster.ended(number)
    facts = cluster.job(number)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "1")
    assert cluster.job(held)["JobState"] == "PENDING"
    assert "has ended already: cancelled" in hpctrain("cancel", number).stdout
    assert re.search(rf"{number} .*cancelled", hpctrain("status", number).stdout)


def test_requeue_and_cancel_of_array_leave_done_tasks(cluster, hpctrain):
    command = script("part.py", "if os.environ['SLURM_ARRAY_TASK_ID'] != '0': time.sleep(300)")
    number = hpctrain("submit", "--array", "0-2", "--launcher", "none", *command).stdout.strip()
    tasks = [f"{number}_{index}" for index in range(3)]
    states = ["COMPLETED", "RUNNING", "RUNNING"]
    until(lambda: [cluster.job(one)["JobState"] for one in tasks] == states)
    again = hpctrain("requeue", "part")
    assert again.returncode == 0, again.stderr
    assert [line.split(",")[0] for line in again.stdout.splitlines()] == [
        f"job {one}" for one in tasks[1:]
    ]
    assert [cluster.job(one)["Restarts"] for one in tasks] == ["0", "1", "1"]
    assert cluster.job(tasks[0])["JobState"] == "COMPLETED"
    assert hpctrain("cancel", "part").returncode == 0


def test_hostile_job_names_run_no_code(cluster, hpctrain):
    command = script("a b'$(touch x).py", "time.sleep(60)")
    plain = "$(touch x);`id` 'a' [b]|%j #SBATCH --nodes=9"
    done = hpctrain("submit", "--name", plain, "--extra", f"comment={plain}", *command)
    assert done.returncode == 0, done.stderr
    # By sbatch, because `submit` refuses names with control characters.
    other_job = cluster.run(
        ["sbatch", "--parsable", "--hold", f"--job-name={HOSTILE}", "--wrap", "true"]
    )
    assert other_job.returncode == 0, other_job.stderr
    status = hpctrain("status")
    assert status.returncode == 0, status.stderr
    assert len(status.stdout.splitlines()) >= 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", status.stdout)
    number = done.stdout.strip()
    assert any(line.startswith(f"{number} ") for line in status.stdout.splitlines())
    assert not Path("x").exists()
    assert hpctrain("cancel", plain).returncode == 0
    cluster.ended(number)
    assert cluster.job(other_job.stdout.strip())["JobState"] == "PENDING"
    assert hpctrain("cancel", HOSTILE).returncode == 0
