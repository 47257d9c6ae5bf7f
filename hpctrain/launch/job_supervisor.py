"""Supervisor of a launch on the hosts of a job: it carries out what `job_state` decides.

It starts the agents, keeps a connection to each, and starts the ranks again after a failure, until
the run ends or stalls. A process keeps its rank until it ends. After a failure or a change of
hosts, new processes resume from the newest checkpoint of the run directory. The run directory is on
a file system that all hosts share, and also has the folder of this launch:

    .launch-LABEL-RESTART-…/stop        the stop file: its ranks stop at their next step
    .launch-LABEL-RESTART-…/shown-…     marks of `failure_record`, after a failure
"""

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpctrain import rundir
from hpctrain.cluster import env_vars
from hpctrain.cluster.job import detect as detect_job
from hpctrain.cluster.job import submit_folder
from hpctrain.errors import StartError, UsageError, exit_codes
from hpctrain.launch import job_state, script_source, supervisor
from hpctrain.launch.agent_links import AgentLinks, Link, Message
from hpctrain.launch.end import End
from hpctrain.launch.job_hosts import JobHosts
from hpctrain.launch.job_state import Action, Facts, JobState, Reviewed
from hpctrain.launch.plan import Plan
from hpctrain.launch.rank_output import announce
from hpctrain.launch.supervisor import SECONDS_BETWEEN_CALLS, EndRequest
from hpctrain.process import failure_record, file_limit
from hpctrain.rendezvous.addresses import open_listener
from hpctrain.rendezvous.interfaces import address_on, reachable
from hpctrain.rundir import effective_time, host_ledger
from hpctrain.rundir.used import used_so_far

__all__ = ["run"]

# After the last message to the agents. Slurm waits minutes for a lost host.
_SECONDS_TO_LEAVE = 3.0
_SECONDS_SUSPENDED = 3.0
_SECONDS_TO_READ = 0.2
_BYTES_OF_A_TRIAL = 4096


def run(
    hosts: JobHosts,
    plan: Plan,
    directory: rundir.RunDirectory,
    env: Mapping[str, str],
    received: Sequence[int] = (),
) -> tuple[int, str]:
    """Start ranks on the hosts, and again after a failure.

    Args:
        hosts: hosts, with the number of ranks on each.
        plan: plan of the launch; the command gets the run directory as $HPCTRAIN_RUN_DIR.
        directory: run directory.
        env: environment of the ranks.
        received: stop signals that this process has received before.

    Returns:
        An exit code of `exit_codes` or the exit code of the last attempt, and the reason.

    Raises:
        StartError: a host does not answer before the first attempt.
        UsageError: the run directory cannot be made, or the numbers of ranks do not fit.
        CheckpointError: its file system takes no more data.
    """
    present = hosts.present()
    missing = [host for host in hosts.names if host not in present]
    if len(missing) > plan.spares:
        raise StartError(hosts.unusable, missing=",".join(missing), nodes=len(hosts.names))
    folder = _folder(directory, env)
    plan = replace(plan, folder=str(folder), launch=secrets.token_hex(8))
    try:
        return _Supervisor(hosts, plan, directory, env).run(present, received)
    except OSError as error:
        if full := rundir.no_room(directory.path, "the files of this launch", error):
            raise full from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.path.rmdir()  # the program has failed before its run


class _Step(threading.Thread):
    """Process that starts the agents of some hosts, or all ranks; its end is an event.

    Attributes:
        number: number of the step, or of the attempt without agents.
        hosts: names of the hosts.
        events: as for `supervisor.run`.
    """

    def __init__(
        self,
        number: int,
        hosts: Sequence[str],
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        meanwhile: Callable[[], None] | None,
        put: Callable[["_Step", End], None],
    ) -> None:
        super().__init__(name="hpctrain step", daemon=True)
        self.number, self.hosts = number, list(hosts)
        self.events: supervisor.Events = queue.SimpleQueue()
        self._command, self._environ, self._folder = command, environ, folder
        self._meanwhile, self._put = meanwhile, put

    def run(self) -> None:
        """Run the process until it ends."""
        try:
            end = supervisor.run(
                self._command,
                {0: self._environ},
                self._folder,
                labelled=False,
                events=self.events,
                temporary=False,
                announces=False,
                meanwhile=self._meanwhile,
            )
        except (StartError, UsageError) as error:
            announce(f"error: {error}")
            end = End(error.exit_code, usage=error.exit_code == UsageError.exit_code)
        self._put(self, end)


class _Supervisor:
    """The connections, processes and files of a launch, and the loop over its events."""

    def __init__(
        self,
        hosts: JobHosts,
        plan: Plan,
        directory: rundir.RunDirectory,
        env: Mapping[str, str],
    ) -> None:
        self._hosts, self._plan, self._directory = hosts, plan, directory
        self._folder = Path(plan.folder)
        self._launched = time.time()
        self._environ = {
            **env,
            env_vars.SECRET: secrets.token_hex(16),
            env_vars.START: plan.launch,
            env_vars.LAUNCHED: str(self._launched),
            env_vars.RUN_DIR: str(directory.path.absolute()),
            env_vars.STOP_FILE: str(self._folder / "stop"),
        }
        job = detect_job(self._environ)
        self._job, self._top = job.label if job else "", submit_folder(self._environ)
        # A signal of this process, or a method of this class with its arguments.
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._steps: list[_Step] = []  # those that run
        self._links: dict[str, Link] = {}  # the newest one of each host
        self._codes: dict[str, int] = {}  # of the ranks of each host
        self._text = -1, ""  # an attempt, and its plan of all hosts
        self._opened = set[int]()  # attempts without agents of which a rank has a session
        self._before = directory.furthest()
        self._finish: job_state.Finish | None = None
        self._agents: AgentLinks | None = None
        self._places: list[tuple[str, int]] = []  # of the agents, the likeliest first

    def run(self, present: Sequence[str], received: Sequence[int]) -> tuple[int, str]:
        """Run the launch; return the exit code and the reason."""
        avoided = host_ledger.avoided(self._top)
        resumes = self._before is not None
        self._state = JobState(self._plan, self._hosts.counts, present, avoided, resumes)
        job = detect_job(self._environ)
        if job is not None and job.restart_count:
            launch = f"launch {job.restart_count + 1} of job {job.label}"
            announce(f"{launch}, {time.strftime('%Y-%m-%d %H:%M:%S')}; {_start(self._before)}")
        restore = file_limit.make_room(len(present))
        if self._hosts.agents:
            self._agents = self._open_links()
        try:
            with supervisor.signals_as_events(self._events, False):
                for number in received:
                    self._state.signalled(number, time.monotonic())
                self._state.begin(time.monotonic())
                self._loop()
                self._leave()
        finally:
            for step in self._steps:
                step.events.put(EndRequest(signal.SIGKILL))
            if self._agents is not None:
                self._agents.close()
            for step in self._steps:
                step.join(_SECONDS_TO_LEAVE)
            restore()
        assert self._finish is not None
        if self._finish.records:
            _record(self._directory, self._environ, self._finish.code, self._finish.reason)
        return self._finish.code, self._finish.reason

    def _loop(self) -> None:
        """Handle events until the launch has ended."""
        state = self._state
        awake = time.monotonic()
        while True:
            while actions := state.take():
                for action in actions:
                    self._perform(action)
            if self._finish is not None:
                return
            now = time.monotonic()
            # After a suspension, what the agents have sent comes before a deadline.
            late, awake = now - awake > _SECONDS_SUSPENDED, now
            left = _SECONDS_TO_READ if late else (state.deadline or float("inf")) - now
            try:
                event = self._events.get(timeout=max(0.0, min(left, SECONDS_BETWEEN_CALLS)))
            except queue.Empty:
                if not late:
                    state.tick(time.monotonic())
                continue
            if isinstance(event, int):
                if self._agents is None and failure_record.sessions(self._attempt_folder()):
                    state.opened(state.used[0], state.attempt)
                state.signalled(event, time.monotonic())
            elif callable(event):
                event()

    def _perform(self, action: Action) -> None:
        match action:
            case job_state.StartAgents(hosts, step):
                self._start(hosts, step)
            case job_state.Run(host, plan):
                self._run(host, plan)
            case job_state.EndRanks(host, request):
                self._end_ranks(host, request)
            case job_state.Drop(host):
                if link := self._links.pop(host, None):
                    link.end()
            case job_state.StopRun():
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    (self._folder / "stop").touch()
                except OSError as error:
                    announce(f"the run cannot be stopped by a file: {error}")
            case job_state.Review(end, again, asked):
                self._review(end, again, asked)
            case job_state.Fault(hosts, kind):
                host_ledger.note(self._top, sorted(hosts), kind, self._job)
            case job_state.ReportUnfit(unfit):
                announce(f"error: {_unfit_error(unfit)}")
            case job_state.Say(text, dated):
                announce(f"{text} ({time.strftime('%H:%M:%S')})" if dated else text)
            case job_state.Finish():
                self._finish = action

    # --- processes

    def _start(self, hosts: Sequence[str], number: int) -> None:
        """Start the agents; without agents, the ranks start at once."""
        if self._agents is None:
            for host in hosts:
                self._state.connected(host, Facts(""), time.monotonic())
            return
        folder = self._folder / f"agents-{number}"
        folder.mkdir(mode=0o700)
        environ = {**self._environ, env_vars.AGENT: self._where(number, len(hosts) == 1)}
        command, environ = self._hosts.command(hosts, self._plan, environ, folder)
        self._begin(_Step(number, hosts, command, environ, folder, None, self._put_end))

    def _begin(self, step: _Step) -> None:
        self._steps.append(step)
        step.start()

    def _put_end(self, step: _Step, end: End) -> None:
        self._events.put(partial(self._step_ended, step, end))

    def _step_ended(self, step: _Step, end: End) -> None:
        self._steps.remove(step)
        now = time.monotonic()
        if self._agents is not None:
            self._state.step_ended(step.number, end.code, now)
            return
        # Of ranks without an agent it is not known.
        found = replace(self._hosts.end_of(self._attempt_folder(), end), connected=True)
        attempt = self._state.attempt
        for index, host in enumerate(step.hosts):
            own = found if index == 0 else End(found.code, found.ranks, usage=found.usage)
            self._state.ended(host, attempt, own, (), now)

    def _run(self, host: str, plan: Plan) -> None:
        if self._agents is not None:
            if link := self._links.get(host):
                if self._text[0] != plan.attempt:
                    self._text = plan.attempt, plan.of_all_hosts()
                link.send(run=[self._text[1], plan.index, plan.own_address])
            return
        if plan.index:
            return  # the first host's command starts all ranks
        folder = self._attempt_folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        start = f"{plan.launch}/{plan.attempt}"
        environ = {**self._environ, env_vars.START: start}
        if plan.fresh:
            environ[env_vars.FRESH] = "1"
        command, environ = self._hosts.command(plan.hosts, plan, environ, folder)
        look = partial(self._look_for_session, plan.hosts[0], plan.attempt)
        self._begin(_Step(plan.attempt, plan.hosts, command, environ, folder, look, self._put_end))

    def _attempt_folder(self) -> Path:
        return self._folder / str(self._state.attempt)

    def _look_for_session(self, host: str, attempt: int) -> None:
        if attempt not in self._opened and failure_record.sessions(self._folder / str(attempt)):
            self._opened.add(attempt)
            self._events.put(partial(self._state.opened, host, attempt))

    def _end_ranks(self, host: str, request: EndRequest) -> None:
        if self._agents is None:
            for step in self._steps:
                if step.hosts[0] == host:
                    step.events.put(request)
        elif link := self._links.get(host):
            link.send(end=list(request), attempt=self._state.attempt)

    def _leave(self) -> None:
        """Let the agents end, and wait for the processes that have started them."""
        for host, link in self._links.items():
            link.send(leave=self._codes.get(host, 0))
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        for step in self._steps:
            step.join(max(0.0, deadline - time.monotonic()))

    # --- agents

    def _open_links(self) -> AgentLinks:
        """Listen for the agents, on the chosen interface if this machine has it."""
        address = None
        if interface := self._environ.get(env_vars.INTERFACE):
            with contextlib.suppress(UsageError):  # a login node may have other interfaces
                address = address_on(interface)
        listener = open_listener(address, 0)
        port = listener.getsockname()[1]
        addresses = [address] if address else [*reachable(), "127.0.0.1"]
        self._places = [(one, port) for one in addresses]
        return AgentLinks(
            self._plan.launch,
            self._environ[env_vars.SECRET],
            listener,
            lambda received: self._events.put(partial(self._receive, *received)),
        )

    def _where(self, step: int, alone: bool) -> str:
        """Return what an agent has to know to connect, as JSON; without the secret."""
        places, launch = self._places, self._plan.launch
        return json.dumps({"places": places, "launch": launch, "step": step, "alone": alone})

    def _receive(self, link: Link, message: Message | None) -> None:
        """Handle a message of an agent, or the end of its connection."""
        now = time.monotonic()
        host = link.host if self._links.get(link.host) is link else None
        if message is None:
            if host is not None:
                del self._links[host]
                self._state.gone(host, now)
        elif "facts" in message:
            self._connect(link, message)
        elif host is None:
            return  # it was dropped
        elif "opened" in message:
            self._state.opened(host, message["opened"])
        elif "failing" in message:
            self._state.failing(host, message["failing"], now)
        elif "ended" in message:
            end = End.of_json(message["end"])
            self._codes[host] = end.code
            self._state.ended(host, message["ended"], end, message["ports"], now)

    def _connect(self, link: Link, message: Message) -> None:
        host = str(message["name"])
        if host not in self._hosts.counts:
            steps = [one for one in self._steps if one.number == message["step"]]
            if not steps:
                link.end()  # its step has ended
                return
            host = steps[0].hosts[message["index"]]
        facts = Facts(**message["facts"])
        facts = replace(facts, address=facts.address or link.address)
        old = self._links.pop(host, None)
        if old is not None:
            old.end()
        self._links[host], link.host = link, host
        self._state.connected(host, facts, time.monotonic())

    # --- files

    def _review(self, end: End, again: bool, asked: Sequence[str]) -> None:
        """Look at the run directory and at the lost hosts, and tell what was found."""
        directory, hosts = self._directory, self._hosts
        if not end.usage:
            failed = end.time if end.rank is not None else None
            effective_time.note_attempt(directory.current(), self._launched, failed)
        # Agents that are connected show that their hosts are in the job.
        asks = again and (asked or not hosts.agents)
        present = hosts.present() if asks else hosts.names
        after = directory.furthest()
        progress = after is not None and (self._before is None or after > self._before)
        self._before = after if after is not None else self._before
        self._state.reviewed(
            Reviewed(
                progress=progress,
                opens=end.code >= 128 and not end.opened and self._opens_session(),
                start=_start(after),
                returned=[h for h in asked if asks and h in present and hosts.answers(h)],
                left=[host for host in hosts.names if host not in present],
                avoided=host_ledger.avoided(self._top, self._job),
            ),
            time.monotonic(),
        )

    def _opens_session(self) -> bool:
        """Return whether the script opens a session, by its source."""
        folder = self._plan.staging[0] or os.getcwd()
        return script_source.read(self._plan.command, folder, self._environ).opens


def _start(step: int | None) -> str:
    return "from the start, as there is no checkpoint" if step is None else f"from step {step} on"


def _unfit_error(unfit: Mapping[str, str]) -> StartError:
    failures = "; ".join(f"{host}: {reason}" for host, reason in unfit.items())
    key = "HT219.slurm-node-unfit" if "SLURM_JOB_ID" in os.environ else "HT219.node-unfit"
    return StartError(key, failures=failures, nodes=",".join(unfit))


def _record(directory: rundir.RunDirectory, env: Mapping[str, str], code: int, reason: str) -> None:
    """Write the end to the summary; print why a run is given up, where its time went, its use."""
    directory = directory.current()
    effective = effective_time.measure(directory)
    if code == exit_codes.GIVEN_UP:
        announce(f"given up: {reason}")
        if effective is not None:
            announce(str(effective))
    if code == exit_codes.STOPPED or not directory.identity.exists():
        return
    since = float(env[env_vars.LAUNCHED])
    for name, text in used_so_far(directory, effective, False, since) if detect_job(env) else ():
        announce(f"{name}: {text}")
    try:
        directory.record_end(code, reason, **(effective.as_json() if effective else {}))
    except OSError as error:
        announce(f"{directory.summary} could not be written: {error}")


def _folder(directory: rundir.RunDirectory, env: Mapping[str, str]) -> Path:
    """Make the shared folder of the attempts in the run directory; only this user can read it.

    Folders of earlier starts of the job are removed: a start that was killed has left its own.
    """
    job = detect_job(env)
    label, restart = (job.label, job.restart_count) if job else ("", 0)
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        for old in directory.path.glob(f".launch-{label}-*"):
            number = old.name.split("-")[2]
            if number.isdecimal() and int(number) < restart:
                shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryFile(dir=directory.path) as trial:
            trial.write(bytes(_BYTES_OF_A_TRIAL))
        prefix = f".launch-{label}-{restart}-"
        return Path(tempfile.mkdtemp(dir=directory.path.absolute(), prefix=prefix))
    except OSError as error:
        raise rundir.no_room(directory.path, "the files of this launch", error) or UsageError(
            "HT617.cannot-create", directory=directory, error=error
        ) from None
