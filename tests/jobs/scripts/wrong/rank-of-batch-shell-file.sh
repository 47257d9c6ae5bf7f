#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1

head=$(hostname)
cat > launch.sh <<EOF
#!/bin/bash
torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=$head train.py
EOF
chmod +x launch.sh
srun --kill-on-bad-exit=1 ./launch.sh
