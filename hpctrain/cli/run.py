"""`hpctrain run`: start the ranks of a program where it stands.

The place decides: on a machine without a launcher, ranks here; in a batch script or an allocation's
shell, ranks on all hosts of the job; inside of a rank, the program in its place.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.cli import run_options
from hpctrain.errors import UsageError, exit_codes

if TYPE_CHECKING:
    from hpctrain.launch.job_hosts import JobHosts
    from hpctrain.launch.plan import Plan

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    run_options.add_options(parser)
    parser.set_defaults(command=_reported)


class _Program(NamedTuple):
    """What the ranks run: the command of each, the name of the script, and its arguments."""

    command: list[str]
    name: str
    arguments: list[str]


def _reported(arguments: argparse.Namespace) -> int:
    """Run the command; an error that all tasks of a launcher have is printed by one of them."""
    try:
        return _main(arguments)
    except UsageError as error:
        from hpctrain.rendezvous import shared_errors

        shared_errors.report(error, sys.stderr)
        return error.exit_code


def _main(arguments: argparse.Namespace) -> int:
    from hpctrain.cluster import env_vars
    from hpctrain.cluster.launchers import Process

    program = _program(arguments)
    nproc = arguments.nproc_per_node
    env = Process.current().own(os.environ)
    if arguments.run_dir:
        env[env_vars.RUN_DIR] = env.get(env_vars.RUN_DIR) or arguments.run_dir
    if arguments.fresh_interpreters:
        env[env_vars.FRESH] = "1"
    run_options.check(arguments)
    if arguments.node_rank is not None:
        from hpctrain.launch import starts

        run_options.check_on_one_machine(arguments)

        run_options.check_outside_of_a_job(arguments)
        return starts.on_one_of_several_hosts(
            program.command, nproc or "auto", env, arguments.node_rank, arguments.nodes,
            arguments.main_address, arguments.main_port,
        )  # fmt: skip
    if arguments.nodes is not None or arguments.style is not None:
        run_options.check_outside_of_a_job(arguments)
        return _simulated(arguments, program.command, env)
    return _by_place(arguments, program, env)


def _by_place(arguments: argparse.Namespace, program: _Program, env: Mapping[str, str]) -> int:
    from hpctrain.cluster import env_vars, launchers

    start = launchers.survey()
    name = start.world.launcher
    # The shell of `srun --pty`, or a notebook's kernel under srun, has the variables of a rank.
    shell = name == "slurm" and any(map(env.get, env_vars.OF_A_SHELL))
    nproc = arguments.nproc_per_node
    if name not in ("none", "hpctrain") and not shell:
        run_options.check_outside_of_a_job(arguments)
        run_options.check_on_one_machine(arguments)
        if nproc is None:
            from hpctrain.launch.joined_rank import join

            join(program.command, start, env)
        from hpctrain.launch import starts

        return starts.as_agent(program.command, nproc, env, start)
    from hpctrain.launch import starts

    alone = name == "hpctrain" or env.get(env_vars.LAUNCHER) == "none"
    if start.allocation is not None and start.allocation.scheduler == "slurm" and not alone:
        run_options.check_on_one_machine(arguments)
        return _in_slurm(arguments, program)
    if not alone:
        from hpctrain.launch.in_other_jobs import hosts_of

        hosts = hosts_of(env, nproc)
        if hosts is not None:
            run_options.check_on_one_machine(arguments)
            run_options.check_outside_of_a_job(arguments, run_options.OF_SLURM)
            return _in_other_job(hosts, arguments, program, env)
    run_options.check_outside_of_a_job(arguments, run_options.OF_SLURM)
    if arguments.retry or arguments.max_attempts:
        from hpctrain.launch.in_other_jobs import this_machine

        run_options.check_on_one_machine(arguments)
        return _in_other_job(this_machine(nproc), arguments, program, env)
    return starts.on_this_machine(program.command, nproc or "auto", env, arguments.debug_rank)


def _in_other_job(
    hosts: "JobHosts", arguments: argparse.Namespace, program: _Program, env: Mapping[str, str]
) -> int:
    """Start the ranks on the hosts of a job of another scheduler, which does not requeue it."""
    from hpctrain.launch import starts
    from hpctrain.launch.slurm_job import stop_signals

    with stop_signals(in_batch=True) as received:
        directory = starts.run_directory(program.arguments, program.name, env)
        plan = _plan(arguments, program.command)
        return starts.on_hosts(hosts, plan, directory, env, received)[0]


def _in_slurm(arguments: argparse.Namespace, program: _Program) -> int:
    """Start the ranks on the hosts of the job, and requeue the job if it was stopped."""
    from hpctrain.cluster import env_vars
    from hpctrain.cluster.launchers import Process
    from hpctrain.launch import starts
    from hpctrain.launch.in_slurm import Direct, InSlurm, Once
    from hpctrain.launch.slurm_job import SlurmJob, stop_signals

    own = Process.current().own(os.environ)
    in_batch = own.get("ENVIRONMENT") == "BATCH" and not own.get(env_vars.KERNEL)
    with stop_signals(in_batch) as received:
        job = SlurmJob.here(own, arguments.max_restarts)
        env = dict(job.env)
        setting = _setting(arguments.setting, job.allocation.array_task)
        if "--run-dir" in " ".join(program.arguments) or not (in_batch or arguments.run_dir):
            directory = starts.run_directory(program.arguments, program.name, env)
        else:
            directory = job.run_directory(arguments.run_dir)
        names = tuple(filter(None, (arguments.container_env or "").split(",")))
        for name in names:
            env[f"APPTAINERENV_{name}"] = env.get(name, "")
        command = program.command
        if arguments.code:
            command, env = _frozen(arguments, command, env)
        plan = replace(
            _plan(arguments, [*command, *setting]),
            variables=names,
            label=f"{job.allocation.label}-{job.allocation.restart_count}",
        )
        kind = Direct if arguments.direct else Once if arguments.once else InSlurm
        hosts = kind(env, arguments.nproc_per_node)
        run_options.check_spares(arguments.spares, hosts.names)
        code, reason = starts.on_hosts(hosts, plan, directory, env, received)
        if code == 0 and arguments.finish:
            return _finish(arguments.finish, {**env, env_vars.RUN_DIR: str(directory.absolute())})
        return job.after(code, reason, directory) if in_batch else code


def _finish(lines: str, env: Mapping[str, str]) -> int:
    """Run lines of bash, and return their exit code, as in a shell."""
    code = subprocess.run(["bash", "-e", "-c", lines], env=env, check=False).returncode
    return code if code >= 0 else 128 - code


def _frozen(
    arguments: argparse.Namespace, command: list[str], env: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of ranks that run the code of a snapshot."""
    from hpctrain.cluster.job import submit_folder
    from hpctrain.launch.frozen_program import from_snapshot
    from hpctrain.rundir import frozen_code

    store = submit_folder(env) / frozen_code.STORE
    folder = frozen_code.files(store, arguments.code)
    snapshot = frozen_code.read(store, arguments.code)
    if arguments.stage_code:
        place = snapshot.place_of(arguments.stage_code, folder)
        arguments.stage_code = str(place or arguments.stage_code)
        return command, env  # the copy has the code, and the ranks start there
    return from_snapshot(command, snapshot, folder, env)


def _setting(settings: Sequence[str], index: int | None) -> list[str]:
    """Return the arguments of this task of an array.

    Raises:
        UsageError: there is no setting for it.
    """
    if not settings:
        return []
    if index is None or index >= len(settings):
        found, count = "not set" if index is None else index, len(settings)
        raise UsageError("HT804.setting-missing", count=count, index=found, last=count - 1)
    return shlex.split(settings[index])


def _program(arguments: argparse.Namespace) -> _Program:
    """Return what the ranks run.

    Raises:
        UsageError: there is no program, or the script cannot be read.
    """
    words = list(arguments.program)
    is_program = words[:1] == ["--"]
    words = words[1:] if is_program else words
    if not words:
        raise UsageError("HT805.no-program")
    if is_program and not arguments.module:
        return _Program(words, words[0], words[1:])
    # The Python of a container or of an unpacked environment is the first one in its PATH.
    elsewhere = arguments.container or arguments.stage_environment
    python = "python" if elsewhere else sys.executable
    if arguments.module:
        return _Program([python, "-m", *words], words[0].rpartition(".")[2], words[1:])
    if not (arguments.code or arguments.container):  # else it is in the snapshot or the image
        _check_script(os.path.join(arguments.stage_code or "", words[0]))
    return _Program([python, *words], words[0], words[1:])


def _plan(arguments: argparse.Namespace, command: Sequence[str]) -> "Plan":
    from hpctrain.launch.plan import Plan

    staged = (arguments.stage_code, arguments.stage_environment, arguments.stage_data)
    return Plan(
        command,
        folder="",
        staging=[place or "" for place in staged],
        container=arguments.container or "",
        max_fruitless=arguments.max_attempts or exit_codes.MOST_FRUITLESS,
        plain=arguments.retry,
        elastic=arguments.elastic,
        min_ranks=arguments.min_nproc or 1,
        requeue_plain=arguments.requeue_plain,
        spares=arguments.spares or 0,
    )


def _simulated(
    arguments: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> int:
    from hpctrain.launch import rank_environment, starts

    nodes = arguments.nodes or 1
    gpus = rank_environment.gpus_of(env)
    counts = rank_environment.layout(
        arguments.nproc_per_node or "auto", [len(gpus) // nodes] * nodes
    )
    launcher = run_options.AS[arguments.style or "hpctrain"]
    return starts.simulated(command, counts, env, launcher, gpus, arguments.debug_rank)


def _check_script(script: str) -> None:
    path = Path(script)
    if not script:
        raise UsageError("HT805.empty-script")
    if path.is_dir():
        raise UsageError("HT805.script-is-folder", script=script)
    if not path.exists() and os.environ.get("SLURM_JOB_ID") and not path.is_absolute():
        raise UsageError("HT805.no-script-in-job", script=script, folder=os.getcwd())
    if not path.exists():
        raise UsageError("HT805.no-script", script=script)
    if not os.access(path, os.R_OK):
        raise UsageError("HT805.unreadable-script", script=script)
