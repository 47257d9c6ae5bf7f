"""Rendered scripts on a real Slurm of four hosts."""

import contextlib
import itertools
import os
import random
import re
import tarfile
from pathlib import Path

import launches
import pytest

from hpctrain.jobs import job_files
from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec

SBATCH = launches.TOP / "sbatch"
NAMES = sorted(path.stem for path in SBATCH.glob("*.toml"))


def submit(cluster, script, *options, **more):
    """Pass a script to sbatch by standard input, as `hpctrain submit` does; return its job."""
    done = cluster.run(
        ["sbatch", "--parsable", *options], input=script, env=launches.on_cluster(cluster), **more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run(cluster, spec, *options, **more):
    """Run a job to its end; return its number, exit code and log."""
    job, code = cluster.ended(submit(cluster, render(spec), *options, **more))
    return job, code, "".join(path.read_text() for path in sorted(Path().glob(f"*{job}*.log")))


@pytest.mark.slow
def test_job_submitted_inside_a_job_has_its_own_id_and_run(cluster, tmp_path, monkeypatch):
    """Submit from a rank of a requeued array task; sbatch passes its variables on."""
    monkeypatch.chdir(tmp_path)
    outer = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    show = 'echo "rank $RANK of $WORLD_SIZE in $HPCTRAIN_RUN_DIR"'
    inner = JobSpec(name="inner", command=["sh", "-c", show], max_restarts=1, nodes=3)
    Path("inner.sh").write_text(render(inner))
    submits = "export {}; [ $RANK = 1 ] || exit 0; sbatch --parsable inner.sh >number"
    exports = " ".join(f"{name}={value}" for name, value in outer.items())
    spec = JobSpec(name="outer", command=["sh", "-c", submits.format(exports)], nodes=2)
    assert run(cluster, spec)[1] == 0
    job, code = cluster.ended(Path("number").read_text().strip())
    log = Path(f"inner-{job}.log").read_text()
    assert code == 0, log
    assert re.findall(r"rank \d of 3 in (.*)", log) == [f"{tmp_path}/runs/inner-{job}"] * 3
    assert not list(Path("runs").rglob("exit-status*"))
    spec = JobSpec(name="task", command=["sh", "-c", 'echo "$HPCTRAIN_RUN_DIR"'], array="0")
    job, code, log = run(cluster, spec)
    assert code == 0
    assert log == f"{tmp_path}/runs/task-{job}_0\n"


# --- what sbatch accepts

LETTERS = "abz09 \"'\\`$(){}[]<>|&;:,.=%#@!?*~^+-_/é日本€𝛼"


def texts(count, without=""):
    """Return random texts, and texts with special characters."""
    chance = random.Random(1)
    letters = [one for one in LETTERS if one not in without]
    fixed = ["a b", "a  b", "#a", "a # b", "'", '"', "\\", "\\\\", '\\"', "a\\", "$(id)", "%j %x"]
    made = ("".join(chance.choices(letters, k=chance.randrange(1, 40))) for _ in itertools.count())
    return list(itertools.islice((one for one in made if one.strip() == one), count)) + fixed


@pytest.mark.slow
def test_sbatch_takes_hostile_names_and_comments(cluster):
    names, comments = texts(20, without="/"), texts(20)
    longest = "é" * 500
    for name, comment in zip([*names, "x" * 200], [*comments, longest], strict=True):
        spec = JobSpec(name=name, extra={"comment": comment}, command="true", output="/dev/null")
        job = submit(cluster, render(spec), "--hold")
        job_text = cluster.run(["scontrol", "show", "job", job], check=True).stdout
        cluster.run(["scancel", job], check=True)
        # scontrol ends the line with a blank before 26.05.
        assert re.search(r"JobName=(.*)", job_text)[1] == name
        assert re.search(r"^   Comment=(.*?) ?$", job_text, re.MULTILINE)[1] == comment


@pytest.mark.parametrize("name", NAMES)
def test_sbatch_accepts_shipped_scripts(cluster, name):
    small = ["--cpus-per-task=2"]  # the hosts of the test have eight CPUs
    script = str(SBATCH / f"{name}.sh")
    done = cluster.run(["sbatch", "--hold", "--parsable", *small, script])
    assert done.returncode == 0, done.stderr
    facts = cluster.job(done.stdout.strip())
    cluster.run(["scancel", done.stdout.strip()], check=True)
    spec = JobSpec(**job_files.read(SBATCH / f"{name}.toml"))
    assert facts["JobName"] == spec.title
    assert facts["NumNodes"].partition("-")[0] == str(spec.nodes)
    assert facts["Requeue"] == "1"
    gpus = re.search(r"gres[:/]gpu:(\d+)", str(facts))  # "/" since Slurm 24.11
    assert int(gpus[1] if gpus else 0) == spec.gpus


# --- what it runs


@pytest.mark.parametrize("launcher", ["hpctrain", pytest.param("srun", marks=pytest.mark.slow)])
def test_hostile_words_reach_the_ranks(cluster, launcher):
    words = ["", " ", "it's", '"', "\\", "$(touch canary)", "`touch canary`", "a\nb", "*", "\r\n"]
    rank = "${RANK:-$SLURM_PROCID}"
    command = f'printf "%s\\0" "{rank}" "$A" "$@" >out-{rank}'
    spec = JobSpec(
        name="arrive",
        command=["bash", "-c", command, "x", *words],
        environment={"A": "a\n'$(touch canary)',\udcff"},
        nodes=2,
        tasks_per_node=2,
        launcher=launcher,
    )
    _, code, log = run(cluster, spec)
    assert code == 0, log
    for rank in range(4):
        expected = [str(rank), "a\n'$(touch canary)',\udcff", *words]
        assert [os.fsdecode(one) for one in Path(f"out-{rank}").read_bytes().split(b"\0")] == [
            *expected,
            "",
        ]
    assert not Path("canary").exists()


@pytest.mark.slow
def test_sbatch_command_line_options_win(cluster):
    spec = JobSpec(name="hold", command="bash -c", nodes=1, tasks_per_node=1)
    line = 'echo "$RANK of $WORLD_SIZE has $CUDA_VISIBLE_DEVICES"'
    Path("hold.sh").write_text(render(spec))
    options = ["--nodes=2", "--ntasks-per-node=3", "--gpus-per-node=3"]
    job, code = cluster.batch([*options, "hold.sh", line], env=launches.on_cluster(cluster))
    log = Path(f"hold-{job}.log").read_text()
    assert code == 0, log
    # Each rank sees all GPUs of its host, as NCCL needs.
    ranks = sorted(re.findall(r"^\d: (\d) of 6 has 0,1,2$", log, re.MULTILINE))
    assert ranks == [str(rank) for rank in range(6)], log


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["hpctrain", "srun"])
def test_ranks_of_a_job_without_the_variables_of_its_submission_get_those_of_the_script(
    cluster, launcher
):
    """Slurm also keeps the variables from srun's tasks after sbatch --export=NONE."""
    spec = JobSpec(
        name="none",
        command=[
            "bash",
            "-c",
            'echo "got ${RANK:-$SLURM_PROCID} $A $OUTSIDE in $HPCTRAIN_RUN_DIR"',
        ],
        environment={"A": "own"},
        setup=(f"export PATH={launches.BIN}:$PATH PYTHONPATH={launches.TOP}",),
        launcher=launcher,
        nodes=3,
    )
    env = launches.on_cluster(cluster, OUTSIDE="of the login host")
    done = cluster.run(
        ["sbatch", "--parsable", "--export=NONE"], input=render(spec), env=env, check=True
    )
    job, code = cluster.ended(done.stdout.strip())
    log = Path(f"none-{job}.log").read_text()
    assert code == 0, log
    lines = re.findall(r"got \d .*", log)
    run = f"{Path.cwd()}/runs/none-{job}"
    assert sorted(lines) == [f"got {rank} own  in {run}" for rank in range(3)], log


CORES = 'echo "$RANK of $WORLD_SIZE: $OMP_NUM_THREADS of $SLURM_CPUS_ON_NODE"'


def test_ranks_without_cpus_per_task_get_the_cores_that_the_job_has(cluster, lacking):
    """Slurm counts one CPU for each task without the option, and srun would bind to it."""
    if len(os.sched_getaffinity(0)) < 2:
        lacking("two-cores", "one core is the same for each number of CPUs")
    spec = JobSpec(name="cores", command=["bash", "-c", CORES], extra={"exclusive": True}, nodes=2)
    assert "cpus-per-task" not in render(spec)
    _, code, log = run(cluster, spec)
    assert code == 0, log
    cores = len(os.sched_getaffinity(0))
    found = re.findall(r"^\d: (\d) of 2: (\d+) of", log, re.MULTILINE)
    assert sorted(found) == [("0", str(cores)), ("1", str(cores))], log


@contextlib.contextmanager
def own_disks(cluster, path):
    """Mount a separate file system at a path of each host."""
    path.mkdir()
    try:
        for host in cluster.hosts:
            mount = ["mount", "-t", "tmpfs", "tmpfs", str(path)]
            assert cluster.run(mount, host).returncode == 0
        yield path
    finally:
        for host in cluster.hosts:
            cluster.run(["umount", str(path)], host)


@pytest.mark.slow
def test_staging_copies_code_and_environment_to_each_host(cluster, tmp_path):
    code, tools = tmp_path / "code", tmp_path / "tools" / "bin"
    for folder in (code / "runs", tools):
        folder.mkdir(parents=True)
    (code / "train.sh").write_text("pwd; hostname; ls; echo $HPCTRAIN_RUN_DIR; exec answer\n")
    (tools / "answer").write_text("#!/bin/sh\necho $0\n")
    (tools / "answer").chmod(0o755)
    with tarfile.open(tmp_path / "tools.tar.gz", "w:gz") as archive:
        archive.add(tools.parent, ".")
    with own_disks(cluster, tmp_path / "disk") as disk:
        spec = JobSpec(
            name="stage",
            command="bash train.sh",
            nodes=3,
            stage_code="code",
            stage_environment="tools.tar.gz",
            setup=(f"export TMPDIR={disk} LOGNAME=ada",),
            finish=('echo "finished $HPCTRAIN_RUN_DIR"',),
        )
        job, exit_code, log = run(cluster, spec)
        assert exit_code == 0, log
        scratch = f"{disk}/hpctrain-ada-{job}-00"
        lines = [re.sub(r"^\d: ", "", line) for line in log.splitlines()]
        assert set(lines) >= set(cluster.hosts[:3])
        for line in (
            *(f"{scratch}/code", f"{scratch}/environment/bin/answer", "train.sh"),
            f"{tmp_path}/runs/stage-{job}",
        ):
            assert lines.count(line) == 3, log
        assert "runs" not in lines
        assert lines[-1] == f"finished {tmp_path}/runs/stage-{job}"
        for host in cluster.hosts:
            assert not cluster.run(["ls", str(disk)], host).stdout


STOPS = """
[ -d $HPCTRAIN_RUN_DIR/checkpoints ] && again=yes
mkdir -p $HPCTRAIN_RUN_DIR/checkpoints/step-00000040
echo "run $HPCTRAIN_RUN_DIR $*"
[ "$again" ] || exit 75
"""


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [(), ({"lr": 1}, {"lr": 2})], ids=["job", "array task"])
def test_stopped_job_continues_by_the_printed_sbatch_line(cluster, sweep):
    spec = JobSpec(name="on", command=["bash", "-c", STOPS, "x"], requeue=False, sweep=sweep)
    task, setting = ("_1", " --lr 2") if sweep else ("", "")
    job = submit(cluster, render(spec))
    assert cluster.ended(f"{job}{task}")[1] == 75
    log = Path(f"on-{job}{task}.log").read_text()
    assert "is not started again: scontrol: " in log
    Path("my script.sh").write_text(render(spec))
    line = re.search(r"^  or: +(HPCTRAIN_RUN_DIR=.*) \(if", log, re.MULTILINE)[1]
    line = line.replace(" SCRIPT ", " 'my script.sh' ")
    second = cluster.run(["bash", "-c", line], env=launches.on_cluster(cluster)).stdout.split()[-1]
    assert cluster.ended(f"{second}{task}")[1] == 0
    log = Path(f"on-{second}{task}.log").read_text()
    assert log == f"run {Path.cwd()}/runs/on-{job}{task} --resume{setting}\n"


@pytest.mark.slow
def test_max_restarts_counts_each_array_task(cluster):
    """Include the last task, whose job id equals that of the array."""
    command = ["bash", "-c", "echo RUN-$SLURM_ARRAY_TASK_ID; exit 75"]
    spec = JobSpec(name="three", command=command, max_restarts=1, array="0-2")
    job = submit(cluster, render(spec))
    for index in range(3):
        assert cluster.ended(f"{job}_{index}")[1] == 76
        assert cluster.job(f"{job}_{index}")["Restarts"] == "1"
        log = Path(f"three-{job}_{index}.log").read_text()
        assert "it was restarted 1 times, and the limit is 1" in log
        assert log.count("RUN-") == 2
    assert not list(Path("runs").rglob(".attempts*"))


TRAIN = ("--data", "digits", "--epochs", "1", "--global-batch", "64")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep", "preemptible"])
def test_shipped_scripts_train(cluster, tmp_path, name):
    launches.checkout(tmp_path)
    arguments = [f"sbatch/{name}.sh", *TRAIN]
    if name == "preemptible":
        srun = ["srun", "--kill-on-bad-exit=1", "python", "examples/mnist.py", *TRAIN]
        arguments = ["--nodes=2", "sbatch/preemptible.sh", *srun]
    done = cluster.run(
        ["sbatch", "--parsable", "--cpus-per-task=1", *arguments], env=launches.on_cluster(cluster)
    )
    job = done.stdout.strip()
    tasks = [f"{job}_{index}" for index in range(6)] if name == "sweep" else [job]
    for task in tasks:
        _, code = cluster.ended(task, 400)
        log = Path(f"{name}-{task}.log").read_text()
        assert code == 0, log
        assert '"status": "done"' in Path("runs", f"{name}-{task}", "summary.json").read_text()


@pytest.mark.slow
def test_environment_modules_are_loaded(cluster, tmp_path, lacking):
    if not Path("/usr/share/modules/init/bash").exists():
        lacking("modules", "apt-get install environment-modules")
    (tmp_path / "modulefiles").mkdir()
    (tmp_path / "modulefiles" / "good").write_text("#%Module\nsetenv GOOD yes\n")
    (tmp_path / "site.sh").write_text(f"export MODULEPATH={tmp_path}/modulefiles\n")
    command = ["bash", "-c", 'echo "good: $GOOD"']
    for modules, expected in ((("good",), 0), (("good", "it's absent"), 2)):
        spec = JobSpec(name="modules", command=command, modules=modules)
        script = render(spec).replace("set -e\n", f"HPCTRAIN_SITE={tmp_path}/site.sh\nset -e\n", 1)
        job, code = cluster.ended(submit(cluster, script))
        log = Path(f"modules-{job}.log").read_text()
        assert code == expected, log
        assert ("good: yes" in log) == (expected == 0)
        assert ("ended before hpctrain run, code 2" in log) == (expected == 2)


@pytest.mark.slow
def test_rank_that_fails_ends_the_job_with_its_code(cluster):
    fail = "[ $RANK = 1 ] && exit 3; sleep 300"
    job, code, log = run(cluster, JobSpec(name="fails", command=["bash", "-c", fail], nodes=2))
    assert code == 3, log
    assert "rank 1 on node2 failed first" in log
    assert cluster.job(job)["Restarts"] == "0"
