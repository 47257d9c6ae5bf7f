"""Table of the codes of errors, which `hpctrain explain CODE` and docs/errors.md show.

A code never changes its meaning, and a code that is no longer used is not given to another error.
"""

from dataclasses import dataclass

__all__ = ["CODES", "Code"]


@dataclass(frozen=True, slots=True)
class Code:
    """Entry of an error's code.

    Attributes:
        meaning: what went wrong, in one sentence.
        causes: usual causes, the most frequent first.
        fix: what to do, in one or two sentences.
    """

    meaning: str
    causes: tuple[str, ...]
    fix: str


CODES: dict[str, Code] = {
    # The script itself.
    "HT001": Code(
        "The script refuses one of its own values.",
        ("An option or file of the script is wrong.",),
        "See the message, and the `--help` of the script.",
    ),
    # Place of this process: launcher, environment, GPUs.
    "HT101": Code(
        "The values of one launcher contradict each other.",
        (
            "A script or a shell exported one of the launcher's variables manually.",
            "Variables of an earlier start are still set.",
        ),
        "Run `hpctrain explain` in place of the script: it shows the variable of each value. "
        "Unset or correct the wrong variables.",
    ),
    "HT102": Code(
        "Some of the variables that a rank needs are not set.",
        (
            "Variables were set manually, and one of them was left out.",
            "The launcher gives no local rank, as with PMI or PMIx alone.",
            "A container or sudo passed on only a part of the environment.",
        ),
        "Export the variables that the message names. For a single process, use "
        "`env HPCTRAIN_LAUNCHER=none COMMAND`.",
    ),
    "HT103": Code(
        "An environment variable or argument has a value that hpctrain cannot read.",
        (
            "A typing error in a number, a port or the name of a launcher.",
            "A shell variable was not expanded, because it is in single quotes.",
        ),
        "Correct the value, or unset the variable.",
    ),
    "HT104": Code(
        "This process has values of two different starts or launchers.",
        (
            "A script exports RANK, WORLD_SIZE or LOCAL_RANK, and the launcher has other values.",
            "A job was submitted from inside of a step, or a rank started another launcher.",
        ),
        "Unset the variables that do not belong to this start. Or choose the launcher: "
        "`env HPCTRAIN_LAUNCHER=NAME COMMAND`.",
    ),
    "HT105": Code(
        "A host list cannot be read or written.",
        (
            "A bracket is missing, or a range in it is wrong.",
            "The list is empty, or has more than 1048576 hosts.",
            "A host name has a space, a comma or a bracket.",
        ),
        "Write the list as in `node[01-03,7],login`. `scontrol show hostnames LIST` shows how "
        "Slurm reads it.",
    ),
    "HT106": Code(
        "The address of rank 0's host is a loopback address, and the ranks are on several hosts.",
        (
            "A script exports MASTER_ADDR=localhost or MASTER_ADDR=127.0.0.1.",
            "HPCTRAIN_MAIN_ADDRESS has a value from a test on one host.",
        ),
        "Unset the variable where the launcher gives the hosts. Otherwise set it to a name or "
        "address of rank 0's host that the other hosts reach.",
    ),
    "HT107": Code(
        "HPCTRAIN_INTERFACE and GLOO_SOCKET_IFNAME name different network interfaces.",
        ("One of them is set in a shell profile or a module, the other one in the script.",),
        "Unset GLOO_SOCKET_IFNAME: gloo also uses the interface in HPCTRAIN_INTERFACE.",
    ),
    "HT108": Code(
        "A launcher started this process, but the launcher's variables are not set.",
        (
            "A container was started without the environment.",
            "The command runs under sudo or `env -i`.",
        ),
        "Pass the environment on: `sudo -E`, or `apptainer exec` without --cleanenv. To train "
        "alone, use `env HPCTRAIN_LAUNCHER=none COMMAND`.",
    ),
    "HT109": Code(
        "A child process of multiprocessing has no rank of its own.",
        (
            "The script starts ranks with mp.spawn or Process and sets no RANK in them.",
            "A worker process or a Pool opens a Session.",
        ),
        "Start the ranks with `hpctrain run --nproc-per-node N SCRIPT` or "
        "`hpctrain.spawn(FUNCTION, N)`. Open the Session only in the ranks.",
    ),
    "HT110": Code(
        "The job has more tasks than this start has ranks, so some tasks would be idle.",
        (
            "A batch script starts Python without srun.",
            "A launcher in the job starts fewer ranks than the job has tasks.",
        ),
        "Put `srun --kill-on-bad-exit=1` before the command, or ask for as many tasks as ranks. "
        "If it is intended, use `env HPCTRAIN_LAUNCHER=NAME COMMAND`.",
    ),
    "HT111": Code(
        "Each task of the step started a launcher of its own, so several trainings would run.",
        (
            "A step starts torchrun in each task, without a common rendezvous.",
            "A step starts `hpctrain run` in each task.",
        ),
        "Give all torchrun agents the same --rdzv-endpoint and --rdzv-id, with one agent on each "
        "host. Or let srun start the script itself.",
    ),
    "HT112": Code(
        "horovodrun runs in its elastic mode, which hpctrain cannot use.",
        ("The options --min-np, --max-np or --host-discovery-script of horovodrun.",),
        "Use `hpctrain run --elastic --hosts HOST:SLOTS,HOST:SLOTS SCRIPT`: it starts new ranks, "
        "which resume.",
    ),
    "HT113": Code(
        "A host has more ranks than GPUs or MIG slices for them.",
        (
            "The launcher starts more ranks on a host than it has GPUs.",
            "CUDA_VISIBLE_DEVICES or the scheduler shows the same GPU to several ranks.",
        ),
        "Start at most as many ranks on each host as it has GPUs. To train on the CPU, use "
        "`env CUDA_VISIBLE_DEVICES= python SCRIPT`.",
    ),
    "HT114": Code(
        "The variables that select the visible GPUs cannot be used together.",
        (
            "CUDA_VISIBLE_DEVICES has MIG slices beside whole GPUs.",
            "HIP_VISIBLE_DEVICES counts all GPUs, but ROCR_VISIBLE_DEVICES leaves only some.",
            "HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES differ on a host with AMD GPUs.",
        ),
        "Change or unset one variable directly before the command, with `env`. An export before "
        "srun is not enough, because srun sets the variables again in each task.",
    ),
    "HT115": Code(
        "CUDA started before the Session, so the ranks cannot get a MIG slice each.",
        ("The script uses `torch.cuda` or a tensor on the GPU before it opens the Session.",),
        "Open `hpctrain.Session(…)` before the first use of CUDA.",
    ),
    "HT116": Code(
        "Torch can use no GPU where the job or the other ranks have GPUs.",
        (
            "A container was started without access to the GPUs.",
            "Torch is a build for CPUs, or the driver is too old for it.",
            "The hosts are not alike, or the GPU of one host has failed.",
        ),
        "Run `nvidia-smi` and `hpctrain doctor` on that host. To train on the CPU, use "
        "`env CUDA_VISIBLE_DEVICES= python SCRIPT`.",
    ),
    "HT117": Code(
        "The limit on open files is too low for this number of ranks.",
        ("The hard limit of slurmd or of the login is lower than the number of ranks needs.",),
        "Ask for a higher limit: LimitNOFILE of slurmd, or /etc/security/limits.conf. "
        "`ulimit -Hn` shows the limit.",
    ),
    "HT118": Code(
        "This process runs on a host that does not belong to its job.",
        ("The shell of salloc is on a login node, and a script was started there without srun.",),
        "Type `hpctrain run SCRIPT` in that shell: it starts the ranks on the hosts of the job. To "
        "train on this host all the same, use `env HPCTRAIN_LAUNCHER=none COMMAND`.",
    ),
    "HT119": Code(
        "An installed package adds a launcher, a backend or a tracker that cannot be used.",
        (
            "The package needs another one, or another version of hpctrain.",
            "Two packages, or a package and hpctrain, have one of the same name.",
        ),
        "Install another version of the package, or remove it with `pip uninstall PACKAGE`. "
        "docs/architecture.md says how such a package is made.",
    ),
    # Rendezvous and start of the ranks.
    "HT201": Code(
        "Ranks did not connect to rank 0, or were lost before the start was complete.",
        (
            "A rank ended with an error before it opened the Session.",
            "A host or its file system is slow, and the imports take longer than the timeout.",
            "A host has failed, or the network does not reach rank 0.",
        ),
        "Look for the first error in the logs of the ranks that the message names. Use a longer "
        "--start-timeout for a slow file system.",
    ),
    "HT202": Code(
        "A rank did not find rank 0.",
        (
            "Rank 0 ended with an error, or has not opened the Session.",
            "Rank 0 is on another host, or its name does not resolve here.",
            "A firewall blocks the port, or the ranks have different HPCTRAIN_SECRET.",
        ),
        "Look for the first error in the log of rank 0. If rank 0 is on another host or has "
        "another name, use `export HPCTRAIN_MAIN_ADDRESS=HOST` on all ranks.",
    ),
    "HT203": Code(
        "The other ranks cannot learn where rank 0 is.",
        (
            "The launcher gives neither the address of rank 0 nor the hosts.",
            "Rank 0 cannot write its address to the shared folder or to the launcher's store.",
        ),
        "Use `export HPCTRAIN_MAIN_ADDRESS=HOST` with the host of rank 0, the same on all ranks.",
    ),
    "HT204": Code(
        "Rank 0 found no free port to listen on.",
        (
            "Another start or program on this host uses the port that was given.",
            "The port is below 1024 and needs root.",
        ),
        "Choose a free port on the host of rank 0, the same on all ranks: MASTER_PORT, "
        "HPCTRAIN_MAIN_PORT or `hpctrain run --main-port PORT`.",
    ),
    "HT205": Code(
        "Two processes have the same rank of one start.",
        (
            "Two manual starts use the same MASTER_PORT or --main-port.",
            "A rank was started twice, or two hosts have the same RANK or --node-rank.",
        ),
        "Start each rank once. Give each start a port or an HPCTRAIN_SECRET of its own.",
    ),
    "HT206": Code(
        "The ranks contradict each other about the number of ranks or their local ranks.",
        (
            "LOCAL_RANK was exported as the rank, and not as the place on the host.",
            "WORLD_SIZE or --nproc-per-node differs between the hosts.",
            "Two hosts have the same host name.",
        ),
        "Run `hpctrain explain` in place of the script on all ranks, and correct the variables. "
        "Where two hosts have one name, set HPCTRAIN_HOSTNAME on each.",
    ),
    "HT207": Code(
        "The network interface that was chosen cannot be used.",
        (
            "HPCTRAIN_INTERFACE or GLOO_SOCKET_IFNAME names an interface that this host lacks.",
            "The interface has no address, or is loopback although there are several hosts.",
        ),
        "Use `export HPCTRAIN_INTERFACE=NAME` with an interface that the other hosts reach. Or "
        "unset both variables: the ranks then find one by themselves.",
    ),
    "HT208": Code(
        "The ranks have different versions of hpctrain, torch, CUDA, NCCL or Horovod.",
        (
            "The environment is a local copy on each host, and one copy is older.",
            "A module was loaded on the submitting host only.",
        ),
        "Load one environment on all hosts in the batch script, or put it on a file system that "
        "all hosts see.",
    ),
    "HT209": Code(
        "The ranks run different scripts, or have different options that decide the training.",
        (
            "The command line depends on the host or on the rank.",
            "One step starts two programs, as with `srun --multi-prog`.",
        ),
        "Start all ranks with one command line. Give each of several programs an srun or an "
        "HPCTRAIN_SECRET of its own.",
    ),
    "HT210": Code(
        "A host of the job cannot be used.",
        ("Slurm has taken the host out of the job.",),
        "Run `scontrol show node HOST` or `ssh HOST true` to see the reason, and submit the job "
        "without the host.",
    ),
    "HT211": Code(
        "The hosts of a job of PBS, LSF or Flux cannot be read, or their launcher is missing.",
        (
            "No module of MPI is loaded, so mpirun is not in PATH.",
            "The file of PBS with the job's hosts is not readable here.",
        ),
        "Load a module of MPI before the command, or start the ranks of each host with "
        "`hpctrain run --node-rank`.",
    ),
    "HT212": Code(
        "The system cannot start the process of a rank.",
        (
            "The limit on processes or open files is reached.",
            "The machine or the job has too little memory.",
            "In an elastic start in a Slurm job, srun is not in PATH.",
        ),
        "Start fewer ranks, or raise the limits with `ulimit -u` and `ulimit -n`.",
    ),
    "HT213": Code(
        "The number of ranks for a start is not valid.",
        (
            "The number of values in --nproc-per-node is not the number of nodes.",
            "Several `hpctrain run` of one start have different values of --nproc-per-node.",
            "There would be more than 1024 ranks on one machine.",
        ),
        "Correct the option, as in `--nodes 2 --nproc-per-node 2,1`.",
    ),
    "HT214": Code(
        "An argument of hpctrain.spawn has the wrong type or value.",
        (
            "The argument `args` is a single value, and not a tuple or list.",
            'The argument `nproc` is not "auto" or a whole number from 1 on.',
            "The first argument is the result of a call, and not the function.",
        ),
        "Write the call as in `hpctrain.spawn(FUNCTION, 2, args=(ARGUMENT,))`.",
    ),
    "HT215": Code(
        "hpctrain.spawn was called inside of a rank.",
        (
            "The call is at the top level of a module that the ranks import.",
            "A launcher already started several ranks of the script.",
        ),
        'Put the call under `if __name__ == "__main__":`. Where a launcher starts the ranks, call '
        "the function itself.",
    ),
    "HT216": Code(
        "An object cannot be sent between hpctrain.spawn and its ranks, because pickle refuses it.",
        (
            "The function uses an open file, a lock, a generator or a connection from outside.",
            "The function returns such an object.",
        ),
        "Make such objects inside of the function. Return only numbers, texts, lists, arrays and "
        "tensors.",
    ),
    "HT217": Code(
        "A rank of hpctrain.spawn failed, or ended before the function returned.",
        (
            "The function raised an error: its last lines are in the message.",
            "The system killed the rank, often because the memory was full.",
            "The function called sys.exit, or a stop signal ended the training.",
        ),
        "Read the last lines of that rank in the message, and correct the error there.",
    ),
    # Backends: communication between the ranks.
    "HT218": Code(
        "A host cannot copy code, an environment or data to its own disk.",
        (
            "The disk of the host is full, or this user may not write there.",
            "A file was removed since the job was submitted, or the archive is damaged.",
        ),
        "Look at the free space with `df -h`, or choose another folder with `export TMPDIR=DIR`.",
    ),
    "HT301": Code(
        "The backend cannot work with this number of processes, or without a GPU.",
        (
            "The launcher started several ranks, and `single` and `dataparallel` are one process.",
            "The backend is `dataparallel`, and torch sees no GPU.",
        ),
        "Use `--backend ddp` for several ranks, or start one process. "
        "Use `--backend single` without a GPU.",
    ),
    "HT303": Code(
        "The backend and the launcher give this process different ranks or numbers of ranks.",
        (
            "Horovod was built with another MPI than that of the `mpirun` that started the ranks.",
            "The variables from which hpctrain reads the rank belong to another start.",
        ),
        "Run `hpctrain explain` in place of the script, and look where its numbers come from. "
        "Over MPI, run `hpctrain horovod build --mpi`, or set `HOROVOD_CONTROLLER=gloo`.",
    ),
    "HT304": Code(
        "A rank cannot open the store in which the ranks exchange their addresses.",
        (
            "Rank 0, or torchrun's agent that has the store, ended with an error.",
            "A firewall blocks the port, or the host cannot be reached.",
        ),
        "Read the first error in the log of rank 0 or of torchrun. "
        "Then check whether its host can be reached.",
    ),
    "HT305": Code(
        "A rank was lost after the rendezvous, before all ranks were connected.",
        (
            "The process of that rank ended with an error, or something killed it.",
            "Its host or the network failed.",
            "The rank needed longer than `--start-timeout`.",
        ),
        "Read the first error in the log of that rank, and check whether its host can be reached.",
    ),
    "HT306": Code(
        "The library of the backend did not connect this rank to the others.",
        (
            "A firewall blocks connections between the hosts.",
            "The ranks use a network interface that other hosts cannot reach.",
            "Connecting took longer than `--start-timeout`.",
        ),
        "Run `hpctrain doctor` in place of the script. Allow connections between the hosts, or set "
        "`HPCTRAIN_INTERFACE` to an interface that all hosts reach.",
    ),
    "HT307": Code(
        "Horovod cannot use the address of a host.",
        (
            "The host's own name has a loopback address such as 127.0.1.1, or no address.",
            "Rank 0 has an IPv6 address, and Horovod supports only IPv4.",
        ),
        "For the name, run `hpctrain horovod build`, or correct /etc/hosts. "
        "For IPv6, set `HPCTRAIN_INTERFACE` to an interface with an IPv4 address.",
    ),
    "HT308": Code(
        "This process has already started the library of the backend.",
        (
            "The script calls `init_process_group()` or `hvd.init()`.",
            "An earlier Session is still open.",
            "The process had a Session over Horovod and MPI before, and MPI starts only once.",
        ),
        "Remove the call from the script, or close the earlier Session first. "
        "For several Sessions over Horovod, set `HOROVOD_CONTROLLER=gloo`.",
    ),
    "HT309": Code(
        "This rank lost the connection to another rank, or another rank failed.",
        (
            "The other rank ended with an error, or something killed it.",
            "A host or the network failed.",
            "A rank did not answer within `--timeout`.",
        ),
        "Read the first error in the logs of the other ranks, and check their hosts. In a job, "
        "`hpctrain run` starts the ranks again by itself. Else start again with `--resume`.",
    ),
    "HT310": Code(
        "Some trained parameters got no gradient, so `ddp` cannot finish the exchange.",
        (
            "The loss does not depend on a part of the model.",
            "The ranks or the steps use different parts of the model.",
            "The script replaced layers of the model after `session.prepare()`.",
        ),
        "Set `requires_grad_(False)` for a part that is not trained. For a part that some steps "
        "leave out, use `--ddp-find-unused-parameters` or "
        "`--backend horovod`.",
    ),
    "HT311": Code(
        "Options of the backend do not work together, or a value of one is too small.",
        (
            "An option excludes the other option in the message.",
            "An option has no effect without the other option in the message.",
            "`--ddp-powersgd-start` is below 2.",
        ),
        "Leave out one of the two options, or use the value that the message shows.",
    ),
    "HT312": Code(
        "The backend cannot average gradients of this type with these options.",
        (
            "The model has sparse gradients, from `nn.Embedding(…, sparse=True)`.",
            "The parameters have a type that the compression or Horovod does not support.",
            "The parameters have several types.",
        ),
        "Leave out the option in the message, such as `--ddp-compression`. "
        "Or use dense gradients, and parameters in fp32.",
    ),
    "HT313": Code(
        "PowerSGD or Adasum is used with a precision that has a loss scale.",
        ("`--precision fp16`, O1 or O2, where steps may overflow.",),
        "Use `--precision bf16`, which has no loss scale.",
    ),
    "HT314": Code(
        "Adasum does not support this number of ranks, or this connection.",
        (
            "The number of ranks is not a power of two.",
            "Horovod runs over gloo, and Adasum needs MPI.",
        ),
        "Use 2, 4, 8, … ranks, started by `mpirun`, with a Horovod from "
        "`hpctrain horovod build --mpi`. Or use `--horovod-op average`.",
    ),
    "HT315": Code(
        "Horovod is not installed, or cannot be imported.",
        (
            "Horovod is not installed for this Python.",
            "The installed Horovod was built for another release of torch.",
        ),
        "Run `hpctrain horovod build`, or use `--backend ddp`.",
    ),
    "HT316": Code(
        "The installed Horovod or torch lacks a part that this start needs.",
        (
            "Horovod was built without gloo or without MPI.",
            "The installed torch has no NCCL, which `--ddp-compression bf16` needs.",
        ),
        "Run `hpctrain horovod build`, with `--mpi` where the start needs MPI. "
        "Without NCCL, use `--ddp-compression fp16`.",
    ),
    "HT317": Code(
        "Two prepared models share parameters, which Horovod would average twice.",
        ("The script prepares two modules separately, and one uses weights of the other.",),
        "Put both into one module, and pass it to `session.prepare()`.",
    ),
    # Precision, optimizers and Apex.
    "HT401": Code(
        "The precision does not have this option.",
        (
            "`--loss-scale` is set with a precision that has no loss scale, such as bf16.",
            "`--keep-batchnorm-fp32` is set, and the weights are not in half precision.",
        ),
        "Leave the option out, or choose a precision that has it.",
    ),
    "HT402": Code(
        "The device does not support TF32.",
        (
            "The rank runs on a CPU.",
            "The GPU is older than NVIDIA's Ampere (compute capability 8.0).",
        ),
        "Use `--precision fp32`, or a newer GPU.",
    ),
    "HT403": Code(
        "The script sets TF32 itself by torch's `fp32_precision`, so the Session cannot set it.",
        ("The script or a library sets `fp32_precision` of `torch.backends` before the Session.",),
        "Remove these lines, and choose with `--precision tf32` or `--precision fp32`.",
    ),
    "HT404": Code(
        "The model has weights or buffers in half precision, where fp32 is needed.",
        ("The script calls `model.half()`.", "The model was loaded in half precision."),
        "Pass the model in fp32, without `model.half()`. "
        "For weights in half precision, choose O2 instead.",
    ),
    "HT405": Code(
        "The master weights or averages in the checkpoint belong to other models.",
        (
            "The models in the script have changed since the checkpoint.",
            "The start has another `--keep-batchnorm-fp32` than the start before.",
            "The script prepares its models in another order.",
        ),
        "Resume with the script and the options that wrote the checkpoint. "
        "Or start a new run with another `--run-dir`.",
    ),
    "HT406": Code(
        "A setting of an optimizer, a schedule or an average of the weights is not allowed.",
        (
            "A number is outside of its range.",
            "The name of the schedule or of the scaling is unknown.",
            "`--lr-min` does not fit the schedule, or is above the rates of the optimizers.",
            "Nesterov momentum is on, and the momentum is 0.",
        ),
        "Use a value that the message shows.",
    ),
    "HT407": Code(
        "LARS or LAMB got a sparse or complex gradient.",
        (
            "The model has an `nn.Embedding(…, sparse=True)`.",
            "The model has complex parameters.",
        ),
        "Use dense, real gradients, or another optimizer for these parameters.",
    ),
    "HT408": Code(
        "Batch norm over all ranks is not possible for this model or this start.",
        (
            "The backend is `dataparallel`, with several GPUs.",
            "A batch norm layer has its own `forward()`, or is lazy and has not seen a batch yet.",
            "`convert_syncbn_model()` was called on a machine without a GPU.",
        ),
        "Use `--backend ddp` and torch's batch norm layers, and run lazy layers on one batch "
        "before `session.prepare()`. Without a GPU, use a Session with `--sync-batchnorm`.",
    ),
    "HT409": Code(
        "The script called `EMA.update()` or `EMA.swapped()` inside of `swapped()`.",
        ("The script trains or evaluates again while the averages are in the models.",),
        "Leave the outer `swapped()` first.",
    ),
    "HT410": Code(
        "The learning-rate schedule needs the length of the training, which has no end.",
        ("The schedule is cosine or polynomial, without `--epochs` and `--max-steps`.",),
        "Set `--epochs N` or `--max-steps N`.",
    ),
    "HT411": Code(
        "The warm-up of the learning rate is not shorter than the training, or is given twice.",
        (
            "`--lr-warmup-epochs` is too large for `--epochs`.",
            "`--max-steps` ends the training early, as in a short test.",
            "`--lr-warmup-steps` was given, and a recipe has `lr_warmup_epochs`, or the reverse.",
        ),
        "Lower the warm-up, or raise `--epochs` or `--max-steps`. Give its length in epochs or in "
        "steps, and set the other to 0.",
    ),
    "HT412": Code(
        "An optimizer has two schedulers of one kind, which a checkpoint cannot tell apart.",
        ("The script creates the same class of torch's schedulers twice for one optimizer.",),
        'Give both a name: `session.run(state={"warm-up": first, "decay": second})`.',
    ),
    "HT413": Code(
        "Apex's amp did not get each model and optimizer exactly once, before it was wrapped.",
        (
            "The script calls another function of amp before `amp.initialize()`.",
            "`amp.initialize()` did not get this optimizer, got it twice, or got another object.",
            "The model was wrapped in DistributedDataParallel or DataParallel before.",
        ),
        "Call `amp.initialize()` once with all models and optimizers, and wrap the models after.",
    ),
    "HT414": Code(
        "An argument of amp has a value that is not supported.",
        (
            "The level is not O0, O1, O2 or O3, such as `02` with a zero.",
            "The argument does not fit the `opt_level`.",
            "`loss_id` is not below `num_losses`.",
        ),
        "Use a value that the message shows, or leave the argument out.",
    ),
    "HT415": Code(
        "The script uses a feature of Apex that hpctrain does not have.",
        (
            "An argument of an optimizer, of amp or of DistributedDataParallel needs the feature.",
            "`optimizer.step()` was called with a closure.",
        ),
        "Leave the argument out, or use what the message shows.",
    ),
    "HT416": Code(
        "`optimizer.step()` was called while the gradients were still scaled.",
        ("The last `amp.scale_loss()` before the step had `delay_unscale=True`.",),
        "Set `delay_unscale=False` for the last backward pass before each step.",
    ),
    "HT417": Code(
        "`amp.load_state_dict()` got a state that is not from `amp.state_dict()`.",
        (
            "The script passes the whole checkpoint.",
            "The script passes the state of the model or of the optimizer.",
        ),
        'Pass the saved result of `amp.state_dict()`, such as `checkpoint["amp"]`.',
    ),
    # Options and data.
    "HT501": Code(
        "A `Session` got a keyword that is no option, or a value that the option does not accept.",
        (
            "A misspelled keyword or value.",
            'A value of another type, such as the text "8" in place of the number 8.',
            "A default of `parser.set_defaults` that the option does not accept.",
            "An option of the script's own, with the name of a training option.",
        ),
        "Use the name and the kind of value that the message shows. `--help` of a script with "
        "`hpctrain.options(recipe=True)` lists all options; their keywords have `_` in place of "
        "`-`. Give an option of the script with another meaning another name.",
    ),
    "HT502": Code(
        "The script adds an option that `hpctrain.options()` has already.",
        ("A script that had options such as --epochs or --lr of its own before it used hpctrain.",),
        "Remove the script's `add_argument` of this option, and use hpctrain's value. For another "
        "default, call `parser.set_defaults`.",
    ),
    "HT503": Code(
        "An option of one backend was given, but the run uses another backend.",
        (
            "A changed --backend, with options of the former backend in the command or the recipe.",
            "--backend auto, which chooses `single` for one rank and `ddp` for several.",
        ),
        "Choose the option's backend with --backend, or leave the option out.",
    ),
    "HT504": Code(
        "`--elastic` was given without `--global-batch`.",
        ("A --batch-size alone: with fewer ranks, the global batch would become smaller.",),
        "Add `--global-batch N`, with a number that all numbers of ranks that may be left divide.",
    ),
    "HT505": Code(
        "The global batch does not fit the number of ranks, the batch size and the accumulation.",
        (
            "Another number of ranks than the command was written for.",
            "--global-batch, --batch-size and --accumulate together, with contradicting values.",
        ),
        "Use the global batch that the message proposes, or another number of ranks. Or leave "
        "--batch-size or --accumulate out, so that hpctrain computes it.",
    ),
    "HT506": Code(
        "An epoch has too few samples or batches for one optimizer step.",
        (
            "A global batch that is larger than the data set.",
            "An --accumulate that is larger than the number of batches of the loader.",
            "A data set or a loader without samples.",
        ),
        "Use a smaller --global-batch or --accumulate, smaller batches, or more samples.",
    ),
    "HT507": Code(
        "`session.loader()` got a data set or an argument that it cannot use.",
        (
            "An argument that the session sets itself, such as `shuffle` or `num_workers`.",
            "A `batch_size` for a training, or a `drop_last` for an evaluation.",
            "An IterableDataset, or another data set without a length.",
        ),
        "Leave the argument out, and use options such as --batch-size and --workers. For another "
        "order or data set, pass a DataLoader of your own to `run.batches()`.",
    ),
    "HT508": Code(
        "Several ranks or loader workers would train with the same samples.",
        (
            "A stream that gives some ranks the same part, such as all ranks of one host.",
            "An IterableDataset with several workers, of which each one reads everything.",
            "A subclass of DataLoader that reads its samples in another way than torch.",
            "A data set whose samples are equal, such as constants for a benchmark.",
        ),
        "Give each rank and each worker its own part, or all ranks the same data, which hpctrain "
        "then divides. Where all ranks are meant to have the same samples, add --same-data.",
    ),
    "HT509": Code(
        "A DataLoader of the script has no batch size, or another one than the session.",
        (
            "A batch size written in the script, besides --batch-size or --global-batch.",
            "A batch size written in the script, with a --lr-scaling that depends on it.",
            "A DataLoader made with `args.batch_size` before the Session is open, when it is None.",
        ),
        "Make the DataLoader after the Session is open, with `session.batches.batch_size`. Or give "
        "the DataLoader's batch size with --batch-size.",
    ),
    "HT510": Code(
        "A data set, or a split of it, was not found.",
        (
            "A misspelled path or name, or a path that this host does not have.",
            "A path one folder too high or too low.",
            "Data that nobody has downloaded or unpacked yet.",
        ),
        "Give the folder that contains the files or the splits with --data PATH. For `hpctrain "
        "shards make`, correct SOURCE or --splits.",
    ),
    "HT511": Code(
        "A file or folder of a data set cannot be read.",
        (
            "A path that this user may not read, or a cache that this user may not write.",
            "A file that was moved or removed after the run had begun.",
            "A file system that has a fault, or that this host has not mounted.",
        ),
        "Look at the path in the message with `ls -l`, on the same host and as the same user. "
        "Restore the file or its permissions, or choose another folder.",
    ),
    "HT512": Code(
        "A tar file of a data set cannot be opened, because the process has too many open files.",
        (
            "A low limit on open files (`ulimit -n`).",
            "A script or a library that keeps many files open.",
        ),
        "Raise the limit with `ulimit -n` before the ranks start. If the hard limit is too low, "
        "ask the administrator for a higher one.",
    ),
    "HT513": Code(
        "A file of a data set is missing or damaged, or does not fit the other files.",
        (
            "A download or a copy that did not come to its end.",
            "A file in another format, such as a compressed tar file or a web server's error page.",
            "Files of several data sets in one folder.",
        ),
        "Fetch or copy the file in the message again. Tar files can also be made again with "
        "`hpctrain shards make`.",
    ),
    "HT514": Code(
        "The download of a data set failed.",
        (
            "A host without a connection to the Internet, such as a compute node.",
            "A server that is not available.",
            "A cache without room for the files.",
        ),
        "Fetch the data set on a host with a connection, such as a login node. Then give its "
        "folder with --data PATH.",
    ),
    "HT515": Code(
        "A package that decodes images, downloads data sets or has models cannot be imported.",
        (
            "An hpctrain that was installed without its extra `vision`.",
            "Another Python environment than the one with the package.",
            "A package that is damaged, or does not fit the installed torch.",
        ),
        "Run `pip install 'hpctrain[vision]'` in the Python environment of the ranks.",
    ),
    "HT516": Code(
        "An image transform or an `ImageSet` got an argument that it cannot use.",
        (
            "A size, scale, ratio, mean or standard deviation outside of its range.",
            "`max_corrupt` with a transform of the script that has no attribute `size`.",
            "A misspelled name of a decoder.",
        ),
        "Correct the argument in the script: the message shows the given and the accepted values.",
    ),
    "HT517": Code(
        "More images cannot be decoded than `max_corrupt` allows (by default none).",
        (
            "A download or a copy that did not come to its end.",
            "A file that has the suffix of an image and another content.",
            "An image with too many pixels to decode it.",
        ),
        "Fetch the file in the message again. If the data set has some corrupt images, allow them "
        "with `ImageSet(…, max_corrupt=N)`, which is --max-corrupt N in examples/imagenet.py.",
    ),
    "HT518": Code(
        "The folder of a split does not contain a folder of image files for each class.",
        (
            "Images without folders of classes, as ILSVRC ships its validation set.",
            "A class without images, or a link to nothing, after an incomplete copy.",
            "A pipe or a device with the name of an image.",
        ),
        "Move, fetch or remove what the message names, so that the layout is SPLIT/CLASS/*.jpg.",
    ),
    "HT519": Code(
        "Two splits have different classes, so a class number would have two meanings.",
        (
            "A folder of a class that is missing in one split, after an incomplete copy.",
            "An additional folder in one split that is no class.",
            "Tar files of the two splits that number the classes differently.",
        ),
        "Give both splits folders with the same names. Make tar files of both from such folders, "
        "with `hpctrain shards make`.",
    ),
    "HT520": Code(
        "A tar file does not have exactly one image and one class number for each sample.",
        (
            "Tar files with several images in a sample, such as a mask beside the photograph.",
            "Tar files without .cls files, or with other text than a class number in them.",
            "Links in the tar file: tar stores a second name of a file as a link.",
        ),
        "Make tar files of KEY.jpg and KEY.cls. `hpctrain shards make` makes them from folders.",
    ),
    "HT521": Code(
        "The index of tar files is damaged, or does not fit the tar files.",
        (
            "Tar files that were replaced, added or removed after the index was made.",
            "A copy of the tar files or of the index that did not come to its end.",
            "A file of another program with the name of the index.",
        ),
        "If the tar files are right, remove the index and run `hpctrain shards index FOLDER`. "
        "Otherwise copy the tar files again.",
    ),
    "HT522": Code(
        "`hpctrain shards make` cannot create TARGET.",
        (
            "A TARGET that exists and is not an empty folder, or that is a mount point.",
            "Another writer of the same TARGET, or the temporary folder of a killed one.",
            "A full disk, or a folder in which this user may not write.",
        ),
        "Choose a new folder with room for all images. Remove the temporary folder in the message "
        "if no other writer uses it.",
    ),
    # Training loop, evaluation and monitoring.
    "HT523": Code(
        "A command line of a training script is wrong, or a value in its recipe.",
        (
            "The name of an option has a typing error, or the option has no value.",
            "The script has an option of its own that is required.",
            "The script has `hpctrain.options()`, and only `hpctrain.options(recipe=True)` has the "
            "option.",
        ),
        "Run the script with `--help`, which lists all options. Or add `recipe=True` to the "
        "script's call.",
    ),
    "HT601": Code(
        "The ranks do not do the same at the same place of the script.",
        (
            "A call such as run.log() or session.sum() is inside of `if session.is_main`.",
            "The loaders of the ranks have different lengths, or one rank leaves its loop early.",
        ),
        "Make the same calls in the same order on all ranks. The message names ranks and lines.",
    ),
    "HT602": Code(
        "A value that is summed or logged is not one number.",
        ("A loss without its mean, a list, or a text was given.",),
        "Give a number or a tensor of one element, such as `loss.mean()`.",
    ),
    "HT603": Code(
        "session.classification() got inputs that it cannot score.",
        (
            "The number of classes is not that of the model's output.",
            "Targets are not int64 classes, or lie on another device.",
            "No rank had a sample.",
        ),
        "Pass logits of shape (N, C) and classes of shape (N,), as session.loader() gives them.",
    ),
    "HT604": Code(
        "A part of a manual loop interferes with session.step().",
        (
            "The script calls loss.backward() besides session.step(loss).",
            "loss.backward() is called under a loss scale, or while micro-batches accumulate.",
            "clip_grad_norm_() of torch gets gradients with a loss scale, or applied ones.",
        ),
        "Call session.step(loss) alone. Or call session.backward(loss), "
        "session.clip_grad_norm_(…), optimizer.step() and optimizer.zero_grad().",
    ),
    "HT605": Code(
        "A call is at the wrong place of the training loop.",
        (
            "The batches do not come from run.batches().",
            "run.batches() is called twice in one epoch.",
            "run.save() is called while a step is not complete.",
            "No optimizer stepped in the batches of an epoch.",
        ),
        "Write `for epoch in run.epochs(): for batch in run.batches(loader): …`, and call "
        "run.save() after a complete step.",
    ),
    "HT606": Code(
        "A model or an optimizer was not prepared, or cannot be prepared.",
        (
            "session.prepare() was not called.",
            "The optimizer has parameters of no prepared model.",
            "session.prepare() got something else, such as a loader.",
        ),
        "Call `model, optimizer = session.prepare(model, optimizer)`, with all trained parameters "
        "in the model.",
    ),
    "HT607": Code(
        "An optimizer cannot be used in this way.",
        (
            "session.step() gets an optimizer that needs a closure, such as LBFGS.",
            "optimizer.step(closure) is called under a loss scale, or with accumulation.",
            "session.step(loss, optimizer) is used together with --accumulate.",
        ),
        "For a closure: optimizer.step(closure), with session.backward(loss) in the closure, in "
        "bf16 or fp32. For several losses: session.backward() for each, and the optimizers' own "
        "step() and zero_grad().",
    ),
    "HT608": Code(
        "session.step() or session.backward() did not get a loss.",
        (
            "The loss has one value for each sample.",
            "The loss is detached, or was computed under torch.no_grad().",
        ),
        "Pass the mean loss of the micro-batch: a tensor of one element that has a gradient.",
    ),
    "HT609": Code(
        "--compile needs a C++ compiler on this host.",
        ("No compiler is installed, or its module is not loaded.",),
        "Install or load g++, or leave --compile out.",
    ),
    "HT610": Code(
        "The learning-rate schedule does not fit the script.",
        (
            "The script has a scheduler, and an option asks for a second one.",
            "The scheduler was made before session.prepare().",
            "The loader has no length, and the schedule needs the steps of an epoch.",
            "Groups of parameters have `lr_scale`, which only timm's schedulers apply.",
        ),
        "Keep one schedule, and make it after session.prepare(). If the loader has no length, set "
        "--max-steps, and --lr-warmup-steps in place of --lr-warmup-epochs.",
    ),
    "HT611": Code(
        "The ranks have different data sets, or different orders of one.",
        (
            "The copies of the data set on the hosts differ.",
            "A sampler of the script with a generator of its own that no rank seeds, or each rank "
            "with another seed.",
        ),
        "Copy the same files to all hosts. Compare the number of files and classes. Seed the "
        "generator of the sampler alike on all ranks.",
    ),
    "HT612": Code(
        "The ranks have different weights after a step.",
        (
            "A part of the model is used outside of session.step().",
            "An optimizer was made of parameters that were not prepared.",
            "The script changes weights on one rank only.",
        ),
        "Let session.step() do all updates. docs/pitfalls.md shows the usual mistakes.",
    ),
    "HT613": Code(
        "The loss or the weights are no longer finite.",
        (
            "The learning rate is too high, or has no warm-up.",
            "Gradients overflow in fp16.",
            "The data has NaN or infinite values.",
        ),
        "Resume with a lower --lr, with --lr-warmup-epochs or --clip-norm, or in bf16 or fp32.",
    ),
    "HT614": Code(
        "The end of the training is not set, or cannot be reached.",
        (
            "Neither --epochs nor --max-steps is set.",
            "--max-steps is below the step at which the run resumes.",
            "An epoch has no batch.",
        ),
        "Set --epochs or --max-steps, and check that the loader has samples.",
    ),
    "HT615": Code(
        "The GPU of a rank cannot be used.",
        (
            "Another process uses it exclusively.",
            "It has failed, or its driver does not fit torch.",
        ),
        "Run nvidia-smi and hpctrain doctor on that host.",
    ),
    "HT616": Code(
        "session.run(state=…) has an object that a checkpoint cannot hold, or a resume not fill.",
        (
            "A number or text was given, which nobody can change in place.",
            "An object of the script has no state_dict() or no load_state_dict().",
        ),
        'Give a dict that holds the value: `mine = {"best": 0.0}` and `state={"mine": mine}`.',
    ),
    "HT617": Code(
        "The run directory cannot be made, read or written.",
        ("The path is a file, or belongs to another user.", "The file system is full."),
        "Choose another directory with --run-dir, or make room.",
    ),
    "HT618": Code(
        "The run directory belongs to something else.",
        (
            "An earlier run is in it, and --resume was not given.",
            "It has files of another kind.",
        ),
        "Use --resume to continue that run, or another --run-dir.",
    ),
    "HT619": Code(
        "The job was started again too often without a new checkpoint.",
        (
            "The script fails at the same step each time.",
            "The time limit is shorter than the time from one checkpoint to the next.",
        ),
        "Find the first error in the logs, save more often, or ask for more time. Then submit the "
        "job again with --resume.",
    ),
    "HT620": Code(
        "The resumed run has another global batch or number of ranks.",
        ("The job was submitted with other options or another number of nodes.",),
        "Use the same values, or --elastic to continue with another number of ranks.",
    ),
    "HT621": Code(
        "The checkpoint does not fit the models and optimizers of the script.",
        ("The script was changed after the run began.",),
        "Use the script that began the run, or another --run-dir for a new one.",
    ),
    "HT622": Code(
        "The ranks do not find the same checkpoint.",
        ("The run directory is not on a file system that all hosts share.",),
        "Put the run directory on a shared file system, with --run-dir.",
    ),
    "HT631": Code(
        "A collective of the session, such as session.all_reduce(), got a wrong argument.",
        (
            "A number, a text or a list was given, and no tensor.",
            "A mean of whole numbers, or a maximum of complex numbers.",
            "The rank that is the source does not exist.",
        ),
        "Give a tensor, and convert it first where the message says so. session.sum() sums "
        "numbers, and session.gather_object() takes any object.",
    ),
    "HT651": Code(
        "A Python package that draws or records metrics cannot be imported.",
        (
            "hpctrain was installed without the extra that has the package.",
            "The command runs with another Python than the one that has the package.",
            "The package is installed, and its import fails.",
        ),
        "Run the `pip install 'hpctrain[…]'` of the message with the Python of the run.",
    ),
    "HT652": Code(
        "`--track` names a tracker that does not exist.",
        (
            "A spelling mistake.",
            "An empty name, as in `--track tensorboard,`.",
            "The package that adds the tracker is not installed in the environment of the run.",
        ),
        "Give one or several of tensorboard, wandb, mlflow and the trackers of other installed "
        "packages, separated by commas.",
    ),
    "HT653": Code(
        "`--profile` is no range of steps.",
        (
            "One number in place of two.",
            "The first number is not less than the second.",
        ),
        "Give two numbers, as in `--profile 20:25`: the trace begins after 20 steps and ends "
        "after 25.",
    ),
    "HT654": Code(
        "`hpctrain report` cannot write the page to that name.",
        (
            "The name does not end in .html.",
            "The folder does not exist, is not writable, or has no space left.",
            "A file that is no report has this name. Such a file is never replaced.",
        ),
        "Choose another file: `--output FILE.html`.",
    ),
    "HT655": Code(
        "The path does not lead to a run directory.",
        (
            "A spelling mistake, or another working directory.",
            "The folder contains runs and is no run itself: a run directory has a run.json.",
        ),
        "Run `hpctrain status`, which lists the runs below ./runs, and give one of these paths.",
    ),
    "HT656": Code(
        "A run directory, or one of its files, cannot be read.",
        (
            "The run belongs to another user.",
            "The path is a file and no folder, or a file of the run is no regular file.",
            "The file system returns an error.",
        ),
        "Look at the owner and the permissions with `ls -l`, and ask the owner for permission.",
    ),
    "HT657": Code(
        "The process of a rank ended without leaving the run, and the other ranks waited for it.",
        (
            "The kernel killed the process because the host or the job had no memory left.",
            "A user, the scheduler or a signal killed the process.",
            "The process crashed in C code.",
        ),
        "Look at the end of the log of the rank in logs/ of the run directory, and at the log of "
        "the system. After a lack of memory, use a smaller batch or fewer loader workers.",
    ),
    "HT658": Code(
        "The process of a rank is stopped, so that the run had no progress for `--timeout` "
        "seconds.",
        (
            "Ctrl-Z or `kill -STOP`.",
            "A debugger that is attached to the process.",
        ),
        "Find what stopped the process, and start the run again with `--resume`. "
        "For work with a debugger, set a longer `--timeout`.",
    ),
    "HT659": Code(
        "A rank gave no heartbeat for `--timeout` seconds, in a place in which it does not wait "
        "for other ranks, or behind the others.",
        (
            "The script computes or loads for longer than `--timeout`.",
            "A file system or a device does not respond (state D).",
            "A deadlock or an endless loop in the script or in a library.",
        ),
        "Look at the stack of the rank, which shows the place. "
        "If the place may take so long, give a longer `--timeout`.",
    ),
    "HT660": Code(
        "The ranks waited for each other, or for ranks without a heartbeat, for `--timeout` "
        "seconds.",
        (
            "The network between the hosts does not carry the data.",
            "A host is down, cannot be reached, or does not share the run directory.",
            "One rank hangs inside its backward pass.",
        ),
        "Look at the stacks of all ranks, which show the place. "
        "Check the network with `hpctrain doctor`, started as the run was.",
    ),
    "HT661": Code(
        "The ranks do different things, so that none of them can continue.",
        (
            "The ranks have different numbers of batches or steps.",
            "One rank leaves the loop alone, with `break` or `return`.",
            "A save, a log or an evaluation of all ranks is under `if session.is_main`.",
        ),
        "Give all ranks as many batches, and let all of them break, save, log and evaluate.",
    ),
    # Run directories and checkpoints.
    "HT701": Code(
        "A file in the run directory cannot be read.",
        (
            "A file that was edited manually, or that was copied incompletely.",
            "A file that this user may not read.",
            "A folder, a pipe or a device in place of the file.",
        ),
        "Correct or remove the file in the message. Or choose another directory with --run-dir.",
    ),
    "HT702": Code(
        "The lock file of the run directory cannot be written or read.",
        (
            "A directory in which this user may not write, or a path through a file.",
            "A full disk, or a quota that is used up.",
            "A file system that is not available.",
        ),
        "Look at the path in the message with `ls -l`, on the host of rank 0. Restore its "
        "permissions, make room, or choose another directory with --run-dir.",
    ),
    "HT703": Code(
        "Another start has the run directory, or may have it.",
        (
            "An earlier start of the same run that has not ended.",
            "Several starts with the same --run-dir at the same time.",
            "A start on another host that died less than five minutes ago, or a foreign `.lock`.",
        ),
        "Choose another directory with --run-dir, or end the other start. Remove `.lock` only if "
        "no other start is alive.",
    ),
    "HT704": Code(
        "Another start took over the run directory, so this start commits no more checkpoints.",
        (
            "A job that Slurm requeued while its former start still ran on a disconnected host.",
            "A start without a heartbeat for five minutes, which another start then replaced.",
            "A `.lock` that was removed or replaced manually.",
        ),
        "Leave the run to the newer start. When that has ended, continue with --resume.",
    ),
    "HT705": Code(
        "A checkpoint could not be written; the earlier checkpoints are unchanged.",
        (
            "A full disk, or a quota that is used up.",
            "A run directory that was removed, or in which this user may not write.",
            "A file system with a fault, or a limit on the size of files.",
        ),
        "Make room, or remove the cause that the message names. Where the run has ended, start it "
        "again with --resume.",
    ),
    "HT706": Code(
        "A state_dict contains a value that no checkpoint could give back.",
        (
            "A number of NumPy's in the state of a model, an optimizer or another object.",
            "An object of a class of the script.",
            "Tensors of different types that share memory.",
        ),
        "Change `state_dict()` so that it returns tensors and plain values, such as `float(x)` for "
        "a number of NumPy's.",
    ),
    "HT707": Code(
        "A checkpoint was changed or damaged after it had been written, or cannot be read.",
        (
            "A copy of the run directory that did not come to its end.",
            "A fault of the disk or of the file system.",
            "A checkpoint in the format of another version of hpctrain.",
        ),
        "Restore the checkpoint from a copy, or use another one. If none is complete, start over "
        "in another directory with --run-dir.",
    ),
    "HT708": Code(
        "A checkpoint in the run directory belongs to another run.",
        (
            "A checkpoint that was copied from another run directory.",
            "A run.json that was changed or replaced manually.",
        ),
        "Move the checkpoint back to its run directory. To begin with the weights of another run, "
        "use --init-from.",
    ),
    "HT709": Code(
        "The run directory has no checkpoint that `hpctrain export` can use.",
        (
            "A --step without a checkpoint, as only the newest checkpoints are kept.",
            "A --best with a metric that the checkpoints do not have.",
            "A directory of a run that has saved nothing, or whose checkpoints are all damaged.",
        ),
        "List the checkpoints with `ls RUN_DIR/checkpoints`, and choose one with --step N.",
    ),
    "HT710": Code(
        "The checkpoint has no averages of the weights for `hpctrain export --ema`.",
        ("A run without --ema.",),
        "Leave --ema out, or export a run that was started with --ema.",
    ),
    "HT711": Code(
        "The package safetensors cannot be imported.",
        (
            "A Python environment without the package.",
            "A package that is damaged, or does not fit the installed torch.",
        ),
        "Run `python -m pip install safetensors` in this Python environment.",
    ),
    "HT712": Code(
        "`hpctrain export` could not write its file.",
        (
            "A folder that does not exist, or in which this user may not write.",
            "A full disk, or a quota that is used up.",
            "Weights that safetensors cannot store, such as sparse tensors.",
        ),
        "Choose a file in an existing folder with room, which `df -h FOLDER` shows.",
    ),
    "HT713": Code(
        "The file of `--init-from` cannot be read as weights.",
        (
            "A misspelled path, or a path that this host does not have.",
            "A run directory in place of a file.",
            "A file in another format, or one that needs code of its own to be read.",
        ),
        "Write the weights of a run with `hpctrain export RUN_DIR FILE.safetensors`, and those of "
        "another program with `torch.save(model.state_dict(), FILE)`.",
    ),
    "HT714": Code(
        "The names or shapes of the weights of `--init-from` differ from those of the model.",
        (
            "Weights of another model, or of a model with other sizes.",
            "A model with another last layer, for another number of classes.",
            "A pattern of `--init-skip` that fits no name.",
        ),
        "Use the weights of the same model. To load a part of them, name the others by "
        "`--init-skip 'fc.*'`; the message has the whole line.",
    ),
    # Jobs and commands.
    "HT801": Code(
        "A value of the job is not valid, or two values contradict each other.",
        (
            "A field name has a spelling mistake, or is the name of an option of sbatch.",
            'A value has another type or form than its field, such as `time = "soon"`.',
            "Two fields exclude each other, such as `venv` and `conda`.",
        ),
        "Change each value in the message to what the message expects there.",
    ),
    "HT802": Code(
        "A JOB.toml or site.sh cannot be read.",
        (
            "The path of the JOB.toml is wrong.",
            "The file is not valid TOML, is larger than 1 MiB, or is not UTF-8.",
        ),
        "Correct the path or the file that the message shows.",
    ),
    "HT803": Code(
        "The job has no command.",
        (
            "The command has no `--` before it on the command line.",
            "The JOB.toml has no `command`.",
        ),
        "Type the command after `--`, as in `hpctrain submit --nodes 2 -- python train.py`, or add "
        "`command` to the JOB.toml.",
    ),
    "HT804": Code(
        "The arguments of a command are incomplete, not valid, or do not fit together.",
        (
            "An option needs another option, such as `--node-rank` without `--main-address`.",
            "A number or a code does not exist or is out of range.",
        ),
        "Correct the arguments as the message says. `hpctrain COMMAND --help` lists the options.",
    ),
    "HT805": Code(
        "A file or folder that the job or the command needs is missing, or cannot be used.",
        (
            "The path of the script, of `venv` or of a `stage_…` field has a spelling mistake.",
            "The path is relative to another folder than the current one.",
            "The current folder was deleted, or Python is a copy that belongs to another job.",
        ),
        "Give a path that exists, as seen from the current folder, and that still exists when the "
        "job starts.",
    ),
    "HT806": Code(
        "A program of the job cannot be started.",
        (
            "The command is a Python file without `python` before it.",
            "The whole command is in quotes, so that it is one word.",
        ),
        "Write `python` before a script, and each argument as its own word.",
    ),
    "HT807": Code(
        "The path of a folder has a `%` pattern that cannot be used there.",
        (
            "A folder in `output` has a pattern such as `%j`, which has no value before the "
            "submission.",
            "The path of the current folder has `%j`, `%t`, `%A` or `%a`, which submitit replaces.",
        ),
        "Use such a pattern only in the file name of `output`. Submit from a folder without one.",
    ),
    "HT808": Code(
        "A file exists already, and hpctrain does not overwrite it.",
        ("An earlier command wrote the file.", "You wrote the file yourself."),
        "Choose the name of a new file, or move the old file away.",
    ),
    "HT809": Code(
        "A file or folder cannot be created or written.",
        (
            "You may not write in the folder.",
            "The folder of the file does not exist.",
            "A file stands in place of a folder in the path.",
        ),
        "Choose a path in a folder that exists and in which you may write. Submit jobs from such a "
        "folder.",
    ),
    "HT811": Code(
        "The job has a field that the chosen way to run it does not support.",
        ("A job of submitit has a field such as `array`, `container` or `launcher = torchrun`.",),
        "Remove the field, or submit the job with `hpctrain submit`.",
    ),
    "HT812": Code(
        "submitit cannot be imported.",
        (
            "hpctrain was installed without the extra `submit`.",
            "Another Python environment is active.",
        ),
        "Type `pip install 'hpctrain[submit]'` in the environment of this Python.",
    ),
    "HT813": Code(
        "A call of `hpctrain.submit` or of a job's method has a wrong argument.",
        (
            "`args` is not a tuple or a list.",
            "The function does not take the given `args` and `kwargs`.",
            "`job.logs(RANK)` names a rank that the job does not have.",
        ),
        "Call `hpctrain.submit(FUNCTION, hpctrain.JobSpec(nodes=2), args=(…,))` with the arguments "
        "that the function takes.",
    ),
    "HT814": Code(
        "The function and its arguments cannot be sent to the ranks.",
        (
            "An argument or a global is an open file, a lock, a generator or a connection.",
            "The class of an argument cannot be pickled.",
        ),
        "Create such objects inside the function. Pass only arguments that pickle accepts.",
    ),
    "HT815": Code(
        "The commands of Slurm are not on this host.",
        (
            "The host is not a login node of the cluster.",
            "The module of Slurm is not loaded.",
        ),
        "Log in to a login node, or type `module load slurm`. `hpctrain run` and "
        "`hpctrain.spawn` start ranks on this machine.",
    ),
    "HT816": Code(
        "A command of Slurm is missing, failed, or did not answer in time.",
        (
            "Slurm is down, restarts, or has too much to do.",
            "This host cannot reach Slurm, or does not have its commands.",
            "Slurm refused the command; the message has its reason.",
        ),
        "Check with `scontrol ping` whether Slurm is up, and type the command again later. Before "
        "you submit a job again, check with `hpctrain status` whether Slurm has accepted it.",
    ),
    "HT817": Code(
        "sbatch refused the job.",
        (
            "The cluster does not have a value of the job, such as its partition or GPU type.",
            "The job needs more time, memory or nodes than the partition or the account allows.",
            "sbatch does not know an option in `extra`.",
        ),
        "Change the value that the message names. `hpctrain submit --dry-run` asks Slurm again "
        "without submitting the job.",
    ),
    "HT818": Code(
        "The word does not name exactly one job or run.",
        (
            "The name or the number has a spelling mistake.",
            "The job was submitted from another folder.",
            "Several jobs have this name, or the folder has several jobs in it.",
        ),
        "Type the number of one job, in the folder from which it was submitted. `hpctrain status` "
        "lists your jobs.",
    ),
    "HT819": Code(
        "Slurm knows no job that belongs to this run directory.",
        (
            "The job ended so long ago that Slurm has forgotten it.",
            "The run was started without Slurm.",
            "The name of the folder ends in the number of a job with another run directory.",
        ),
        "Type the number of the job if `hpctrain status` lists it. Else submit the job again with "
        "`--run-dir` and `--resume`.",
    ),
    "HT820": Code(
        "The job or its folder does not belong to you alone.",
        (
            "Another user owns the job or its folder.",
            "Other users may write in the folder, so that its results could run their code.",
        ),
        "Name a job of your own. For a folder of your own, type `chmod go-w FOLDER`.",
    ),
    "HT821": Code(
        "The job cannot be requeued.",
        (
            "The job is already pending, or all tasks of the array are done or cancelled.",
            "Slurm refused the job before its start, so that it would refuse it again.",
            "The job was submitted without `--requeue`, or Slurm does not answer.",
        ),
        "Look at the job with `hpctrain status`. Where a requeue is not possible, submit the job "
        "again with its `--run-dir` and with `--resume`.",
    ),
    "HT822": Code(
        "The function or script failed on a rank.",
        (
            "It raised the exception in the message.",
            "It called `sys.exit` with another code than 0.",
            "Its result cannot be unpickled in this process.",
        ),
        "Correct the error in the message. `job.logs(RANK)` returns the output of the rank.",
    ),
    "HT823": Code(
        "The job ended before each rank had returned a result.",
        (
            "The job reached its time limit, or was cancelled.",
            "The job used more memory than it has, or a host failed.",
            "A rank was killed.",
        ),
        "Submit the job again with the same `run_dir` and with `Session(resume=True)`, and with "
        "more time or memory where the message says so.",
    ),
    "HT824": Code(
        "The command cannot use a file or its standard input.",
        (
            "The file is a JOB.toml or a Python script, and not a batch script.",
            "The file does not exist, is empty, or is not text.",
            "The input is too large: more than 1 MiB for `lint`, more than 16 MiB for `hostlist`.",
        ),
        "Name a batch script, whose first line is `#!/bin/bash`. For `hostlist`, pass fewer names "
        "at once.",
    ),
    "HT825": Code(
        "The tar files of a data set cannot be indexed.",
        (
            "The folder has no tar files with names such as `train-000000.tar`.",
            "You may not read the folder or its tar files.",
            "You may not write in the folder, to which the index belongs.",
        ),
        "Give the folder of the tar files, and check that you may read them and write in it.",
    ),
    # Tools.
    "HT826": Code(
        "The code of a job, as it was at its submission, cannot be written.",
        (
            "The host where the batch script runs has no git.",
            "The repository was removed, or history that the job needs was deleted from it.",
            "The folder runs/.code was removed.",
        ),
        "Submit the job again. With `--live` a job runs the code as it is at each start.",
    ),
    "HT901": Code(
        "`hpctrain bench checkpoint` cannot write a checkpoint of this size here.",
        (
            "The file system or the memory has too little room for the state and its copies.",
            "The directory is not writable, or a quota is used up.",
        ),
        "Give a smaller `--size`, or `--run-dir DIR` on another file system.",
    ),
    "HT902": Code(
        "A size of `hpctrain bench` cannot be measured.",
        (
            "`--sizes` of `bench allreduce` has a size that is no multiple of 4 bytes.",
            "`--size` of `bench checkpoint` is too small for the tensors of a state.",
        ),
        "Give another size, such as `--sizes 4,1MB` or `--size 100MB`.",
    ),
    "HT903": Code(
        "`hpctrain bench allreduce` was started with one rank.",
        (
            "The command was started without a launcher.",
            "The job has one task only.",
        ),
        "Start two ranks or more, with `srun -n 2` or `hpctrain run --nproc-per-node 2`.",
    ),
    "HT904": Code(
        "`hpctrain bench` cannot write its results to the file of `--json`.",
        (
            "The folder does not exist or is not writable.",
            "The path is a folder, a device or a pipe.",
            "The file system is full.",
        ),
        "Choose another file: `--json FILE`.",
    ),
    "HT905": Code(
        "A package that the benchmark needs, torchvision or Pillow, cannot be imported.",
        (
            "hpctrain was installed without the extra `vision`.",
            "The hosts have different packages.",
            "The installed torchvision was built for another torch.",
        ),
        "Run `pip install 'hpctrain[vision]'` for the Python of all ranks. "
        "For `bench step`, `--model small` needs no such package.",
    ),
    "HT906": Code(
        "`--model` of `hpctrain bench step` names no model.",
        (
            "A spelling mistake.",
            "The installed torchvision is too old for the model.",
        ),
        "Give the name of a model in torchvision.models, or `--model small`.",
    ),
    "HT907": Code(
        "A step of `hpctrain bench step` does not fit the memory of the device.",
        (
            "The batch is too large for the model and the precision.",
            "Another process uses the memory of the same GPU.",
        ),
        "Give a smaller `--batch-size`. Look at `nvidia-smi` for other processes.",
    ),
    "HT909": Code(
        "`--data` of `hpctrain bench input` has fewer images than one batch of all ranks.",
        (
            "A small data set, many ranks or a large batch.",
            "The path leads to a part of the data set.",
        ),
        "Give a smaller `--batch-size`, or more images with `--data PATH`.",
    ),
    "HT910": Code(
        "The Python that runs `hpctrain horovod build` lacks pip or a working torch.",
        (
            "The virtual environment was made without pip, for example by uv.",
            "torch is not installed for this Python, or its import fails.",
            "Another Python than the one of the training runs hpctrain.",
        ),
        "Activate the environment of the training. Install what the message names in it.",
    ),
    "HT911": Code(
        "`--cuda` or `--mpi` asks for a CUDA toolkit or an MPI that was not found.",
        (
            "The environment module of CUDA or of the MPI is not loaded.",
            "The toolkit has another major version than the CUDA of torch, or torch has no CUDA.",
            "The MPI has no mpicxx: its package for development is not installed.",
        ),
        "Load the module, or set `CUDA_HOME` or `MPI_HOME`. "
        "With `--cpu`, and without `--mpi`, the build needs neither of them.",
    ),
    "HT912": Code(
        "What compiles Horovod is missing or too old: the C++ compiler, make, or the headers of "
        "Python.",
        (
            "No compiler is installed, or its environment module is not loaded.",
            "The compiler of the system does not know the C++ standard of torch's headers.",
            "The package with Python.h is not installed.",
        ),
        "Install the packages of the message, or load the module of a newer GCC.",
    ),
    "HT913": Code(
        "pip could not download Horovod's source or the tools for its build.",
        (
            "The host has no connection to the internet, as compute nodes often have none.",
            "pip does not know the proxy or the mirror of the site.",
        ),
        "Run `hpctrain horovod build --wheel-only` on a login node, or set the proxy or the "
        "mirror for pip.",
    ),
    "HT914": Code(
        "What pip downloaded is not the source package of Horovod's release.",
        (
            "A mirror or an own package index has a changed Horovod.",
            "pip's cache has a changed Horovod.",
        ),
        "Run `pip cache remove horovod`, and look with `pip config list` where pip finds it.",
    ),
    "HT915": Code(
        "The compilation of Horovod failed.",
        (
            "The host or the job has too little memory or disk space for the compilers.",
            "The compiler, CUDA or the MPI does not fit this torch.",
        ),
        "Read the first error in the message and in the log. "
        "Try another compiler, or a build with `--cpu` or without `--mpi`.",
    ),
    "HT916": Code(
        "The cache for wheels of Horovod cannot be written.",
        (
            "The file system of the cache is full, or a quota is used up.",
            "The folder belongs to another user or is read-only.",
        ),
        "Set `HPCTRAIN_CACHE` to a folder with room that you may write to.",
    ),
    "HT917": Code(
        "pip could not install the wheel of Horovod.",
        (
            "The environment is read-only or belongs to the system.",
            "pip could not download a package that Horovod requires.",
        ),
        "Make a virtual environment of your own and run its hpctrain, or build with "
        "`--wheel-only` and install the wheel with `pip install --user`.",
    ),
    "HT918": Code(
        "The Horovod that was installed does not work, or lacks a part that was asked for.",
        (
            "The wheel of the cache was built for other libraries than those of this host.",
            "A library of the build, such as that of CUDA or the MPI, is not found at run time.",
            "The two ranks of the test could not talk to each other.",
        ),
        "Remove the folder of the wheel that the message names, and build again on this host "
        "with the same environment modules.",
    ),
}
