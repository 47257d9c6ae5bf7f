"""Rendered scripts on a real Slurm of four hosts."""

import contextlib
import importlib.util
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
    """Submit with the variables of a requeued array task, which sbatch passes on."""
    monkeypatch.chdir(tmp_path)
    outer = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    spec = JobSpec(name="inner", command=["sh", "-c", 'echo "$HPCTRAIN_RUN_DIR"'], max_restarts=1)
    script = render(spec)
    env = launches.on_cluster(cluster, HPCTRAIN_STOP_FILE="/x", HPCTRAIN_RUN_DIR="/x", **outer)
    done = cluster.run(["sbatch", "--parsable"], input=script, env=env)
    job, code = cluster.ended(done.stdout.strip())
    log = Path(f"inner-{job}.log").read_text()
    assert code == 0
    assert f"job {job}, start 0, on node1: " in log
    assert f"{tmp_path}/runs/inner-{job}\n" in log
    one = run(cluster, JobSpec(name="task", command="true", sweep={"lr": [1]}))
    assert f"job {one[0]}_0, start 0, on " in one[2]


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
        spec = JobSpec(name=name, comment=comment, command="true", output="/dev/null")
        job = submit(cluster, render(spec), "--hold")
        job_text = cluster.run(["scontrol", "show", "job", job], check=True).stdout
        cluster.run(["scancel", job], check=True)
        # scontrol ends the line with a blank.
        assert re.search(r"JobName=(.*)", job_text)[1] == name
        assert re.search(r"^   Comment=(.*) $", job_text, re.MULTILINE)[1] == comment


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
    gpus = re.search(r"gres:gpu:(\d+)", str(facts))
    assert int(gpus[1] if gpus else 0) == spec.gpus


# --- what it runs


def test_hostile_words_reach_ranks_of_srun(cluster):
    words = ["", " ", "it's", '"', "\\", "$(touch canary)", "`touch canary`", "a\nb", "*", "\r\n"]
    command = 'printf "%s\\0" "$SLURM_PROCID" "$A" "$@" >out-$SLURM_PROCID'
    spec = JobSpec(
        name="arrive",
        command=["bash", "-c", command, "x", *words],
        environment={"A": "a\n'$(touch canary)',\udcff"},
        nodes=2,
        tasks_per_node=2,
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
    line = 'echo "$SLURM_PROCID of $SLURM_NTASKS has $CUDA_VISIBLE_DEVICES"'
    Path("hold.sh").write_text(render(spec))
    options = ["--nodes=2", "--ntasks-per-node=3", "--gpus-per-node=3"]
    job, code = cluster.batch([*options, "hold.sh", line], env=launches.on_cluster(cluster))
    log = Path(f"hold-{job}.log").read_text()
    assert code == 0, log
    # Each rank sees all GPUs of its host, as NCCL needs.
    ranks = sorted(re.findall(r"^(\d) of 6 has 0,1,2$", log, re.MULTILINE))
    assert ranks == [str(rank) for rank in range(6)], log


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
            setup=(f"export TMPDIR={disk} USER=ada",),
        )
        job, exit_code, log = run(cluster, spec)
        assert exit_code == 0, log
        scratch = f"{disk}/hpctrain-ada-{job}-0"
        lines = log.splitlines()[1:]
        assert set(lines) >= set(cluster.hosts[:3])
        for line in (
            *(f"{scratch}/code", f"{scratch}/environment/bin/answer", "train.sh"),
            f"{tmp_path}/runs/stage-{job}",
        ):
            assert lines.count(line) == 3, log
        assert "runs" not in lines
        for host in cluster.hosts:
            assert not cluster.run(["ls", str(disk)], host).stdout


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [(), ({"lr": 1}, {"lr": 2})], ids=["job", "array task"])
def test_stopped_job_resumes_by_the_printed_sbatch_line(cluster, sweep):
    stops_first = 'echo "run $HPCTRAIN_RUN_DIR $*"; [ "${*: -1}" = --resume ] || exit 75'
    command = ["bash", "-c", stops_first, "x"]
    spec = JobSpec(name="on", command=command, requeue=False, sweep=sweep)
    task, setting = ("_1", " --lr 2") if sweep else ("", "")
    job = submit(cluster, render(spec))
    assert cluster.ended(f"{job}{task}")[1] == 75
    line = Path(f"on-{job}{task}.log").read_text().splitlines()[-1]
    second = cluster.run(["bash", "-c", line], env=launches.on_cluster(cluster)).stdout.split()[-1]
    assert cluster.ended(f"{second}{task}")[1] == 0
    log = Path(f"on-{second}{task}.log").read_text()
    assert f"\nrun {Path.cwd()}/runs/on-{job}{task}{setting} --resume\n" in log


@pytest.mark.slow
def test_max_restarts_counts_each_array_task(cluster):
    """Include the last task, whose job id equals that of the array."""
    spec = JobSpec(name="three", command=["bash", "-c", "exit 75"], max_restarts=1, array="0-2")
    job = submit(cluster, render(spec))
    for index in range(3):
        assert cluster.ended(f"{job}_{index}")[1] == 76
        assert cluster.job(f"{job}_{index}")["Restarts"] == "1"
        log = Path(f"three-{job}_{index}.log").read_text()
        assert "it was restarted 1 times, and the limit is 1" in log
        assert f"job {job}_{index}, start 1, on " in log
        assert "start 2" not in log
    assert not list(Path("runs").glob(".*")), "stop file or exit status file left"


TRAIN = ("--data", "digits", "--epochs", "1", "--global-batch", "64")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchrun", "sweep", "preemptible"])
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
    if name == "torchrun":
        text = Path("runs", f"{name}-{job}", "run.json").read_text()
        assert re.search(r'"world_size": 4\b', text)
        assert '"launcher": "torchrun"' in text


@pytest.mark.slow
def test_horovodrun_script_starts_ranks_over_ssh(cluster, lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    if not (cluster.ssh_folder / "ssh").exists():
        lacking("ssh", "apt-get install openssh-server")
    hostile = "it's $(touch canary)\\"
    line = "import os, sys; print(os.environ['HOROVOD_RANK'], os.environ['A'] == sys.argv[1])"
    spec = JobSpec(
        name="ssh", launcher="horovodrun", nodes=2, tasks_per_node=2, environment={"A": hostile},
        command=["python", "-c", line, hostile],
    )  # fmt: skip
    job = submit(
        cluster, render(spec).replace("set -euo pipefail", f"PATH={cluster.ssh_folder}:$PATH", 1)
    )
    _, code = cluster.ended(job)
    log = Path(f"ssh-{job}.log").read_text()
    assert code == 0, log
    assert sorted(re.findall(r"\d True$", log, re.MULTILINE)) == [f"{r} True" for r in range(4)]
    assert not Path("canary").exists()


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
        job, code = cluster.ended(
            submit(
                cluster,
                render(spec).replace("set -euo", f"HPCTRAIN_SITE={tmp_path}/site.sh\nset -euo", 1),
            )
        )
        log = Path(f"modules-{job}.log").read_text()
        assert code == expected, log
        assert ("good: yes" in log) == (expected == 0)
        assert ("it's absent: this module could not be loaded" in log) == (expected == 2)
