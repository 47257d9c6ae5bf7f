#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --time=1:00:00

cat > job2.sh <<'END'
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntask-per-node=4
cd "$(dirname "$0")"
python train.py
END
sed "s/OLD/new/" <<-EOF >settings.txt
	#SBATCH --no-such-option=$HOME
	path = $0
	EOF
awk '{ print $0 }' settings.txt
echo "usage: $0"
text="
#SBATCH --time=10
"
srun --ntasks=1 python train.py "$text"
