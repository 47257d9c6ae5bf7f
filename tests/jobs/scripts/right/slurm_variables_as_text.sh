#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --mail-type=begin
#SBATCH --mail-type=end

cat "$0"
cp "$0" "run-$SLURM_JOB_ID.sh"
cat > task.sh <<'EOF'
export RANK=$SLURM_PROCID
exec python train.py --tag "\$SLURM_PROCID"
EOF
head=$(hostname)
srun -K bash task.sh
srun -K bash <<EOF
python train.py --rank \$SLURM_PROCID --address $head
EOF
srun -K --export=ALL,head=$head bash -c 'python train.py --rank $SLURM_PROCID --address $head'
head=$head srun -K bash -c 'for name in a b; do python train.py --rank $SLURM_PROCID $head $name; done'
until srun -n 1 -N 1 python prepare.py; do sleep 60; done
