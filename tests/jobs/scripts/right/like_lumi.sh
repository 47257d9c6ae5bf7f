#!/bin/bash -l
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem=0
#SBATCH --time=0:30:00

cat << EOF > select_gpu
#!/bin/bash
export ROCR_VISIBLE_DEVICES=\$SLURM_LOCALID
exec \$*
EOF
chmod +x ./select_gpu

MASKS="0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000"
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
export WORLD_SIZE=$SLURM_NPROCS
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun -K --cpu-bind=mask_cpu:$MASKS ./select_gpu ./simulation --input data
srun -K --cpu-bind=mask_cpu:$MASKS singularity run pytorch.sif \
    bash -c "export RANK=\$SLURM_PROCID && export LOCAL_RANK=\$SLURM_LOCALID && python train.py"
