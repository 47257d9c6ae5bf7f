#SBATCH --ntasks=1

srun hostname
