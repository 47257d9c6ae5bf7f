"""The ranks of one host, in one attempt after another, and what surrounds them."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.launch import cores, rank_environment, script_source, supervisor, warm_imports
from hpctrain.launch.containers import apptainer
from hpctrain.launch.end import End
from hpctrain.launch.plan import Plan
from hpctrain.launch.rank_output import announce
from hpctrain.launch.rank_processes import ForkServer, Imports
from hpctrain.launch.script_source import Source
from hpctrain.launch.staging import staged
from hpctrain.launch.stores import Stores
from hpctrain.process import failure_record

__all__ = ["HostRanks"]


class HostRanks:
    """The ranks of this host, for one attempt after another.

    Copies of staged files, the fork server and what it has imported stay for the next attempt.

    Args:
        env: environment to start from.
        host: name of this host.
        gpus: number of GPUs of this host.
    """

    def __init__(self, env: Mapping[str, str], host: str, gpus: int) -> None:
        self._env, self._host, self._gpus = env, host, gpus
        self._files = Path(tempfile.mkdtemp(prefix="hpctrain-"))
        self._exit = contextlib.ExitStack()
        self._staged: tuple[dict[str, str], str | None] | None = None
        self._server: ForkServer | None = None

    def run(
        self,
        plan: Plan,
        stores: Stores | None,
        events: supervisor.Events,
        opened: Callable[[], None] = lambda: None,
        failing: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> End:
        """Run the ranks of this host, and return how they ended.

        Args:
            plan: plan of the launch, with the place of this host in the attempt.
            stores: stores to serve; None on other hosts than the first one.
            events: as for `supervisor.run`.
            opened: function that is called once a rank has opened a session.
            failing: function that is called once when a rank has failed, and others still run.
            meanwhile: function that is called often while the ranks run.

        Raises:
            StartError: files cannot be copied, or the system cannot start more processes.
            UsageError: there is no such program, or the numbers of ranks do not fit.
        """
        files = self._files / str(plan.attempt)
        files.mkdir()
        command, folder, environs = self._inside(plan)
        if plan.index == plan.attempt == 0:
            _print_layout(plan.counts, self._env)
        bound = plan.cores(self._env)
        imports, source = None, Source()
        if not plan.container:
            here = folder or os.getcwd()
            source = script_source.read(command, here, next(iter(environs.values())))
            source.check(sum(plan.counts))
            if plan.index == plan.attempt == 0:
                source.announce()
            environs = {n: {**e, **source.environ(e, plan.ports[2])} for n, e in environs.items()}
        if not (plan.container or plan.fresh):
            imports = warm_imports.of_command(
                source,
                command,
                folder or os.getcwd(),
                list(environs.values()),
                bound,
                announces=plan.index == plan.attempt == 0,
                alone=not plan.temporary and plan.max_fruitless > 1,
            )
        server = self._ready_server(imports, events)
        if stores is not None:
            server.serve(stores)
        is_open = False

        def look() -> None:
            nonlocal is_open
            meanwhile()
            if not is_open and self.is_open(plan.attempt):
                is_open = True
                opened()

        end = supervisor.run(
            command,
            environs,
            files,
            labelled=sum(plan.counts) > 1,
            events=events,
            cores=bound,
            temporary=False,
            folder=folder,
            announces=plan.temporary,  # in a job, the supervisor has printed it
            server=server,
            meanwhile=look,
            failing=failing,
            fresh=plan.fresh,
            total=sum(plan.counts),
            host=self._host,
            source=source,
        )
        return replace(end, connected=end.connected or (stores is not None and stores.used))

    def is_open(self, attempt: int) -> bool:
        """Check whether a rank of this host has opened a session in an attempt."""
        return bool(failure_record.sessions(self._files / str(attempt)))

    def close(self) -> None:
        """End all processes, and remove the files of this host."""
        if self._server is not None:
            self._server.end()
        self._exit.close()
        shutil.rmtree(self._files, ignore_errors=True)

    def _inside(self, plan: Plan) -> tuple[Sequence[str], str | None, dict[int, dict[str, str]]]:
        """Return command, working directory and environments of the ranks."""
        if self._staged is None:
            name = f"{plan.label}{plan.attempt}"
            self._staged = self._exit.enter_context(staged(plan.staging, name, self._env))
        own, folder = self._staged
        environs = {rank: {**one, **own} for rank, one in plan.environs(self._env).items()}
        command = list(plan.command)
        if plan.container:
            inside = {**self._env, **own}
            image, here = plan.container, folder or os.getcwd()
            command = apptainer(command, image, self._gpus > 0, here, inside)
        return command, folder, environs

    def _ready_server(self, imports: Imports | None, events: supervisor.Events) -> ForkServer:
        """Return the server of this attempt: that of the one before, unless it was killed."""
        if self._server is not None and self._server.was_killed:
            self._server.kill()
            self._server = None
        if self._server is None:
            self._server = supervisor.new_server(self._files, None, imports, False, events)
        return self._server


def _print_layout(counts: Sequence[int], env: Mapping[str, str]) -> None:
    """Print ranks, hosts and cores in one line."""
    if len(counts) == 1:
        rank_environment.print_threads(env, counts[0])
        return
    share = cores.share(counts[0], env)
    each = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    threads = env.get("OMP_NUM_THREADS")
    cores_text = f"{share} core{'s' * (share > 1)}"
    if threads:
        cores_text += f" and OMP_NUM_THREADS={threads}"
    announce(
        f"{sum(counts)} ranks on {len(counts)} hosts, {each} on each; {cores_text} for each rank"
    )
