"""Write the golden scripts again: those of sbatch/, and those of this folder.

python tests/jobs/golden/renew.py
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.jobs import job_files
from hpctrain.jobs.script import render
from hpctrain.jobs.spec import JobSpec

HERE = Path(__file__).resolve().parent
SBATCH = HERE.parents[2] / "sbatch"
COMMAND = "python train.py --data 'my data' --lr 0.1"
# Specs by file name; each shows what the scripts of sbatch/ do not have.
SPECS: Mapping[str, JobSpec] = {
    "everything": JobSpec(
        about="Everything at once.\n\nTwo paragraphs.", name="every thing",
        command=f"{COMMAND} --backend ddp", run_dir="my runs/one", nodes=2, gpus_per_node="a100:4",
        cpus_per_task=8, memory="64G", time="1d12h", partition="gpu", account="abc", qos="normal",
        constraint="a100&nvlink", exclude="node[7-8]", dependency="afterok:123", array="1,3,7",
        throttle=2, output="logs/%x-%A_%a.log", signal="USR1", signal_time=300, max_restarts=5,
        environment={"NCCL_DEBUG": "INFO", "GREETING": "it's me"}, modules=("gcc/12", "cuda"),
        setup=("ulimit -n 65536",), venv="my env", stage_code=".",
        finish=("date", "du -sh 'my runs'"),
        extra={
            "exclusive": True, "hint": "nomultithread", "comment": 'a "comment"',
            "mail-user": "ada@example.org", "mail-type": "END,FAIL,REQUEUE",
        },
    ),
    "apptainer": JobSpec(
        command=COMMAND, nodes=2, gpus_per_node=4, container="images/torch.sif",
        environment={"NCCL_DEBUG": "INFO"}, stage_code="code",
    ),
    "elastic": JobSpec(command="python -m my.train", elastic=True, nodes=2, cpus_per_task=4),
    "parts": JobSpec(
        command=COMMAND, nodes=1, gpus_per_node=8, time="4h", partition="big",
        part=({"nodes": 4, "gpus_per_node": 4, "partition": "small", "exclude": "node9"},),
    ),
    "srun": JobSpec(command=COMMAND, launcher="srun", nodes=2, tasks_per_node=4),
    "sweep": JobSpec(
        command=COMMAND, run_dir="runs/sweep",
        sweep=[{"name": "it's"}, {"name": "a b", "lr": 1e-3}, {}],
    ),
}  # fmt: skip
# One job for each of the other schedulers.
ANYWHERE = JobSpec(
    about="Anywhere.", command=COMMAND, run_dir="my runs/one", nodes=2, gpus_per_node=4,
    cpus_per_task=8, time="1d12h", partition="gpu", account="abc", dependency="afterok:123",
    signal="USR1", signal_time=300, environment={"GREETING": "it's me"}, modules=("gcc/12",),
    venv="my env",
)  # fmt: skip
MORE_OF_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "pbs": {"memory": "64G", "array": "0-10:2", "throttle": 2, "run_dir": ""},
    "flux": {},
}
# Checked by shellcheck and lint only: their parts are in a golden file, or bash runs them in
# test_sbatch_script_runs.py.
MORE: Mapping[str, JobSpec] = {
    "pyxis": JobSpec(
        command=COMMAND, nodes=2, gpus_per_node=4, container="nvcr.io#nvidia/pytorch:25.10-py3",
        container_runtime="pyxis", environment={"NCCL_DEBUG": "INFO"}, run_dir="/scratch/run",
    ),
    "staging": JobSpec(
        command=COMMAND, nodes=4, stage_environment="envs/torch.tar.gz", stage_data="/shared/it's"
    ),
    "conda": JobSpec(command="./train --lr 0.1", nodes=2, conda="torch"),
    "no-requeue": JobSpec(command=COMMAND, requeue=False, signal="TERM"),
    "no-signal": JobSpec(command=COMMAND, signal_time=0),
    "torchrun": JobSpec(command="torchrun --nproc-per-node 4 train.py", launcher="none", nodes=1),
}  # fmt: skip


def scripts() -> dict[Path, str]:
    """Return, by path, the expected text of each golden script."""
    made = {
        path.with_suffix(".sh"): render(JobSpec(**job_files.read(path)))
        for path in sorted(SBATCH.glob("*.toml"))
    }
    made |= {HERE / f"{name}.sh": render(spec) for name, spec in SPECS.items()}
    return made | {
        HERE / f"{name}.sh": render(replace(ANYWHERE, **more), scheduler=name)
        for name, more in MORE_OF_OTHERS.items()
    }


def more() -> dict[str, str]:
    """Return, by name, the scripts that have no golden file."""
    return {name: render(spec) for name, spec in MORE.items()}


if __name__ == "__main__":
    for path, text in scripts().items():
        path.write_text(text)
