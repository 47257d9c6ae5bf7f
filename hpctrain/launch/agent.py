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
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from hpctrain.launch import (
    cores,
    host_ends,
    preflight,
    rank_environment,
    supervisor,
    warm_imports,
)
from hpctrain.launch.containers import apptainer
from hpctrain.launch.host_ends import End, end_of
from hpctrain.launch.host_start import HostStart, Plan
from hpctrain.launch.host_watch import SECONDS_TO_DETECT, HostWatch
from hpctrain.launch.rank_output import announce
from hpctrain.launch.rank_processes import ForkServer, Rank, Started
from hpctrain.launch.staging import staged
from hpctrain.launch.stores import Stores
from hpctrain.rendezvous import Answer, Roster, meet, shared_errors

__all__ = ["main", "run"]

_SECONDS_BETWEEN_LOOKS = 1.0


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

    If the ranks have waited and are not needed, the process exits: with 1 if one has ended, else 0.

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
    stores = Stores(bool(world.on_one_host)) if world.rank == 0 else None
    try:
        entry = {
            "gpus": len(rank_environment.gpus_of(env)),
            "nproc": plan.nproc,
            "unfit": None if plan.temporary else preflight.check(Path(plan.folder), env),
            "ports": stores.ports if stores else None,
        }
        met = meet(
            world, point, entry, announce=announce, check=_check_hosts, noun="node", option=""
        )
        start = HostStart.of(plan, met, point, env)
        started = _waiting_ranks(start, stores) if plan.waits else None
        if started is not None:
            hosts = _hosts_to_begin(started.ranks)
            if met.roster.hosts[met.world.rank] not in hosts:
                code = exit_codes.DONE if hosts or _all_wait(started.ranks) else 1
                started.server.end()
                sys.exit(code)
            start = start.among(hosts)
        end = _watched(start, started, stores)
        if stores is not None:
            end = replace(end, connected=stores.used)
    finally:
        if stores is not None:
            stores.close()
    host_ends.write(end, Path(plan.folder), str(start.met.world.node_rank))
    return end


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
        failures = "; ".join(f"{host}: {reason}" for host, reason in unfit.items())
        key = "HT219.slurm-node-unfit" if "SLURM_JOB_ID" in os.environ else "HT219.node-unfit"
        error = UnfitHostsError(key, failures=failures, nodes=",".join(unfit))
        error.hosts = list(unfit)
        raise error
    first = roster.entries[0]
    for entry in roster.entries:
        if entry["nproc"] != first["nproc"]:
            raise ContradictionError("HT213.nproc-per-node-differs", first=first, entry=entry)
    return Answer(shared={"gpus": [e["gpus"] for e in roster.entries], "ports": first["ports"]})


def _waiting_ranks(start: HostStart, stores: Stores | None) -> Started:
    """Start the ranks of this host, which wait."""
    bound_to = start.cores()
    server = ForkServer(None, stores)
    ranks = [
        server.start(
            rank,
            start.plan.command,
            environ,
            bound_to[index] if bound_to else None,
            listens=True,
        )
        for index, (rank, environ) in enumerate(start.environs().items())
    ]
    return Started(server, ranks)


def _all_wait(ranks: Sequence[Rank]) -> bool:
    return all(rank.runs() for rank in ranks)


def _hosts_to_begin(waiting: Sequence[Rank]) -> list[str]:
    """Wait for the names of the hosts of the attempt; return none if it cannot begin.

    It cannot if one of the ranks has ended, or if none of them is needed.
    """
    line = b""
    while _all_wait(waiting):
        if select.select([0], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return json.loads(line) if line.endswith(b"\n") else []
            line += data
    return []


def _watched(start: HostStart, started: Started | None, stores: Stores | None) -> End:
    """Run the ranks of this host; end them when another host is lost."""
    plan, met = start.plan, start.met
    if met.world.world_size == 1:
        return _run(start, started, stores)
    events: supervisor.Events = queue.SimpleQueue()
    watch = HostWatch(met, lambda: events.put(signal.SIGKILL))
    # When one agent has ended, srun ends the others, which still have to find out which host is
    # lost and to write it.
    before = signal.signal(signal.SIGTERM, lambda number, _: events.put(number))
    try:
        end = _run(start, started, stores, events, watch.look)
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
    start: HostStart,
    started: Started | None,
    stores: Stores | None,
    events: supervisor.Events | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> End:
    plan, world, counts, env = start.plan, start.met.world, start.counts, start.env
    exit_status_file = _exit_status_file(start)
    environs = start.environs()
    ranks = started.ranks if started else ()
    for rank, (number, environ) in zip(ranks, environs.items(), strict=False):
        rank.begin(number, supervisor.with_files(environ, exit_status_file))
    if len(counts) == 1:
        rank_environment.print_threads(env, start.here)
    elif world.rank == 0 and not plan.waits:
        _print_layout(counts, cores.share(start.here, env), env)
    name = f"{plan.label}{plan.attempt}"
    with staged(plan.staging, name, env) as (own, folder):
        command, imports = list(plan.command), None
        environs = {rank: {**environ, **own} for rank, environ in environs.items()}
        if not plan.container and not plan.waits:
            everywhere = list(environs.values())
            imports = warm_imports.of_command(
                command, folder or os.getcwd(), everywhere, start.cores(), world.rank == 0
            )
        if plan.container:
            gpus = start.met.shared["gpus"][world.rank] > 0
            inside = {**env, **own}
            command = apptainer(command, plan.container, gpus, folder or os.getcwd(), inside)
        outcome = supervisor.run(
            command,
            environs,
            exit_status_file,
            labelled=sum(counts) > 1,
            events=events,
            cores=start.cores(),
            temporary=plan.temporary,
            folder=folder,
            announces=plan.temporary,  # in a job, the supervisor has printed it
            meanwhile=meanwhile,
            started=started,
            stores=stores,
            imports=imports,
        )
    return end_of(outcome, sum(counts), start.point.host)


def _exit_status_file(start: HostStart) -> Path:
    """Return the file for the exit status of this host's first rank."""
    return Path(start.plan.folder) / f"exit-status-{start.met.world.rank}"


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
