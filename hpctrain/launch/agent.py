"""Agent: the process on each host of a start that starts the ranks of its host.

    python -m hpctrain.launch.agent         with a `Plan` in $HPCTRAIN_AGENT
    python -m hpctrain.launch.agent FILE    with a JSON object: the plan, and the environment

The agents find each other by the rendezvous, as ranks do. So each knows all hosts, the number of
ranks on each, and the address of the first host, where the stores for programs without a session
are served. Then each starts the ranks of its host, waits for them, and writes how they ended to a
folder that all hosts share.
"""

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.cluster import env_vars, launchers
from hpctrain.cluster.launchers import RendezvousPoint
from hpctrain.cluster.world import World
from hpctrain.errors import (
    ContradictionError,
    HpctrainError,
    StartError,
    UsageError,
    exit_codes,
)
from hpctrain.launch import cores, host_ends, preflight, rank_environment, supervisor
from hpctrain.launch.containers import apptainer
from hpctrain.launch.host_ends import End, end_of
from hpctrain.launch.host_watch import SECONDS_TO_DETECT, HostWatch
from hpctrain.launch.rank_output import announce
from hpctrain.launch.staging import Staging, staged
from hpctrain.launch.stores import Stores
from hpctrain.process import shared_memory
from hpctrain.rendezvous import Answer, Rendezvous, Roster, meet, shared_errors

__all__ = ["Plan", "main", "run"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the agents of a start do, the same on all hosts.

    Attributes:
        command: program and arguments of each rank.
        nproc: number of ranks of each host, as `rank_environment.layout` takes it.
        folder: folder of this start that all hosts share, with the exit status file, the failure
            records of the ranks and the ends of the agents.
        launch: name of the launcher's run, the same for all its attempts (default: a new one).
        attempt: number of earlier attempts.
        temporary: whether the folder is on this host only, and is removed if this process is
            killed. In a job it is not, and each rank gets cores of its own.
        staging: what each host copies to its own disk: code, environment, data.
        container: image in which the ranks run; empty for none.
        label: label of the job and number of the start, for the folder of the copies.
        waits: whether the ranks wait for a byte of this process's standard input; see `standby`.
        frees: whether the agent frees the copies in memory, and starts no ranks.
    """

    command: Sequence[str]
    nproc: str
    folder: str
    launch: str = ""
    attempt: int = 0
    temporary: bool = False
    staging: Sequence[str] = ("", "", "")
    container: str = ""
    label: str = "0-0"
    waits: bool = False
    frees: bool = False


class UnfitHostsError(StartError):
    """The start on hosts that failed their check.

    Attributes:
        hosts: their names; only on the first host.
    """

    hosts: Sequence[str] = ()


def main() -> int:
    """Run the agent of this host, and return its exit code."""
    if len(sys.argv) > 1:
        record = json.loads(Path(sys.argv[1]).read_text())
        os.environ.update({**record["environ"], env_vars.AGENT: record["plan"]})
        _make_temporary_folder()
    plan = Plan(**json.loads(os.environ[env_vars.AGENT]))
    env = {name: value for name, value in os.environ.items() if name != env_vars.AGENT}
    if plan.frees:
        shared_memory.remove(Path(env[env_vars.MEMORY]))
        return exit_codes.DONE
    try:
        start = launchers.survey()
        cores.widen(env)
        end = run(plan, start.world, start.rendezvous_point, env)
    except HpctrainError as error:
        os.environ[env_vars.EVIDENCE] = plan.folder  # where one of the agents notes that it prints
        shared_errors.report(error)
        usage = error.exit_code == UsageError.exit_code
        unfit = error.hosts if isinstance(error, UnfitHostsError) else ()
        end = End(error.exit_code, 0, usage=usage, unfit=unfit)
        host_ends.write(end, Path(plan.folder), os.uname().nodename)
    return end.code


def _make_temporary_folder() -> None:
    """Make the folder for temporary files, which PBS makes on the first host of a job only.

    PBS removes it on all hosts at the end of the job: tried with OpenPBS 23.06.
    """
    try:
        if os.environ.get("PBS_JOBID") and os.environ.get("TMPDIR"):
            os.makedirs(os.environ["TMPDIR"], 0o700, exist_ok=True)
    except OSError:
        del os.environ["TMPDIR"]


def run(plan: Plan, world: World, point: RendezvousPoint, env: Mapping[str, str]) -> End:
    """Start the ranks of this host, and wait until they have ended.

    Args:
        plan: what to do.
        world: place of this host among the hosts, each of which counts as one rank.
        point: rendezvous point of the agents.
        env: environment to start from.

    Raises:
        UsageError: the numbers of ranks do not fit the hosts.
        ContradictionError: the hosts have different numbers of ranks.
        StartError: not all agents have connected, the system cannot start more processes, or a
            host has failed its check.
    """
    shared_memory.remove_abandoned(env.get(env_vars.MEMORY, ""))
    stores = Stores(bool(world.on_one_host)) if world.rank == 0 else None
    try:
        entry = {
            "gpus": len(rank_environment.gpus_of(env)),
            "nproc": plan.nproc,
            "unfit": None if plan.temporary else preflight.check(Path(plan.folder), env),
            "ports": stores.ports if stores else None,
        }
        met = meet(
            world, point, entry, announce=announce, check=_check_hosts, noun="host", option=""
        )
        if stores is not None:
            stores.serve(env_vars.scrubbed(env))
        end = _watched(plan, met, point, env)
        if stores is not None:
            end = replace(end, connected=stores.used)
    finally:
        shared_memory.keep(env.get(env_vars.MEMORY, ""))
        if stores is not None:
            stores.close()
    host_ends.write(end, Path(plan.folder), str(met.world.node_rank))
    return end


def _without(host: str) -> str:
    """Return what to type to leave a host out."""
    if "SLURM_JOB_ID" in os.environ:
        return f"#SBATCH --exclude={host}"
    return f"submit the job without {host}, with the scheduler's own option"


def _check_hosts(roster: Roster) -> Answer:
    """Check whether all hosts are fit, and have the same number or list of ranks.

    Returns:
        The GPUs of each host, and the ports of the stores on the first one.

    Raises:
        UnfitHostsError: hosts have failed their check.
        ContradictionError: two hosts differ.
    """
    unfit = {entry["host"]: entry["unfit"] for entry in roster.entries if entry["unfit"]}
    if unfit:
        error = UnfitHostsError(
            "HT219",
            "; ".join(f"{host}: {found}" for host, found in unfit.items()),
            "hosts with the GPUs, the memory and the disks that a training needs",
            *(_without(host) for host in unfit),
        )
        error.hosts = list(unfit)
        raise error
    first = roster.entries[0]
    for entry in roster.entries:
        if entry["nproc"] != first["nproc"]:
            raise ContradictionError(
                "HT213",
                f"--nproc-per-node {first['nproc']} on {first['host']}, and {entry['nproc']} on "
                f"{entry['host']}",
                "the same on all hosts",
                "--nproc-per-node 2,1 on both, for two ranks on the first host and one on the "
                "second",
            )
    return Answer(shared={"gpus": [e["gpus"] for e in roster.entries], "ports": first["ports"]})


def _watched(plan: Plan, met: Rendezvous, point: RendezvousPoint, env: Mapping[str, str]) -> End:
    """Run the ranks of this host; end them when another host is lost."""
    if met.world.world_size == 1:
        return _run(plan, met, point, env)
    events: supervisor.Events = queue.SimpleQueue()
    watch = HostWatch(met, lambda: events.put(signal.SIGKILL))
    # When one agent has ended, srun ends the others, which still have to find out which host is
    # lost and to write it.
    before = signal.signal(signal.SIGTERM, lambda number, _: events.put(number))
    try:
        end = _run(plan, met, point, env, events, watch.look)
    finally:
        watch.close()
        if plan.temporary:
            signal.signal(signal.SIGTERM, before)
    if not watch.lost or not end.code:
        return end
    if plan.temporary and (met.world.rank == 0 or watch.lost == met.roster.hosts[0]):
        announce(f"{watch.lost} is lost: it has not answered for {SECONDS_TO_DETECT} s")
    caused = end.first is None or end.first.caused_by_other_rank
    return replace(end, first=None if caused else end.first, lost=watch.lost)


def _run(
    plan: Plan,
    met: Rendezvous,
    point: RendezvousPoint,
    env: Mapping[str, str],
    events: supervisor.Events | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> End:
    world, roster = met.world, met.roster
    if world.num_nodes != world.world_size:
        raise UsageError(
            "HT111",
            f"{world.world_size} tasks on {world.num_nodes} hosts have each started hpctrain run "
            "with --nproc-per-node",
            "one task on each host, or hpctrain run without --nproc-per-node in each task",
            "srun --ntasks-per-node=1 hpctrain run --nproc-per-node N SCRIPT",
            "srun hpctrain run SCRIPT",
        )
    counts = rank_environment.layout(plan.nproc, met.shared["gpus"])
    here = counts[world.rank]
    connection = rank_environment.Connection(
        start=f"{plan.launch or met.nonce}/{plan.attempt}",
        main_address=roster.addresses[0],
        own_address=roster.addresses[world.rank],
        secret=env.get(env_vars.SECRET) or met.nonce,
        ports=tuple(met.shared["ports"]),
        restarts=plan.attempt,
    )
    environs = rank_environment.environs_of_host(world, counts, env, connection)
    more = {env_vars.HOSTNAME: point.host} if point.simulated else {}
    if plan.launch and env_vars.MEMORY in env:
        more[env_vars.MEMORY] = env[env_vars.MEMORY]
    if len(counts) == 1:
        rank_environment.print_threads(env, here)
    elif world.rank == 0 and not plan.waits:
        _print_layout(counts, cores.share(here, env), env)
    name = f"{plan.label}{plan.attempt}"
    with staged(Staging(*plan.staging), name, env) as (own, folder):
        command = list(plan.command)
        if plan.container:
            gpus = met.shared["gpus"][world.rank] > 0
            inside = {**env, **own}
            command = apptainer(command, plan.container, gpus, folder or os.getcwd(), inside)
        outcome = supervisor.run(
            command,
            {rank: {**environ, **more, **own} for rank, environ in environs.items()},
            # Rank 0 writes the first one. By this path in their environment the guard of a host
            # finds its processes, so each host has another one.
            Path(plan.folder) / f"exit-status-{world.rank}",
            labelled=sum(counts) > 1,
            events=events,
            cores=None if plan.temporary else cores.divided(here, env),
            temporary=plan.temporary,
            folder=folder,
            announces=plan.temporary,  # in a job, the supervisor has printed it
            meanwhile=meanwhile,
            stdin=None if plan.waits else subprocess.DEVNULL,
        )
    return end_of(outcome, sum(counts), point.host)


def _print_layout(counts: Sequence[int], share: int, env: Mapping[str, str]) -> None:
    """Print ranks, hosts and cores in one line."""
    each = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    threads = env.get("OMP_NUM_THREADS")
    cores_text = f"{share} core{'s' * (share > 1)}"
    if threads:
        cores_text += f" and OMP_NUM_THREADS={threads}"
    announce(
        f"{sum(counts)} ranks on {len(counts)} hosts, {each} on each; {cores_text} for each rank"
    )


if __name__ == "__main__":
    sys.exit(main())
