"""Agent: the process on each host of a job that starts the ranks of its host.

    python -m hpctrain.launch.agent         with a JSON object in $HPCTRAIN_AGENT: where to connect
    python -m hpctrain.launch.agent FILE    with a JSON object: the same, and the environment

It connects to `hpctrain run` and lives as long as the job. The messages (see `agent_links`):

    agent → supervisor   {"name": …, "step": …, "index": …, "facts": {…}}   who connects
                         {"opened": ATTEMPT}                            a rank has opened a session
                         {"failing": ATTEMPT}                           a rank has failed
                         {"ended": ATTEMPT, "end": {…}, "ports": […]}   all ranks have ended
    supervisor → agent   {"run": [PLAN, INDEX, ADDRESS]}                run the ranks of a `Plan`
                         {"end": [SIGNAL, SECONDS], "attempt": ATTEMPT} end them; see `EndRequest`
                         {"leave": CODE}                                end with this exit code

If the connection ends, the agent kills its ranks and ends.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.cluster import env_vars, launchers
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch import agent_links, cores, preflight, rank_environment, supervisor
from hpctrain.launch.agent_links import Link, Message, Received
from hpctrain.launch.end import End
from hpctrain.launch.host_ranks import HostRanks
from hpctrain.launch.plan import Plan
from hpctrain.launch.stores import Stores
from hpctrain.launch.supervisor import EndRequest
from hpctrain.process import signals
from hpctrain.rendezvous import shared_errors
from hpctrain.rendezvous.interfaces import address_on

__all__ = ["main"]

SECONDS_TO_CONNECT = 60.0
# From the end of the connection to that of the ranks.
_SECONDS_TO_END = 1.5
_LOST = 1  # exit code without a supervisor


class _Attempt(NamedTuple):
    plan: Plan
    events: supervisor.Events


def main() -> int:
    """Run the agent of this host, and return its exit code."""
    if len(sys.argv) > 1:
        record = json.loads(Path(sys.argv[1]).read_text())
        os.environ.update({**record["environ"], env_vars.AGENT: record["agent"]})
        _make_temporary_folder()
    where = json.loads(os.environ[env_vars.AGENT])
    env = {name: value for name, value in os.environ.items() if name != env_vars.AGENT}
    for number in signals.STOP:
        # Between two attempts there is nothing to stop. Ranks would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    os.environ[env_vars.EVIDENCE] = os.path.dirname(env[env_vars.STOP_FILE])
    try:
        return _serve(where, env)
    except HpctrainError as error:
        shared_errors.report(error)
        return error.exit_code


def _serve(where: Mapping[str, Any], env: Mapping[str, str]) -> int:
    """Connect to the supervisor, and do what it says until it ends this agent."""
    start = launchers.survey()
    cores.widen(env)
    gpus = len(rank_environment.gpus_of(env))
    folder = Path(env[env_vars.STOP_FILE]).parent
    unfit = preflight.check(folder, env)
    stores = Stores(where["alone"])
    interface = env.get(env_vars.INTERFACE)
    point = start.rendezvous_point

    def hello(address: str) -> Message:
        return {
            "name": env.get("SLURMD_NODENAME", ""),
            "step": where["step"],
            "index": start.world.rank,
            "facts": {
                "address": address_on(interface) if interface else address,
                "gpus": gpus,
                "ports": stores.ports,
                "unfit": unfit,
            },
        }

    places = [(str(address), int(port)) for address, port in where["places"]]
    secret = env[env_vars.SECRET]
    link = agent_links.connect(places, where["launch"], secret, hello, SECONDS_TO_CONNECT)
    return _Agent(link, HostRanks(env, point.host, gpus), stores, where["alone"]).serve()


class _Agent:
    def __init__(self, link: Link, ranks: HostRanks, stores: Stores, alone: bool) -> None:
        self._link, self._ranks, self._stores, self._alone = link, ranks, stores, alone
        self._inbox: queue.SimpleQueue[_Attempt | int] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._lost = threading.Event()
        self._current: _Attempt | None = None  # of the link's thread

    def serve(self) -> int:
        """Run attempts until the supervisor ends this agent; return the exit code."""
        self._link.follow(self._take)
        try:
            while isinstance(task := self._inbox.get(), _Attempt):
                # A suspended process may find the end of its connection behind this message.
                if not self._lost.is_set():
                    self._run(task)
            return task
        finally:
            self._ranks.close()

    def _take(self, received: Received) -> None:
        """Handle a message of the supervisor; called in the thread of the link."""
        _, message = received
        if message is None:
            self._lose()
        elif "run" in message:
            self._current = _Attempt(Plan.of_host(*message["run"]), queue.SimpleQueue())
            self._idle.clear()
            self._inbox.put(self._current)
        elif "end" in message and self._current is not None:
            request, attempt = EndRequest(*message["end"]), message["attempt"]
            # A session that was opened meanwhile sees the stop file.
            late = request.seconds is None and self._ranks.is_open(attempt)
            if attempt == self._current.plan.attempt and not late:
                self._current.events.put(request)
        elif "leave" in message:
            self._inbox.put(message["leave"])

    def _lose(self) -> None:
        """End the ranks without a supervisor."""
        self._lost.set()
        if self._current is not None:
            self._current.events.put(EndRequest(signal.SIGKILL))
        self._inbox.put(_LOST)
        if not self._idle.wait(_SECONDS_TO_END):
            os._exit(_LOST)  # the fork server notices, and kills the ranks

    def _run(self, task: _Attempt) -> None:
        number, stores = task.plan.attempt, self._stores
        try:
            end = self._ranks.run(
                task.plan,
                stores if task.plan.index == 0 else None,
                task.events,
                opened=lambda: self._tell(opened=number),
                failing=lambda: self._tell(failing=number),
            )
        except HpctrainError as error:
            shared_errors.report(error)
            end = End(error.exit_code, usage=error.exit_code == UsageError.exit_code)
        stores.close()
        self._stores = Stores(self._alone)
        self._idle.set()
        self._tell(ended=number, end=end.as_json(), ports=self._stores.ports)

    def _tell(self, **message: Any) -> None:
        self._link.send(**message)


def _make_temporary_folder() -> None:
    """Make the folder for temporary files, which PBS makes on the first host of a job only.

    PBS removes it on all hosts at the end of the job: tried with OpenPBS 23.06.
    """
    try:
        if os.environ.get("PBS_JOBID") and os.environ.get("TMPDIR"):
            os.makedirs(os.environ["TMPDIR"], 0o700, exist_ok=True)
    except OSError:
        del os.environ["TMPDIR"]


if __name__ == "__main__":
    sys.exit(main())
