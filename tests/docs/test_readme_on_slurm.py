"""The commands of the README that submit jobs, on a real Slurm, in its order."""

import json

import launches
import pytest
import readme

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

COMMANDS = [line for line in readme.commands() if line.startswith(("sbatch", "srun", *readme.JOBS))]


@pytest.fixture
def checkout(cluster, tmp_path):
    """Return a folder that looks like the top of the repository; cancel its jobs at the end."""
    yield launches.checkout(tmp_path)
    cluster.clear()


def test_readme_sbatch_and_srun_commands_are_accepted_and_submit_trains(cluster, checkout):
    assert len(COMMANDS) == 11
    env = launches.on_cluster(cluster)
    outputs, followed = {}, ""
    for command in COMMANDS:
        program, _, rest = command.partition(" ")
        trial = "--test-only " if program in ("sbatch", "srun") else ""
        line = f"{program} {trial}{rest}".replace("JOB", followed.strip())
        line = line.replace("--cpus-per-task=8", "--cpus-per-task=2")  # hosts of eight cores
        done = cluster.run(["bash", "-c", line], cwd=checkout, env=env, timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command] = done.stdout
        if "submit --follow" in command:
            followed = done.stdout
    first = next(out for command, out in outputs.items() if command.startswith("hpctrain submit"))
    assert "#SBATCH --nodes=4\n" in outputs["hpctrain render sbatch/mnist.toml"]
    assert outputs["hpctrain lint sbatch/mnist.sh"] == ""
    (run,) = (checkout / "runs").glob(f"mnist-{followed.split()[0]}")
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    assert first.strip() in outputs["hpctrain status"]
    assert f"job {followed}" in outputs["hpctrain status JOB"]
    assert "top-1" in outputs["hpctrain logs -f JOB"]
