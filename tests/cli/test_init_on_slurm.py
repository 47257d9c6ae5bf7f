"""`hpctrain init` on a real Slurm: its batch script trains as it is."""

import json

import launches
import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_batch_script_of_init_trains_on_slurm(cluster, tmp_path):
    env = launches.on_cluster(cluster, VIRTUAL_ENV=str(launches.BIN.parent))
    lines = (
        "hpctrain init first --hosts 2 --time 10m",
        "cd first",
        "hpctrain lint train.sbatch",
        "sbatch --parsable train.sbatch --epochs 1",
    )
    done = cluster.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.split()[-1]
    try:
        assert cluster.ended(job) == (job, 0)
        (run,) = (tmp_path / "first" / "runs").iterdir()
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["status"], summary["world_size"]) == ("done", 2)
    finally:
        cluster.clear()
