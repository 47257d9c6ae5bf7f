"""Every start that can be captured: the program that makes it, and its layout.

Each line of a script ends with the name of its start, `… train.py NAME`; the file has the line
without that name.
"""

from pathlib import Path

from environments.starts import LOCAL, Program, Start


def _on(*hosts: str | int) -> tuple[str, ...]:
    """Return a layout: `_on(1, 1, 2)` is node1, node1, node2."""
    return tuple(host if isinstance(host, str) else f"node{host}" for host in hosts)


def _alike(launcher: str, layout: tuple[str, ...], *names: str) -> tuple[Start, ...]:
    """Return starts that differ only in the command line."""
    return tuple(Start(name, launcher, layout) for name in names)


ONE, THREE = _on(1), _on(1, 1, 1)
UNEVEN, BLOCK, CYCLIC = _on(1, 1, 2), _on(1, 1, 2, 2), _on(1, 2, 1, 2)
FIVE, SEVEN = _on(1, 1, 2, 2, 3), _on(1, 1, 2, 2, 3, 3, 4)

# Options and commands of several programs.
TWO = "-w node[1-2] -N2 -n4 --ntasks-per-node=2"
LAST_TWO = "-w node[3-4] -N2 -n3 --ntasks-per-node=2"
BATCH = "sbatch -w node[1-3] -N3 -n6 --ntasks-per-node=2 job.sh"
SALLOC = f"salloc {TWO} bash job.sh"
AGENTS = "--nnodes=2 --nproc-per-node=2"
MPIRUN = "mpirun --allow-run-as-root"
MPIRUN4 = "mpirun.openmpi --allow-run-as-root"
PRTERUN = "prterun --allow-run-as-root"
WITH_OPENMPI5 = "export PATH=$OPENMPI5/bin:$PATH"
WITH_INTELMPI = "export PATH=$INTELMPI/bin:$PATH I_MPI_ROOT=$INTELMPI"

# Places of commands that are not in the script of the program.
INTERACTIVE = (
    f"in the shell of `salloc {LAST_TWO}`, which is a step where slurm.conf has "
    "LaunchParameters=use_interactive_step; the shell reads a file, and salloc runs"
)
INNER, TWIN = f"sbatch {LAST_TWO}", "sbatch -w node[1-2] -N2 -n2"
ANOTHER = (
    "in the script of another job, which the second of the two tasks of a step submitted with:"
)
IN_INNER = f"{ANOTHER} {INNER} inner.sh; that step ran"
IN_TWIN = f"{ANOTHER} {TWIN} twin.sh, on the same two hosts; that step ran"

START_SUBMITIT = {"start.py": Path(__file__).with_name("start_submitit.py").read_text()}
BY_SUBMITIT = (
    "executor = submitit.LocalExecutor(…); executor.update_parameters(tasks_per_node=3); "
    "executor.submit(…)"
)
BY_SUBMITIT_IN_SLURM = (
    'executor = submitit.AutoExecutor(…, cluster="slurm"); '
    "executor.update_parameters(nodes=2, tasks_per_node=2); executor.submit(…)"
)
EXPORT = ", and there first submitit.helpers.TorchDistributedEnvironment().export()"

SLURM = (
    Program(
        "srun",
        f"""
        srun {TWO} --distribution=block --mpi=none python train.py srun-block
        srun {TWO} --distribution=cyclic python train.py srun-cyclic
        SLURM_HOSTFILE=$PWD/hosts srun -n4 --distribution=arbitrary python train.py srun-arbitrary
        srun {TWO} --mpi=pmi2 python train.py srun-pmi2
        srun {TWO} --mpi=cray_shasta python train.py srun-cray-shasta
        script -qec "srun -w node1 -n1 --pty python train.py srun-pty" /dev/null </dev/null
        srun {TWO} --gpus-per-node=2 python train.py srun-gpus-per-node
        srun {TWO} --gpus-per-task=1 python train.py srun-gpus-per-task
        srun {TWO} --gpus-per-node=2 --gpu-bind=single:1 python train.py srun-gpu-bind
        """,
        (
            *_alike("slurm", BLOCK, "srun-block", "srun-pmi2", "srun-cray-shasta"),
            *_alike("slurm", BLOCK, "srun-gpus-per-node", "srun-gpus-per-task", "srun-gpu-bind"),
            Start("srun-cyclic", "slurm", CYCLIC),
            Start("srun-arbitrary", "slurm", _on(2, 1, 1, 1), hosts=_on(1, 2)),
            Start("srun-pty", "slurm", ONE, how="srun -w node1 -n1 --pty python train.py"),
        ),
        files={"hosts": "node2\nnode1\nnode1\nnode1\n"},
    ),
    Program(
        "pmix",
        f"""
        SLURM_PMIX_TMPDIR=$HOST_FOLDER srun {TWO} --mpi=pmix python train.py srun-pmix
        """,
        (Start("srun-pmix", "slurm", BLOCK),),
        needs=("pmix",),
    ),
    Program(
        "interactive",
        f"""
        cp "${{SLURM_CONF%/*}}"/*.conf .
        echo LaunchParameters=use_interactive_step >>slurm.conf
        echo 'InteractiveStepOptions="--interactive --preserve-env bash"' >>slurm.conf
        export SLURM_CONF=$PWD/slurm.conf
        salloc {LAST_TWO} <typed
        """,
        (
            Start("interactive-step", "none", _on(3), where=INTERACTIVE),
            Start(
                "srun-in-interactive-step",
                "slurm",
                _on(3, 3, 4),
                how="srun -n3 --distribution=plane=2 python train.py",
                where=INTERACTIVE,
            ),
        ),
        files={
            "typed": "python train.py interactive-step\n"
            "srun -n3 --distribution=plane=2 python train.py srun-in-interactive-step </dev/null\n"
        },
    ),
    Program(
        "salloc",
        """
        python train.py salloc-shell
        srun -n4 --distribution=plane=3 python train.py srun-plane
        srun -N2 -n3 --distribution=plane=2 python train.py srun-in-salloc
        """,
        (
            Start("salloc-shell", "none", _on("login")),
            Start("srun-plane", "slurm", _on(1, 1, 1, 2)),
            Start("srun-in-salloc", "slurm", UNEVEN),
        ),
        typed="salloc -w node[1-2] -N2 -n6 --ntasks-per-node=3 bash job.sh",
    ),
    Program(
        "batch",
        """
        python train.py batch-shell
        srun --distribution=block python train.py srun-uneven
        srun -w node[2-3] -N2 -n3 --distribution=plane=2 python train.py srun-smaller
        srun -w node[1-2] -N2 -n2 bash submit.sh
        export MASTER_ADDR=node1 MASTER_PORT=29500 WORLD_SIZE=$SLURM_NTASKS; \\
        srun bash -c "RANK=\\$SLURM_PROCID LOCAL_RANK=\\$SLURM_LOCALID python train.py srun-exports"
        """,
        (
            Start("batch-shell", "none", ONE),
            *_alike("slurm", SEVEN, "srun-uneven", "srun-exports"),
            Start("srun-smaller", "slurm", _on(2, 2, 3)),
            Start("batch-shell-submitted-by-a-step", "none", _on(3), where=IN_INNER),
            Start("srun-submitted-by-a-step", "slurm", _on(3, 3, 4), where=IN_INNER),
            Start("batch-shell-submitted-by-its-twin", "none", ONE, where=IN_TWIN),
        ),
        typed="sbatch -w node[1-4] -N4 -n7 --ntasks-per-node=2 job.sh",
        files={
            "submit.sh": "[ $SLURM_PROCID = 0 ] && exit\n"
            f"{INNER} -o inner.log inner.sh\n{TWIN} -o twin.log twin.sh\n",
            "inner.sh": "#!/bin/bash\n"
            "python train.py batch-shell-submitted-by-a-step\n"
            "srun --distribution=plane=2 python train.py srun-submitted-by-a-step\n",
            "twin.sh": "#!/bin/bash\npython train.py batch-shell-submitted-by-its-twin\n",
        },
    ),
    Program(
        "array",
        """
        srun --distribution=plane=2 python train.py array-$SLURM_ARRAY_TASK_ID
        """,
        tuple(
            Start(
                f"array-{task}",
                "slurm",
                UNEVEN,
                how="srun --distribution=plane=2 python train.py",
                where=f"array task {task},",
            )
            for task in (3, 4)
        ),
        typed="sbatch -w node[1-2] -N2 -n3 --ntasks-per-node=2 --array=3-4 job.sh",
    ),
    Program(
        "requeued",
        """
        [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }
        srun --distribution=plane=2 python train.py srun-requeued
        """,
        (Start("srun-requeued", "slurm", _on(3, 3, 4)),),
        typed=f"sbatch --requeue {LAST_TWO} job.sh",
    ),
    Program(
        "het-salloc",
        """
        python train.py het-salloc-shell
        srun --het-group=0,1 --distribution=block python train.py het-both
        srun --het-group=1 python train.py het-second
        srun python train.py het-first
        srun --het-group=0,1 --distribution=block --mpi=pmi2 python train.py het-both-pmi2
        """,
        (
            Start("het-salloc-shell", "none", _on("login")),
            *_alike("slurm", _on(1, 2, 2, 3, 3), "het-both", "het-both-pmi2"),
            Start("het-second", "slurm", _on(2, 2, 3, 3)),
            Start("het-first", "slurm", ONE),
        ),
        typed="salloc -w node1 -N1 -n1 : -w node[2-3] -N2 -n4 --ntasks-per-node=2 bash job.sh",
    ),
    Program(
        "het-batch",
        """
        python train.py het-batch-shell
        srun --het-group=0,1 --distribution=block python train.py het-batch-both
        """,
        (
            Start("het-batch-shell", "none", _on(2)),
            Start("het-batch-both", "slurm", _on(2, 2, 3, 4)),
        ),
        typed="sbatch -w node2 -N1 -n2 : -w node[3-4] -N2 -n2 job.sh",
    ),
)
TORCH = (
    Program(
        "torch",
        """
        torchrun --nproc-per-node=3 train.py torchrun
        torchrun --standalone --nproc-per-node=3 train.py torchrun-standalone
        python -m torch.distributed.launch --nproc-per-node=3 train.py launch
        python -m torch.distributed.launch --nproc-per-node=3 --use-env train.py launch-use-env
        """,
        _alike("torchrun", THREE, "torchrun", "torchrun-standalone", "launch", "launch-use-env"),
        host="node1",
    ),
    Program(
        "torch-salloc",
        f"""
        torchrun --nproc-per-node=3 train.py torchrun-in-salloc
        srun bash -c "torchrun {AGENTS} --node-rank=\\$SLURM_NODEID \\
            --master-addr=node1 --master-port=29511 train.py srun-torchrun"
        srun torchrun {AGENTS} --rdzv-backend=c10d \\
            --rdzv-endpoint=node1:29512 --rdzv-id=$SLURM_JOB_ID train.py srun-torchrun-c10d
        """,
        (
            Start("torchrun-in-salloc", "torchrun", _on("login", "login", "login")),
            *_alike("torchrun", BLOCK, "srun-torchrun", "srun-torchrun-c10d"),
        ),
        typed="salloc -w node[1-2] -N2 -n2 bash job.sh",
    ),
    Program(
        "horovodrun",
        """
        horovodrun -np 3 -H localhost:3 --gloo python train.py horovodrun
        horovodrun -np 3 -H localhost:3 --mpi python train.py horovodrun-mpi
        horovodrun -np 3 -H node1:2,node2:1 --gloo --network-interfaces eth0 \\
            python train.py horovodrun-two-hosts
        """,
        (
            Start("horovodrun", "horovodrun", THREE),
            Start("horovodrun-mpi", "openmpi", THREE),
            Start("horovodrun-two-hosts", "horovodrun", UNEVEN, through_ssh=True),
        ),
        host="node1",
        needs=("openmpi", "horovod"),
    ),
)
ENV_LAUNCHER = (
    Program(
        "manual",
        """
        export MASTER_ADDR=node1 MASTER_PORT=29500 WORLD_SIZE=3; \\
        for i in 0 1 2; do RANK=$i LOCAL_RANK=$i python train.py manual & done; wait
        unset MASTER_ADDR MASTER_PORT WORLD_SIZE
        python train.py alone
        hpctrain run --nproc-per-node 3 train.py hpctrain-run
        hpctrain run --nodes 2 --nproc-per-node 2,1 train.py hpctrain-run-two-nodes
        """,
        (
            Start("manual", "env", THREE),
            Start("alone", "none", ONE),
            Start("hpctrain-run", "hpctrain", THREE),
            Start("hpctrain-run-two-nodes", "hpctrain", UNEVEN, simulated=True),
        ),
        host="node1",
    ),
)
OPENMPI = (
    Program(
        "openmpi",
        f"""
        {MPIRUN4} --oversubscribe -np 3 python train.py openmpi
        {MPIRUN4} --host node1:2,node2:1 python train.py openmpi-ssh
        """,
        (
            Start("openmpi", "openmpi", THREE),
            Start("openmpi-ssh", "openmpi", UNEVEN, through_ssh=True),
        ),
        host="node1",
        needs=("openmpi",),
    ),
    Program(
        "openmpi-batch",
        f"""
        {MPIRUN4} -np 5 python train.py openmpi-in-batch
        {MPIRUN4} -np 3 python train.py openmpi-in-batch-fewer
        {MPIRUN4} -np 3 --map-by node python train.py openmpi-in-batch-by-node
        {MPIRUN4} -np 3 --nolocal python train.py openmpi-in-batch-nolocal
        """,
        (
            Start("openmpi-in-batch", "openmpi", FIVE),
            Start("openmpi-in-batch-fewer", "openmpi", UNEVEN),
            Start("openmpi-in-batch-by-node", "openmpi", _on(1, 2, 3)),
            Start("openmpi-in-batch-nolocal", "openmpi", _on(2, 2, 3)),
        ),
        typed=BATCH,
        needs=("openmpi",),
    ),
    Program(
        "openmpi-salloc",
        f"""
        {MPIRUN4} python train.py openmpi-in-salloc
        {MPIRUN4} -np 3 python train.py openmpi-in-salloc-uneven
        {MPIRUN4} -np 1 python train.py openmpi-in-salloc-one
        """,
        (
            Start("openmpi-in-salloc", "openmpi", BLOCK),
            Start("openmpi-in-salloc-uneven", "openmpi", UNEVEN),
            Start("openmpi-in-salloc-one", "openmpi", ONE),
        ),
        typed=SALLOC,
        needs=("openmpi",),
    ),
    Program(
        "openmpi5",
        f"""
        {WITH_OPENMPI5}
        {MPIRUN} --host node1:3 --bind-to none -np 3 python train.py openmpi5
        {MPIRUN} --host node1:2 --map-by :oversubscribe -np 3 python train.py openmpi5-more
        {MPIRUN} --host node1:2,node2:1 -np 3 python train.py openmpi5-ssh
        {PRTERUN} --host node1:3 --bind-to none -np 3 python train.py prterun
        {PRTERUN} --prefix $OPENMPI5 --host node1:2,node2:1 -np 3 python train.py prterun-ssh
        """,
        (
            Start("openmpi5", "openmpi", THREE, known=LOCAL),
            Start("openmpi5-more", "openmpi", THREE, known=LOCAL, local_ranks=(0, 2, 1)),
            Start("openmpi5-ssh", "openmpi", UNEVEN, known=LOCAL, through_ssh=True),
            Start("prterun", "prterun", THREE),
            Start("prterun-ssh", "prterun", UNEVEN, through_ssh=True),
        ),
        host="node1",
        needs=("openmpi5",),
    ),
    Program(
        "openmpi5-batch",
        f"""
        {WITH_OPENMPI5}
        {MPIRUN} -np 5 python train.py openmpi5-in-batch
        {PRTERUN} -np 5 python train.py prterun-in-batch
        """,
        (
            Start("openmpi5-in-batch", "openmpi", FIVE, known=LOCAL),
            Start("prterun-in-batch", "prterun", FIVE),
        ),
        typed=BATCH,
        needs=("openmpi5",),
    ),
    Program(
        "openmpi5-salloc",
        f"""
        {WITH_OPENMPI5}
        {MPIRUN} -np 3 python train.py openmpi5-in-salloc
        """,
        (Start("openmpi5-in-salloc", "openmpi", UNEVEN, known=LOCAL),),
        typed=SALLOC,
        needs=("openmpi5",),
    ),
)
HYDRA = (
    Program(
        "intelmpi",
        f"""
        {WITH_INTELMPI}
        mpirun -n 3 python train.py intelmpi
        mpirun -hosts node1,node2 -ppn 2 -n 3 python train.py intelmpi-ssh
        """,
        (
            Start("intelmpi", "hydra", THREE),
            Start("intelmpi-ssh", "hydra", UNEVEN, through_ssh=True),
        ),
        host="node1",
        needs=("intelmpi",),
    ),
    Program(
        "intelmpi-batch",
        f"""
        {WITH_INTELMPI}
        mpirun -n 5 python train.py intelmpi-in-batch
        """,
        (Start("intelmpi-in-batch", "hydra", FIVE),),
        typed=BATCH,
        needs=("intelmpi",),
    ),
    Program(
        "hydra",
        """
        mpiexec.hydra -n 3 python train.py hydra
        mpiexec.hydra -hosts node1:2,node2:1 -n 3 python train.py hydra-ssh
        """,
        (
            Start("hydra", "hydra", THREE),
            Start("hydra-ssh", "hydra", UNEVEN, through_ssh=True),
        ),
        host="node1",
        needs=("mpich",),
    ),
    Program(
        "hydra-batch",
        """
        mpiexec.hydra -bootstrap slurm -n 5 python train.py hydra-in-batch
        """,
        (Start("hydra-in-batch", "hydra", FIVE),),
        typed=BATCH,
        needs=("mpich",),
    ),
    Program(
        "hydra-salloc",
        """
        mpiexec.hydra -n 3 python train.py hydra-in-salloc
        """,
        (Start("hydra-in-salloc", "hydra", UNEVEN),),
        typed=SALLOC,
        needs=("mpich",),
    ),
)
SUBMITIT = (
    Program(
        "submitit",
        """
        python start.py local submitit-local
        python start.py local submitit-local-export
        python start.py debug submitit-debug
        """,
        (
            Start("submitit-local", "submitit", THREE, how=BY_SUBMITIT),
            Start("submitit-local-export", "submitit", THREE, how=BY_SUBMITIT + EXPORT),
            Start(
                "submitit-debug",
                "none",
                ONE,
                how="executor = submitit.DebugExecutor(…); executor.submit(…)",
            ),
        ),
        host="node1",
        needs=("submitit",),
        files=START_SUBMITIT,
    ),
    Program(
        "submitit-slurm",
        """
        python start.py slurm submitit-slurm
        python start.py slurm submitit-slurm-export
        """,
        (
            Start("submitit-slurm", "slurm", BLOCK, how=BY_SUBMITIT_IN_SLURM),
            Start("submitit-slurm-export", "slurm", BLOCK, how=BY_SUBMITIT_IN_SLURM + EXPORT),
        ),
        needs=("submitit",),
        files=START_SUBMITIT,
    ),
)
PROGRAMS = (*SLURM, *TORCH, *ENV_LAUNCHER, *OPENMPI, *HYDRA, *SUBMITIT)
BY_START = {start.name: (program, start) for program in PROGRAMS for start in program.starts}
