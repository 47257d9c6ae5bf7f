#!/bin/bash
#SBATCH --nodes=2
#SBATCH --signal=B:USR2@120

trap 'kill -USR2 "$run"' USR2
hpctrain run train.py &
run=$!
while kill -0 "$run" 2>/dev/null; do wait "$run"; done
