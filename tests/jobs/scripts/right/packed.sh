#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120

run_one() {
    local seed=$1
    srun --exact --ntasks=1 --mem=4G python train.py --seed "$seed" > "out.$seed" 2>&1
}
for seed in $(seq 1 8); do
    run_one "$seed" &
done
wait
