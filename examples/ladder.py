"""Compare one process, DataParallel, ddp and mixed precision on this machine.

    python examples/ladder.py
    python examples/ladder.py --ranks 4 --steps 2000 --json ladder.json

Each rung runs examples/mnist.py in its own processes, with the same global batch and number of
steps (a tenth of the steps in bf16 on CPUs), and evaluates on the whole test set.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SCRIPT = Path(__file__).with_name("mnist.py")
# Divides the steps in bf16 on CPUs: a CPU without bf16 units is several times slower with it.
SHORTER = 10


def options(gpus):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, default=gpus or 2, help="ranks of ddp (default: GPUs, else 2)"
    )
    parser.add_argument("--data", default="digits", help="data set, as in mnist.py (%(default)s)")
    parser.add_argument("--global-batch", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps per rung (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the table as JSON")
    return parser.parse_args()


def rungs(ranks, gpus):
    """Return by name the number of processes and the options of the training."""
    half, full = ["--precision", "bf16"], ["--precision", "fp32"]
    ddp = ["--backend", "ddp"] if ranks > 1 else []
    found = {"one process": (1, full)}
    if gpus:  # DataParallel needs GPUs
        found[f"DataParallel, {gpus} GPUs"] = (1, ["--backend", "dataparallel", *full])
    found[f"ddp, {ranks} ranks"] = (ranks, [*ddp, *full])
    found[f"ddp, {ranks} ranks, bf16"] = (ranks, [*ddp, *half])
    return found


def climb(name, processes, more, steps, args, folder):
    """Train on one rung; return figures of its summary."""
    run = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    command = [sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", str(processes), SCRIPT]
    command += [
        "--data",
        args.data,
        "--global-batch",
        str(args.global_batch),
        "--run-dir",
        run,
        *more,
    ]
    command += ["--max-steps", str(steps)]
    print(f"{name} …", file=sys.stderr)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    summary = json.loads((run / "summary.json").read_text())
    return {
        "rung": name,
        "processes": processes,
        "steps": summary["step"],
        "seconds": summary["seconds"],
        "images_per_second": summary["samples_per_second"],
        "top1": summary["metrics"]["top1"],
    }


def machine(gpus):
    if gpus:
        names = f"{gpus} × {torch.cuda.get_device_name(0)}"
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        names = f"{len(os.sched_getaffinity(0))} cores of {(models or [platform.machine()])[0]}"
    return f"{names}, torch {torch.__version__}, {datetime.date.today()}"


def table(rows):
    """Return a Markdown table."""
    first = rows[0]["images_per_second"]
    lines = [
        "| | images/s | × | top-1 of the whole test set |",
        "|---|---|---|---|",
    ]
    for row in rows:
        speed = row["images_per_second"]
        lines.append(
            f"| {row['rung']} | {speed:.0f} | {speed / first:.2f} "
            f"| {100 * row['top1']:.2f} % after {row['steps']} steps |"
        )
    return "\n".join(lines)


def main():
    gpus = torch.cuda.device_count()
    args = options(gpus)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (processes, more) in rungs(args.ranks, gpus).items():
            shorter = SHORTER if "bf16" in name and not gpus else 1
            steps = max(1, args.steps // shorter)
            rows.append(climb(name, processes, more, steps, args, Path(folder)))
    about = f"{machine(gpus)}; {args.data}, global batch {args.global_batch}"
    print(f"{about}\n\n{table(rows)}")
    if args.json:
        Path(args.json).write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
