"""Jobs on a real Slurm that are stopped, preempted or lose a host resume by themselves.

The job runs survivor.py by sbatch/preemptible.sh on three hosts. The uninterrupted runs to compare
with have as many ranks on this machine.
"""

import importlib.util
import json
import os
import random
import re
import shlex
import sys
import time
from pathlib import Path

import faults
import launches
import processes
import pytest
import slurm_roots
import survivor

from hpctrain import rundir
from hpctrain.rundir import effective_time

pytestmark = pytest.mark.slurm

SIZE = 3
SCRIPT = launches.TOP / "sbatch" / "preemptible.sh"
SURVIVOR = Path(survivor.__file__)
ON_THREE_HOSTS = ("--nodes=3", "--ntasks-per-node=1", "--job-name=survivor")
# The ranks agree on a stop about once a second: slow steps let it happen before the end.
SLOW = ("--pace", "0.4")
# Takes all hosts from the jobs of other partitions.
URGENT = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null")


@pytest.fixture(autouse=True)
def clear_cluster(cluster):
    yield
    cluster.clear()


class Job:
    """A job of survivor.py in the current folder.

    Args:
        cluster: the Slurm.
        number: of the job, with the index of an array task.
        run: directory of the run.
    """

    def __init__(self, cluster, number, run="run"):
        self.cluster, self.number = cluster, number
        self.run = rundir.RunDirectory(run)

    @property
    def facts(self):
        return self.cluster.job(self.number)

    @property
    def log(self):
        return "".join(path.read_text() for path in Path().glob("*.log"))

    def steps(self):
        """Return the number of steps that rank 0 took; repeated ones count again."""
        ledger = self.run.path / "ledger-0.jsonl"
        return len(ledger.read_text().splitlines()) if ledger.exists() else 0

    def begins(self):
        """Return the first step of each start of the run."""
        return faults.begins(self.run.path)

    def until(self, condition, seconds=120.0):
        """Wait until a condition of the job holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{self.facts}\n{self.log}"
            time.sleep(0.05)

    def ended(self, seconds=240.0):
        """Wait for the end of the job; return state, exit code and number of requeues."""
        _, code = self.cluster.ended(self.number, seconds)
        facts = self.facts
        return facts["JobState"], code, int(facts["Restarts"])


@pytest.fixture
def submit(cluster):
    def submit(*options, script=SLOW, launch=("srun", "--kill-on-bad-exit=1"), env=None, **more):
        command = [*launch, launches.PYTHON, SURVIVOR, *faults.OPTIONS, *script]
        done = cluster.run(
            ["sbatch", "--parsable", *ON_THREE_HOSTS, *options, SCRIPT, *command],
            env=launches.on_cluster(cluster, OMP_NUM_THREADS="1", **(env or {})),
        )
        assert done.returncode == 0, done.stderr
        return Job(cluster, done.stdout.strip(), **more)

    return submit


@pytest.fixture
def check_finished(references, record_property):
    """Return a function that checks that a run equals an uninterrupted one.

    It returns the lost seconds, by reason.
    """

    def check(job, options=(), twice=None, held=0.0):
        assert len(job.begins()) == 1 or job.begins()[-1] > 0
        faults.same(job.run.path, references(SIZE, *options), twice)
        assert json.loads(job.run.summary.read_text())["status"] == "done"
        assert not list(Path().rglob(f".launch-{job.number}-*"))
        found = effective_time.measure(job.run)
        both = found.effective_seconds + sum(found.lost_seconds.values())
        assert both == pytest.approx(found.wall_seconds)
        assert 0 < found.share < 1
        for seconds in faults.lost(job.run.path):
            record_property("lost", seconds - held)
            held = 0.0  # only before the first fault
        return found.lost_seconds

    return check


def test_preemption_by_usr2_requeues_and_resumes(submit, check_finished):
    """Send USR2 to a single rank; the job is requeued and resumes."""
    short = ("--epochs", "2")
    job = submit(script=("--pace", "0.25", *short, "--fault=usr2@3:rank1"))
    assert job.ended() == ("COMPLETED", 0, 1), job.log
    lost = check_finished(job, short, twice=0)
    assert len(job.begins()) == 2
    assert (lost["queue"] > 1, lost["redo"], lost["detect"]) == (True, 0, 0)
    # What it has used; the time of a job that was requeued is no advice.
    assert re.search(r"\nused +0\.\d\d host hours: 3 × \d+ s\nmemory +at most 0\.\d\d GB", job.log)
    assert re.search(r"\nenough +--memory \dG --cpus-per-task \d ", job.log)


@pytest.mark.slow
def test_job_cancelled_in_training_stays_cancelled_and_keeps_its_checkpoint(cluster, submit):
    """Cancel a job during training."""
    job = submit()
    job.until(job.run.steps)
    cluster.run(["scancel", job.number], check=True)
    state, _, restarts = job.ended()
    assert (state, restarts) == ("CANCELLED", 0), job.log
    assert job.run.steps()
    assert not list(job.run.checkpoints.glob(".*"))


@pytest.mark.slow
def test_next_job_resumes_a_cancelled_one(cluster, submit, check_finished):
    """Cancel a job during a save, and resume its run by a new job."""
    # Cancelled during a save, which is lost.
    first = submit(script=(*SLOW, "--fault=sleep=30@save7:rank0"))
    first.until(lambda: list(Path("run.faults").glob("*")))
    cluster.run(["scancel", first.number], check=True)
    assert first.ended()[::2] == ("CANCELLED", 0), first.log
    assert first.run.steps() == [5]
    # Its lock may remain, but its job has ended.
    second = submit(script=("--resume",))
    assert second.ended() == ("COMPLETED", 0, 0), second.log
    check_finished(second)
    assert second.begins() == [0, 5]


@pytest.mark.slow
def test_job_cancelled_while_requeued_stays_cancelled(cluster, submit):
    """Cancel a job that was requeued and is pending."""
    job = submit(script=(*SLOW, "--fault=usr2@4"))
    job.until(lambda: job.facts["JobState"] == "PENDING" and job.facts["Restarts"] == "1")
    cluster.run(["scancel", job.number], check=True)
    assert job.ended()[::2] == ("CANCELLED", 1), job.log
    assert job.run.steps()[-1] == json.loads(job.run.summary.read_text())["step"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["USR1", "USR2", "TERM"])
def test_preemption_signals_to_the_step_spare_loader_workers(
    cluster, submit, check_finished, signal
):
    """Send a signal to all processes of the step, loader workers included."""
    workers = ("--workers", "2")
    job = submit(script=(*SLOW, *workers))
    job.until(lambda: job.steps() > 3)
    cluster.run(["scancel", f"--signal={signal}", job.number], check=True)
    assert job.ended() == ("COMPLETED", 0, 1), job.log
    check_finished(job, workers, twice=0)


@pytest.mark.slow
def test_preemption_signal_before_imports_requeues(cluster, submit, check_finished):
    """Send USR2 while the ranks still import."""
    job = submit(script=("--fault=sleep=3@imports",))
    job.until(lambda: len(list(Path("run.faults").glob("*"))) == SIZE)
    cluster.run(["scancel", "--signal=USR2", job.number], check=True)
    assert job.ended() == ("COMPLETED", 0, 1), job.log
    check_finished(job)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["main", "patient"])
def test_preemption_by_a_higher_partition_requeues(cluster, submit, check_finished, partition):
    """Preempt the job by one of a higher partition, without and with a grace time."""
    job = submit(f"--partition={partition}", "--exclusive")
    job.until(lambda: job.steps() > 3)
    urgent = cluster.run(["sbatch", "--parsable", *URGENT, "--wrap", "sleep 2"], check=True)
    assert job.ended() == ("COMPLETED", 0, 1), job.log
    assert cluster.job(urgent.stdout.strip())["JobState"] == "COMPLETED"
    # With a grace time, the ranks save and Slurm waits for them.
    check_finished(job, twice=0 if partition == "patient" else None)


@pytest.mark.slow
def test_preemption_by_time_limit_three_times_requeues(submit, check_finished):
    """Let the job reach its time limit of two minutes three times or more."""
    # Slurm signals up to a minute early: with a limit of one minute, the ranks would only import.
    more = ("--epochs", "9")
    job = submit("--time=2", "--signal=B:USR2@15", script=("--pace", "5", *more))
    ended = job.ended(900)
    assert ended == ("COMPLETED", 0, len(job.begins()) - 1), job.log
    assert len(job.begins()) > 3, job.log
    check_finished(job, more, twice=0)


@pytest.mark.slow
def test_preemption_of_an_array_task_requeues_no_other_task(cluster, submit, check_finished):
    """Send USR2 to one of two tasks of an array."""
    # The script must set the directory, because it has the option --run-dir.
    launch = ("srun", "bash", "-c", 'exec "$@" --run-dir "run-$SLURM_ARRAY_TASK_ID"', "task")
    array = submit("--array=3,5", "--output=%A_%a.log", launch=launch)
    three, five = (Job(cluster, f"{array.number}_{task}", f"run-{task}") for task in (3, 5))
    three.until(lambda: three.steps() > 3)
    cluster.run(["scancel", "--signal=USR2", three.number], check=True)
    assert three.ended() == ("COMPLETED", 0, 1), three.log
    assert five.ended() == ("COMPLETED", 0, 0), five.log
    check_finished(three, twice=0)
    check_finished(five, twice=0)


@pytest.mark.slow
def test_preemption_without_requeue_prints_the_command_that_resumes(
    cluster, submit, check_finished
):
    """Stop a job without the right to requeue, and continue by the sbatch line that it prints."""
    job = submit("--no-requeue", script=(*SLOW, "--run-dir", "run", "--fault=usr2@4:rank2"))
    assert job.ended() == ("FAILED", 75, 0), job.log
    assert job.run.steps()[-1] == json.loads(job.run.summary.read_text())["step"]
    assert f"job {job.number} is not started again: scontrol: " in job.log
    line = re.search(
        r"^  or: +(HPCTRAIN_RUN_DIR=\S+) sbatch SCRIPT --resume ", job.log, re.MULTILINE
    )
    name, path = shlex.split(line[1])[0].split("=")
    second = submit(script=("--resume",), env={name: path})
    assert second.ended() == ("COMPLETED", 0, 0), second.log
    check_finished(second, twice=0)


def run_command(cluster, *options, nodes, run=(), script=(), before=()):
    """Submit a job whose only line is `hpctrain run` of survivor.py."""
    words = [
        *before,
        "hpctrain",
        "run",
        *run,
        SURVIVOR,
        *faults.OPTIONS,
        *script,
        "--run-dir",
        "run",
    ]
    names = (f"--nodes={nodes}", "--job-name=survivor", "--output=%x-%j.log")
    done = cluster.run(
        ["sbatch", "--parsable", "--ntasks-per-node=1", *names, *options],
        input=f"#!/bin/bash\nexec {shlex.join(map(str, words))}\n",
        env=launches.on_cluster(cluster, OMP_NUM_THREADS="1"),
    )
    return Job(cluster, done.stdout.strip())


def hold(job):
    """Wait until a run holds at step 7; return the seconds since this step."""
    job.until(lambda: job.steps() == 7)
    last = json.loads((job.run.path / "ledger-0.jsonl").read_text().splitlines()[-1])
    return time.time() - last["time"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_killed_ranks_cost_seconds_and_no_requeue(cluster, check_finished, lacking, backend):
    """Kill a rank by kill -9, and in the next attempt another one."""
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    options = ("--backend", backend)
    faults_ = ("--fault=hold@7", "--fault=kill@12:rank2")
    job = run_command(cluster, nodes=3, script=(*options, *faults_))
    held = hold(job)
    agents = processes.having("hpctrain.launch.agent")
    training = set(processes.having(str(SURVIVOR)))
    os.kill(min(training & set(processes.having("HPCTRAIN_RANK=1", "environ"))), 9)
    Path("run.release").touch()
    job.until(lambda: len(job.begins()) == 2)
    assert processes.having("hpctrain.launch.agent") == agents  # the same agents as before
    assert job.ended() == ("COMPLETED", 0, 0), job.log
    assert "attempt 2: 3 of 3 hosts; from step 5 on" in job.log
    assert "attempt 3: 3 of 3 hosts; from step 10 on" in job.log
    lost = check_finished(job, options, held=held)
    assert (lost["queue"], lost["detect"] > held - 2) == (0, True)
    assert not processes.having(os.getcwd(), "environ")


@pytest.mark.slow
@pytest.mark.parametrize("way", [(), ("--direct",)], ids=["agents", "direct"])
def test_flipped_bit_names_its_host_and_costs_no_requeue(cluster, check_finished, way):
    """Flip a bit of a weight on one rank."""
    script = ("--check-replicas-every", "2", "--fault=flip@11:rank2")
    job = run_command(cluster, nodes=3, run=way, script=script)
    assert job.ended() == ("COMPLETED", 0, 0), job.log
    conclusion = "rank 2 on node3 failed first, "
    assert job.log.count(conclusion) == 1
    error = job.log.partition(conclusion)[2].partition("\n")[0]
    assert "after step 12 the weights of rank 2 on node3 differ from most ranks: first in" in error
    assert "attempt 2: 3 of 3 hosts; from step 10 on" in job.log
    check_finished(job)
    assert len(job.begins()) == 2
    fault = json.loads(Path("runs/.hosts.jsonl").read_text())
    assert (fault["host"], fault["kind"]) == ("node3", "unlike-weights")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["crash", "power_off", "cut"])
@pytest.mark.parametrize("host", ["node1", "node3"])
def test_lost_host_requeues_without_it(cluster, submit, check_finished, loss, host):
    """Crash a host, power it off, or cut its network."""
    job = submit(script=("--pace", "0.8"))
    job.until(lambda: job.steps() > 6)
    assert job.facts["NodeList"] == "node[1-3]"
    getattr(cluster, loss)(host)
    try:
        assert job.ended() == ("COMPLETED", 0, 1), job.log
        check_finished(job)
        last = json.loads(job.run.starts.read_text().splitlines()[-1])
        assert host not in last["world"]["hosts"]
    finally:
        if loss == "cut":
            cluster.mend(host)
        else:
            cluster.power_on(host)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["crash", "power_off", "cut", "mute"])
def test_spare_host_replaces_a_lost_one(cluster, check_finished, loss):
    """Lose a host, and continue on the fourth host of the job, without a requeue."""
    options = ("--pace", "0.25")
    script = (*options, "--fault=hold@7")
    job = run_command(cluster, "--no-kill", nodes=4, run=("--spares", 1), script=script)
    held = hold(job)
    try:
        getattr(cluster, loss)("node3")
        Path("run.release").touch()
        assert job.ended() == ("COMPLETED", 0, 0), job.log
    finally:
        {"cut": cluster.mend, "mute": cluster.unmute}.get(loss, cluster.power_on)("node3")
    assert "attempt 2: 3 of 4 hosts, without node3" in job.log
    lost = check_finished(job, options, held=held)
    # The end of a process shows at once; that of a network does not.
    found = lost["detect"] + lost["stop"] - held
    assert (lost["queue"], found > 7) == (0, loss in {"cut", "mute"})
    last = json.loads(job.run.starts.read_text().splitlines()[-1])
    assert last["world"]["hosts"] == ["node1", "node2", "node4"]


@pytest.mark.slow
def test_job_without_a_spare_is_requeued_without_the_lost_host(cluster, check_finished):
    """Lose a host; the next start of the job leaves it out, though Slurm does not know it yet."""
    options = ("--pace", "0.8")
    job = run_command(cluster, "--requeue", "--open-mode=append", nodes=3, script=options)
    job.until(lambda: job.steps() > 6)
    cluster.cut("node3")
    try:
        job.until(lambda: "the next start leaves out node3" in job.log)
        job.until(lambda: job.facts["ExcNodeList"] == "node3")
        assert job.ended() == ("COMPLETED", 0, 1), job.log
    finally:
        cluster.mend("node3")
    check_finished(job, options)
    last = json.loads(job.run.starts.read_text().splitlines()[-1])
    assert last["world"]["hosts"] == ["node1", "node2", "node4"]
    fault = json.loads(Path("runs/.hosts.jsonl").read_text())
    assert (fault["host"], fault["kind"], fault["job"]) == ("node3", "lost", job.number)


@pytest.mark.slow
def test_host_that_fails_its_check_is_replaced(cluster, tmp_path, check_finished):
    """Let one host ask for more memory than there is."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sitecustomize.py").write_text(
        "import platform\n"
        "if platform.node() == 'node2':\n"
        "    from hpctrain.launch import preflight\n"
        "    preflight._LEAST_MEMORY = 1 << 60\n"
    )
    before = ("env", f"PYTHONPATH={tmp_path / 'bin'}")
    job = run_command(cluster, "--no-kill", nodes=4, run=("--spares", 1), before=before)
    assert job.ended() == ("COMPLETED", 0, 0), job.log
    assert "HT219" in job.log
    assert re.search(r"node2: \d+ MiB of memory are free", job.log)
    check_finished(job)
    start = json.loads(job.run.starts.read_text())
    assert start["world"]["hosts"] == ["node1", "node3", "node4"]
    fault = json.loads(Path("runs/.hosts.jsonl").read_text())
    assert (fault["host"], fault["kind"]) == ("node2", "preflight")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_killed_at_random(cluster, check_finished, lacking, backend):
    """Kill random ranks (KILL, SEGV, ABRT) as long as the job runs."""
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    epochs = os.environ.get("TEST_CHAOS_EPOCHS", "30")  # of two seconds
    options = ("--backend", backend, "--epochs", epochs)
    # At a mean distance of 15 s, three kills in a row may leave no time for a step.
    run = ("--max-attempts", 10)
    job = run_command(cluster, nodes=3, run=run, script=(*options, "--pace", "0.2"))
    job.until(job.steps)

    def chaos(*words):
        command = [launches.PYTHON, launches.CHAOS, job.number, *words]
        done = cluster.run(command, env=launches.on_cluster(cluster), timeout=7200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    apart, text = os.environ.get("TEST_CHAOS_APART"), ""
    if apart is None:
        text = chaos("--count", "1000", "--mean", "15", "--seed", "1")
    # Else each fault comes seconds after the first new step that follows the one before it.
    while apart is not None and job.facts["JobState"] == "RUNNING":
        starts = len(job.begins())
        time.sleep(float(apart))
        text += chaos("--count", "1", "--mean", "0.1", "--seed", str(starts))
        job.until(
            lambda starts=starts: len(job.begins()) > starts or job.facts["JobState"] != "RUNNING"
        )
    state, code, restarts = job.ended()
    # The last kill may meet a rank that leaves after the end of the run.
    late = code > 128 and json.loads(job.run.summary.read_text())["status"] == "done"
    assert late or (state, code, restarts) == ("COMPLETED", 0, 0), job.log
    sys.stdout.write(f"{text}\n{job.run.summary.read_text()}\n{faults.lost(job.run.path)}\n")
    assert len(job.begins()) > 1, text
    check_finished(job, options)
    assert not processes.having(os.getcwd(), "environ")


MIXED = ("kill", "segv", "stop", "step", "usr2", "requeue", "cut", "crash")


@pytest.mark.slow
def test_mixed_faults(cluster, check_finished):
    """Kill and stop ranks, end their step, preempt the job, cut and crash hosts, in random order.

    The clocks of the hosts are those of this machine, so they cannot jump.
    """
    count, draw = int(os.environ.get("TEST_CHAOS_FAULTS", "3")), random.Random(7)
    kinds = [kind for _ in range(count) for kind in draw.sample(MIXED, len(MIXED))][:count]
    options = ("--epochs", str(5 + 5 * count), "--checkpoint-every", "10")
    more = ("--no-kill", "--requeue", "--open-mode=append")
    script = (*options, "--pace", "0.2")
    before = ("env", "HPCTRAIN_LEAST_TIMEOUT=10")  # for the ranks that are stopped
    job = run_command(cluster, *more, nodes=4, run=("--spares", 1), script=script, before=before)
    job.until(lambda: job.steps() > 10)

    def hurt(number, kind):
        if kind in {"cut", "crash"}:
            batch = job.facts["BatchHost"]
            used = json.loads(job.run.starts.read_text().splitlines()[-1])["world"]["hosts"]
            host = draw.choice([host for host in used if host != batch])
            getattr(cluster, kind)(host)
            return host
        words = [job.number, "--count", "1", "--kinds", kind, "--mean", "1"]
        command = [launches.PYTHON, launches.CHAOS, *words, "--seed", str(number)]
        done = cluster.run(command, env=launches.on_cluster(cluster), timeout=700)
        assert done.returncode == 0, done.stderr
        return ""

    def furthest():
        return max(line["step"] for line in job.run.lines(job.run.path / "ledger-0.jsonl"))

    def saved():
        return max(job.run.steps(), default=0)

    def survives(number, kind):
        starts, step, since, checkpoint = len(job.begins()), furthest(), time.time(), saved()
        lost = hurt(number, kind)

        def mend():
            nonlocal lost
            if lost:
                (cluster.mend if kind == "cut" else cluster.power_on)(lost)
            lost = ""

        def goes_on():
            # Hosts that Slurm has taken out of the allocation do not come back into it, so a job
            # that has used up its spare waits for all four.
            if lost and time.time() - since > 20 and job.facts["JobState"] == "PENDING":
                mend()
            return len(job.begins()) > starts and furthest() > step

        text = f"{kind} {lost}".strip()
        try:
            job.until(goes_on, 400)
        finally:
            mend()
        sys.stdout.write(f"{text}: {time.time() - since:.1f} s\n")
        sys.stdout.flush()
        # Three starts in a row without a new checkpoint are given up.
        job.until(lambda: saved() > checkpoint)

    for number, kind in enumerate(kinds):
        survives(number, kind)
    assert job.ended(900)[:2] == ("COMPLETED", 0), job.log
    sys.stdout.write(job.run.summary.read_text())
    check_finished(job, options)
    left = processes.lines(os.getcwd(), "environ").values()
    # The daemons that `power_on` has started have the environment of this test.
    assert not [line for line in left if line.rstrip() != "slurmd"]


HETEROGENEOUS = """
name = "survivor"
nodes = 1
tasks_per_node = 1
run_dir = "run"
time = "10m"
[[part]]
nodes = 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize(
    ("fault", "restarts"), [("kill@6:rank2", 0), ("usr2@6:rank1", 1)], ids=["kill", "preemption"]
)
def test_heterogeneous_job_is_one_world_and_survives(
    cluster, check_finished, backend, fault, restarts
):
    """Train on all parts of a heterogeneous job; kill a rank, or preempt the job."""
    options = ("--backend", backend, "--epochs", "2")
    script = [*faults.OPTIONS, *options, "--pace", "0.25", f"--fault={fault}"]
    Path("job.toml").write_text(HETEROGENEOUS)
    command = ["hpctrain", "submit", "job.toml", "--", launches.PYTHON, SURVIVOR, *script]
    env = launches.on_cluster(cluster, OMP_NUM_THREADS="1")
    done = cluster.run([*map(str, command)], env=env)
    assert done.returncode == 0, done.stderr
    job = Job(cluster, done.stdout.strip())
    job.until(job.run.steps)
    shown = cluster.run(["hpctrain", "status", job.number], env=env).stdout
    assert "3 node1,node[2-3]" in shown
    ended = job.ended()
    log = "".join(path.read_text() for path in Path("runs").glob("*.log"))
    assert ended == ("COMPLETED", 0, restarts), log
    assert len(job.begins()) == 2
    check_finished(job, options)


@pytest.fixture
def containers(cluster, lacking):
    """Return what `hpctrain run` gets before and after it for ranks in containers of Apptainer.

    The image is a folder with a Debian that has no Python; that of the tests is bound into it.
    """
    if cluster.version != "newest":
        lacking("apptainer", "the hosts have none")
    settings = {
        "APPTAINER_USERNS": "1",  # root lacks a right here that it has on a real host
        "APPTAINER_BIND": f"{launches.TOP},{sys.prefix},{sys.base_prefix}",
        "APPTAINERENV_PREPEND_PATH": str(launches.BIN),
    }
    before = ("env", *(f"{name}={value}" for name, value in settings.items()))
    return before, ("--container", str(slurm_roots.root("24.11")))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize(
    ("fault", "restarts"), [("kill@6:rank1", 0), ("usr2@6:rank1", 1)], ids=["kill", "preemption"]
)
def test_ranks_in_containers_survive(cluster, check_finished, containers, backend, fault, restarts):
    """Train in containers of a real Apptainer; kill a rank, or preempt the job."""
    before, run = containers
    options = ("--backend", backend, "--epochs", "2")
    script = (*options, "--pace", "0.25", f"--fault={fault}")
    more = ("--requeue", "--open-mode=append")
    job = run_command(cluster, *more, nodes=3, run=run, script=script, before=before)
    assert job.ended() == ("COMPLETED", 0, restarts), job.log
    check_finished(job, options)
    assert len(job.begins()) == 2
    assert not processes.having(os.getcwd(), "environ")


@pytest.mark.slow
def test_container_without_the_variables_is_refused(cluster, containers):
    """Let Apptainer drop the environment."""
    before, run = containers
    before = (*before, "APPTAINER_CLEANENV=1")
    job = run_command(cluster, nodes=3, run=run, before=before)
    assert job.ended()[:2] == ("FAILED", 2), job.log
    assert "HT108" in job.log
    assert "without --cleanenv" in job.log


SUBMIT = """
import sys
import submitit
import survivor
executor = submitit.AutoExecutor(folder="log", cluster="slurm")
# submitit takes a job of ten minutes or less for one whose time is over.
executor.update_parameters(nodes=3, tasks_per_node=1, timeout_min=60)
print(executor.submit(survivor.main, sys.argv[1:]).job_id)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["USR2", "TERM"])
def test_preemption_of_a_submitit_job_is_requeued_by_submitit(
    cluster, check_finished, lacking, signal
):
    """Send a signal to a job of submitit."""
    if importlib.util.find_spec("submitit") is None:
        lacking("submitit", "pip install submitit")
    tests = str(SURVIVOR.parent)
    env = {**cluster.environ(), "OMP_NUM_THREADS": "1", "PYTHONPATH": tests}
    command = [launches.PYTHON, "-c", SUBMIT, *faults.OPTIONS, *SLOW]
    done = cluster.run(command, env=env)
    assert done.returncode == 0, done.stderr
    job = Job(cluster, done.stdout.strip())
    job.until(lambda: job.steps() > 3)
    cluster.run(["scancel", f"--signal={signal}", job.number], check=True)
    ended = job.ended()
    logs = "".join(path.read_text() for path in Path("log").glob("*_log.*"))
    assert ended == ("COMPLETED", 0, 1), logs
    check_finished(job, twice=0)
    assert logs.count("Requeued job") == 1


BLOCK = re.compile(r"```bash\n(#!/bin/bash\n.*?)```", re.DOTALL)


@pytest.mark.slow
def test_preemption_by_the_torchrun_script_of_the_docs_requeues(cluster, check_finished):
    """Send USR2 to a job of the torchrun script in docs/preemption.md."""
    text = (launches.TOP / "docs" / "preemption.md").read_text()
    block = BLOCK.search(text)[1]
    script = shlex.join(map(str, (SURVIVOR, *faults.OPTIONS, *SLOW)))
    Path("job.sh").write_text(block.replace(" train.py", f" {script}"))
    env = launches.on_cluster(cluster, OMP_NUM_THREADS="1")
    done = cluster.run(["sbatch", "--parsable", "--nodes=3", "job.sh"], env=env)
    assert done.returncode == 0, done.stderr
    job = Job(cluster, done.stdout.strip())
    job.until(lambda: job.steps() > 3)
    cluster.run(["scancel", "--batch", "--signal=USR2", job.number], check=True)
    assert job.ended() == ("COMPLETED", 0, 1), job.log
    check_finished(job, twice=0)
