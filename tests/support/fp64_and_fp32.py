"""Run examples/mnist.py, unchanged, in fp64 and then in fp32, in one start of the ranks."""

import runpy
import sys
from pathlib import Path

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "mnist.py")
OPTIONS = ["--log-every", "1", *sys.argv[1:]]

for precision, steps in (("fp64", "50"), ("fp32", "10")):
    sys.argv = [EXAMPLE, *OPTIONS, "--precision", precision, "--max-steps", steps]
    sys.argv += ["--run-dir", precision]
    runpy.run_path(EXAMPLE, run_name="__main__")
