"""Training speed of ResNet-50 in every precision: hpctrain against the baseline.

    python benchmarks/precision.py [--seconds 60] [--only NAME …] [--save FILE]

It runs `hpctrain bench step` in each precision, in a process of its own. The batch has ImageNet's
shape and is on the GPU, so that only the step is measured. One arm uses `session.autocast()` and
`session.step()`, the baseline torch.autocast, GradScaler and the memory format of the session. The
target is 0.99 of the images per second of the baseline, which is a time of 1.01. torch has no loop
for O2, which is compared with autocast in fp16 and has no target. Without a GPU, `--model small`
only checks that the program works.
"""

import argparse
from typing import Any

import torch
from harness import Results, judge, run, start

# Options of `hpctrain bench step`, and the target.
TARGET = "≤ 1.0101"
CASES = {
    "fp32": ("--precision", "fp32"),
    "tf32": ("--precision", "tf32"),
    "bf16": ("--precision", "bf16"),
    "fp16": ("--precision", "fp16"),
    "O1": ("--precision", "O1"),
    "O2": ("--precision", "O2"),
    "bf16, compiled": ("--precision", "bf16", "--compile"),
}


def measure(arguments: argparse.Namespace) -> Results:
    """Return the step times of both arms in each precision."""
    has_gpu = torch.cuda.is_available()
    results: Results = {}
    for name in arguments.only or CASES:
        if name == "tf32" and not has_gpu:
            print("tf32: left out, as only GPUs have it")
            continue
        given = {"--model": arguments.model, "--batch-size": arguments.batch_size}
        given["--seconds"] = arguments.seconds
        options = [str(word) for pair in given.items() for word in pair]
        found = start("-m", "hpctrain", "bench", "step", *CASES[name], *options)
        results[name] = found["results"]
        if has_gpu and name != "O2":
            judge(results[name]["hpctrain"], "ratio", TARGET)
    return results


OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"default": "resnet50", "help": "torchvision model (resnet50)"},
    "--batch-size": {"type": int, "default": 256, "metavar": "N", "help": "default: 256"},
    "--seconds": {"type": float, "default": 60.0, "help": "of each precision (60)"},
    "--only": {"nargs": "+", "choices": CASES, "metavar": "NAME", "help": "default: all"},
}

if __name__ == "__main__":
    packages = ["hpctrain", "torch", "torchvision"]
    title = "ResNet-50 by precision, against the baseline."
    run(title, None, packages, measure, OPTIONS, of_gpu=True)
