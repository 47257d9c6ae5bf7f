#!/usr/bin/env python3
#SBATCH --nodes=2
#SBATCH --signal=B:USR2@60

import signal, subprocess
signal.signal(signal.SIGUSR2, lambda *_: None)
subprocess.run("cd $(dirname $0); sbatch next.sh", shell=True)
