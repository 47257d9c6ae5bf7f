"""Hosts that nobody but a person ties together: the same command on each, over a real network."""

import json
import subprocess

import cluster as slurm
import launches
import pytest

pytestmark = pytest.mark.slurm

TRAINS = """
import json, hpctrain
with hpctrain.Session(backend="ddp", batch_size=1, start_timeout=60) as session:
    total = session.sum(session.world.rank + 1)
    addresses = sorted(set(session.roll.addresses))
    print(json.dumps([session.world.rank, total, session.world.hosts, addresses]))
"""


def test_three_hosts_train_together_from_the_same_command_on_each(cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    running = []
    try:
        for rank, host in enumerate(cluster.hosts[:3]):
            place = ["--nodes", "3", "--node-rank", str(rank), "--nproc-per-node", "1,2,1"]
            meeting = ["--main-address", slurm.address("node1"), "--main-port", "8888"]
            command = [launches.PYTHON, "-m", "hpctrain", "run", *place, *meeting, str(script)]
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
        outputs = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    lines = [line for out, _ in outputs for line in out.splitlines()]
    told = sorted(json.loads(line.partition(": ")[2]) for line in lines)
    hosts = list(cluster.hosts[:3])
    addresses = sorted(slurm.address(host) for host in hosts)
    assert told == [[rank, 10, hosts, addresses] for rank in range(4)]
