"""`hpctrain run` typed on each host, without a launcher across hosts, over a real network."""

import json
import subprocess

import cluster as slurm
import launches
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_hpctrain_manual_run_on_three_hosts_has_the_losses_of_one_process(
    cluster, reproducibility_reference, tmp_path
):
    running = []
    try:
        for rank, host in enumerate(cluster.hosts[:3]):
            place = ["--nodes", "3", "--node-rank", str(rank), "--nproc-per-node", "1,1,1"]
            address = ["--main-address", slurm.address("node1"), "--main-port", "8888"]
            command = [launches.PYTHON, "-m", "hpctrain", "run", *place, *address]
            command += [str(launches.TWICE), *launches.PARITY]
            running.append(
                subprocess.Popen(
                    cluster.command(command, host),
                    env={**cluster.environ(), "OMP_NUM_THREADS": "1"},
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    launches.same_losses(tmp_path, reproducibility_reference)
    world = json.loads((tmp_path / "fp64" / "run.json").read_text())["world"]
    assert world["hosts"] == list(cluster.hosts[:3])
    assert world["world_size"] == 3
