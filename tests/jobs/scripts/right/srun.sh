#!/bin/bash
#SBATCH --job-name=resnet
#SBATCH --account=project_1234
#SBATCH --partition=gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=480G            # all of the node's, "nearly
#SBATCH --time=2-00:00:00
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=someone@example.org
##SBATCH --exclusive

set -x
module purge
module load PyTorch/2.6 2>/dev/null || true

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
export WORLD_SIZE=$SLURM_NTASKS
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

echo "NODELIST=${SLURM_NODELIST}" # which ones
srun --kill-on-bad-exit=1 python train.py --arch resnet50 \
    --batch-size 256 `# for each GPU` \
    --workers "$SLURM_CPUS_PER_TASK"
