"""Seconds that a killed rank costs in a Slurm job, and the memory of its launch.

    python benchmarks/restart.py [--kills 50] [--backends ddp horovod] [--here] [--save FILE]

The script trains one rank on each of three nodes, and then three ranks on one node. Again and again
another rank kills itself by SIGKILL, two steps after a checkpoint. The figure is the time from the
end of the last step before to the end of the first step that no attempt had reached before, less
the time of the steps between the checkpoint and this one, at the median time of a step. At the end,
the weights of the ranks have the bits of a run without a kill.

The memory is that of a node beside its ranks, before the first kill: the agent, its processes, and
on the first node `hpctrain run`, without pages of files (Pss_Anon of /proc/PID/smaps_rollup).

It runs on the test cluster of tests/support, which it starts and stops (as root), or with --here on
the cluster of this machine, from a folder that its nodes share.
"""

import argparse
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Results, judge, run
from submit import Command, slurm

from hpctrain.tools.bench.measure import summary

# Nodes, and ranks of each, with the targets of the median, in seconds.
LAYOUTS = {"3 nodes": (3, 1, "≤ 1.2"), "1 node, 3 ranks": (1, 3, "≤ 1.0")}
CHECKPOINT_EVERY, STEPS_BETWEEN, STEPS_BEHIND = 5, 10, 2
# Step after which ranks are killed.
FIRST = 20
SECONDS_OF_A_STEP = 0.1
SECONDS = 3600.0
SCRIPT = f"""\
import hashlib, json, os, signal, time
from pathlib import Path

import torch
import hpctrain

KILLS, LAST, OUT = int(os.environ["KILLS"]), int(os.environ["LAST"]), Path(os.environ["OUT"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def parent(pid):
    return int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])


def memory():
    agent = os.getppid()
    while b"hpctrain" in Path(f"/proc/{{parent(agent)}}/cmdline").read_bytes():
        agent = parent(agent)
    found, number = {{agent, int((OUT / "pid").read_text())}}, 0
    while number < len(found):
        number = len(found)
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if parent(path.name) in found - {{os.getpid()}}:
                    found.add(int(path.name))
            except OSError:
                pass
    total, own = 0, Path("/proc/self/cmdline").read_bytes()
    for pid in found:
        try:
            if Path(f"/proc/{{pid}}/cmdline").read_bytes() == own:
                continue  # a rank
            text = Path(f"/proc/{{pid}}/smaps_rollup").read_text()
        except OSError:
            continue
        lines = (line for line in text.splitlines() if line.startswith("Pss_Anon:"))
        total += int(next(lines).split()[1])
    return total / 1024


with hpctrain.Session(hpctrain.options().parse_args()) as session:
    rank, size = session.world.rank, session.world.world_size
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(80 * size, 64), torch.randn(80 * size, 8))
    loader = session.loader(data)
    with session.run() as run:
        for _ in run.epochs(LAST // len(loader) + 1):
            for inputs, targets in run.batches(loader):
                time.sleep({SECONDS_OF_A_STEP})
                session.step(torch.nn.functional.mse_loss(model(inputs), targets))
                if rank == 0:
                    with open(OUT / "steps", "a") as file:
                        line = {{"attempt": ATTEMPT, "step": run.step, "time": time.time()}}
                        file.write(json.dumps(line) + "\\n")
                    if not ATTEMPT and run.step == {FIRST}:
                        (OUT / "memory").write_text(str(memory()))
                due = {FIRST} + {STEPS_BETWEEN} * ATTEMPT + {STEPS_BEHIND}
                if ATTEMPT < KILLS and run.step == due and rank == ATTEMPT % size:
                    os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        values = [one.detach().numpy().tobytes() for one in model.state_dict().values()]
        (OUT / "weights").write_text(hashlib.sha256(b"".join(values)).hexdigest())
"""
JOB = """\
#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node={each} --cpus-per-task=1 --time=60
#SBATCH --no-kill --output={out}/log
export KILLS={kills} LAST={last} OUT={out}
echo $$ > {out}/pid
exec {python} -m hpctrain run --run-dir {out}/run --max-attempts 1000 {out}/train.py \
    --backend {backend} --batch-size 8 --deterministic --checkpoint-every {every}
"""


def trained(
    cluster: tuple[Command, Mapping[str, str], Path],
    layout: str,
    backend: str,
    kills: int,
    last: int,
) -> Path:
    """Train to a step in a job with a number of kills; return the folder of what its ranks write.

    Raises:
        SystemExit: the job has failed.
    """
    command, environ, folder = cluster
    nodes, each, _ = LAYOUTS[layout]
    out = folder / f"{nodes}-{backend}-{kills}"
    out.mkdir()
    (out / "train.py").write_text(SCRIPT)
    fields = {
        "nodes": nodes,
        "each": each,
        "python": shlex.quote(sys.executable),
        "every": CHECKPOINT_EVERY,
    }
    job = JOB.format(**fields, out=shlex.quote(str(out)), backend=backend, kills=kills, last=last)
    (out / "job.sh").write_text(job)
    wait = ["sbatch", "--wait", "--parsable", f"--chdir={out}", str(out / "job.sh")]
    done = subprocess.run(
        command(wait), env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode or not (out / "weights").exists():
        log = (out / "log").read_text() if (out / "log").exists() else ""
        raise SystemExit(f"{done.stdout}{done.stderr}{log[-5000:]}\nthe job has failed")
    return out


def restarts(out: Path) -> list[float]:
    """Return the seconds that each kill has cost, without the steps done twice."""
    rows = [json.loads(line) for line in (out / "steps").read_text().splitlines()]
    same = [(a, b) for a, b in pairwise(rows) if a["attempt"] == b["attempt"]]
    step = statistics.median(b["time"] - a["time"] for a, b in same)
    costs = []
    for last in {row["attempt"]: row for row in rows}.values():
        new = next((row for row in rows if row["step"] == last["step"] + 1), None)
        if new is not None and new["attempt"] > last["attempt"]:
            redone = sum(
                row["attempt"] == new["attempt"] and row["step"] <= last["step"] for row in rows
            )
            costs.append(new["time"] - last["time"] - (redone + 1) * step)
    return costs


def measure(arguments: argparse.Namespace) -> Results:
    """Return by layout and backend the seconds of a restart, the most of them, and the memory."""
    results: Results = {}
    last = FIRST + STEPS_BETWEEN * (arguments.kills + 1)
    with slurm(arguments.here) as (command, environ), _folder(arguments.here) as folder:
        cluster = command, environ, folder
        for layout, (_, _, limit) in LAYOUTS.items():
            results[layout] = {}
            for backend in arguments.backends:
                quiet = trained(cluster, layout, backend, 0, last)
                killed = trained(cluster, layout, backend, arguments.kills, last)
                costs = restarts(killed)
                if len(costs) != arguments.kills:
                    raise SystemExit(f"{len(costs)} restarts after {arguments.kills} kills")
                if (quiet / "weights").read_text() != (killed / "weights").read_text():
                    raise SystemExit(f"{layout}, {backend}: the weights at the end are others")
                own: dict[str, Any] = {"s": summary(costs), "most_s": summary([max(costs)])}
                own["beside_mb"] = summary([float((killed / "memory").read_text())])
                for key, most in (("s", limit), ("most_s", "≤ 3"), ("beside_mb", "≤ 350")):
                    judge(own, key, most)
                results[layout][backend] = own
    return results


@contextlib.contextmanager
def _folder(here: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="." if here else None) as name:
        yield Path(name).resolve()


OPTIONS: dict[str, dict[str, Any]] = {
    "--kills": {"type": int, "default": 50, "metavar": "N", "help": "default: %(default)s"},
    "--backends": {"nargs": "+", "default": ["ddp", "horovod"], "help": "ddp horovod"},
    "--here": {"action": "store_true", "help": "use the Slurm of this machine"},
}

if __name__ == "__main__":
    run("The seconds that a killed rank costs.", None, ["hpctrain", "torch"], measure, OPTIONS)
