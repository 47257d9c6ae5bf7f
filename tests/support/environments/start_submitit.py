"""The start.py that starts the ranks of submitit, next to train.py."""

import sys

import submitit
import train


def run(name, export):
    if export:
        submitit.helpers.TorchDistributedEnvironment().export()
    train.record(name)


if __name__ == "__main__":
    kind, name = sys.argv[1:3]
    kinds = {"local": submitit.LocalExecutor, "debug": submitit.DebugExecutor}
    if kind == "slurm":
        executor = submitit.AutoExecutor(folder="log", cluster="slurm")
        executor.update_parameters(
            nodes=2,
            tasks_per_node=2,
            timeout_min=1,
            slurm_additional_parameters={"nodelist": "node[1-2]"},
        )
    else:
        executor = kinds[kind](folder="log")
        executor.update_parameters(timeout_min=1)
        if kind == "local":
            executor.update_parameters(tasks_per_node=3)
    job = executor.submit(run, name, name.endswith("export"))
    if kind != "slurm":
        job.results()
