#!/bin/bash
# From a fresh clone to a trained model: installs hpctrain and what the examples need into .venv,
# then trains a small convolutional net on handwritten digits, on all GPUs of this machine or,
# without one, on two CPU ranks.
#
#     bash examples/quickstart.sh [options of examples/mnist.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh

set_up vision
ranks=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)')
# About 64 samples a step, cut evenly.
batch=$((ranks * (64 / ranks > 0 ? 64 / ranks : 1)))
command=(.venv/bin/hpctrain run --nproc-per-node "$ranks" examples/mnist.py
    --data digits --global-batch "$batch" --lr 0.003 --epochs 20 "$@")
print_line "${command[*]}"
"${command[@]}"
