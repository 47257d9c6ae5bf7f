#!/bin/bash
# Trains examples/mnist.py on four hosts, one rank each. From the top of the repository:
#
#     sbatch sbatch/mnist.sh
#     sbatch sbatch/mnist.sh --epochs 5 --lr 0.002        (options of the example)
#
# It asks for no GPU. With four GPUs on each host:
#
#     sbatch --gpus-per-node=4 --ntasks-per-node=4 sbatch/mnist.sh
#
#SBATCH --job-name=mnist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append

set -euo pipefail

# Slurm runs a copy of this file, from its spool: only the submit directory is the user's.
cd "$SLURM_SUBMIT_DIR"

python=${HPCTRAIN_PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi
fi

# Rank 0 writes here how the run ended; the exit code of srun depends on which rank left first.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
export HPCTRAIN_VERDICT=$PWD/runs/.verdict-$job-${SLURM_RESTART_COUNT:-0}
mkdir -p runs

# Without it another user of the hosts who guesses the job's number could join the ranks.
HPCTRAIN_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export HPCTRAIN_SECRET

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# srun does not take over --cpus-per-task from sbatch in every version of Slurm, and without
# --kill-on-bad-exit the ranks that are left wait for a dead one.
command=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"
    "$python" examples/mnist.py --data fashion-mnist --global-batch 256 --lr 0.002
    --epochs 2 "$@")
echo "job $job on $SLURM_JOB_NODELIST: ${command[*]}"

code=0
"${command[@]}" || code=$?
if [ -s "$HPCTRAIN_VERDICT" ]; then
    said=$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$HPCTRAIN_VERDICT")
    # A verdict of 0 does not cover what a rank did after its session.
    if [ "$said" != 0 ]; then code=$said; fi
    rm -f "$HPCTRAIN_VERDICT"
fi
exit "$code"
