"""The state of a launch on the hosts of a job: what to do next, after each event.

`JobState` has no socket, clock or process. `job_supervisor` tells it what happens, by a method for
each event, and carries out the actions that it returns by `take`:

    gather   agents are started, and connect; then the hosts of the attempt are chosen
    run      each of these hosts runs its ranks, and tells how they ended
    review   all have told, or are lost; the caller looks at the run directory
    done     the launch has ended

What holds in every schedule of events:

- A host runs ranks only between `Run` and its `ended` or `gone`, and an attempt begins only when no
  host is in between. So no two attempts run at once.
- An event of an earlier attempt changes nothing.
- A failure sets a deadline, after which the ranks of the other hosts are ended. If their agent does
  not tell even that, the host is dropped. So each attempt ends.
- A host is called lost only if its own connection has ended, or if it did not tell its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from signal import SIGKILL, SIGTERM, SIGUSR1, SIGUSR2
from typing import NamedTuple

from hpctrain.cluster.texts import listed
from hpctrain.errors import UsageError, exit_codes
from hpctrain.launch.end import End
from hpctrain.launch.plan import Plan
from hpctrain.launch.rank_processes import signal_name
from hpctrain.launch.supervisor import EndRequest
from hpctrain.rundir import host_ledger

__all__ = [
    "Action",
    "Drop",
    "EndRanks",
    "Facts",
    "Fault",
    "Finish",
    "JobState",
    "ReportUnfit",
    "Review",
    "Reviewed",
    "Run",
    "Say",
    "StartAgents",
    "StopRun",
    "hopeless",
    "settled",
]

# Exit codes of ranks that a stop signal to them has ended. Of SIGTERM it is no sign of a stop, as
# launchers end the other ranks by it.
_UNHANDLED = (128 + SIGUSR1, 128 + SIGUSR2)

SECONDS_TO_CONNECT = 300.0
SECONDS_BETWEEN_WORDS = 10.0
# Agents of spare hosts, and of hosts that return, once there are enough others.
SECONDS_FOR_SPARES = 2.0
SECONDS_TO_RETURN = 20.0
# A rank that lost another rank ends by itself within seconds, with a useful error.
SECONDS_TO_FAIL = 5.0
SECONDS_TO_KILL = 5.0  # after SIGTERM
SECONDS_TO_END = 10.0  # until their agent has told it
# An attempt of a program without a session that has run so long counts as progress.
SECONDS_OF_PROGRESS = 600.0

# Errors of a rank of which its host is the cause.
_WRONG_NUMBERS = "HT318"
_OTHER_WEIGHTS = "HT623"
# The run directory's file system takes no more data, so the next attempt would fail as well.
_NO_ROOM = "HT715"


@dataclass(frozen=True, slots=True)
class Facts:
    """What an agent tells of its host when it connects.

    Attributes:
        address: address of the host, reachable from the others.
        gpus: number of GPUs.
        ports: ports of the stores for the next attempt, if this host is the first one.
        unfit: what is wrong with the host; empty if nothing was found.
    """

    address: str
    gpus: int = 0
    ports: Sequence[int] = ()
    unfit: str = ""


class StartAgents(NamedTuple):
    """Start an agent on each of the hosts, by a step with this number."""

    hosts: Sequence[str]
    step: int


class Run(NamedTuple):
    """Let a host run its ranks."""

    host: str
    plan: Plan


class EndRanks(NamedTuple):
    """End the ranks of a host."""

    host: str
    request: EndRequest


class Drop(NamedTuple):
    """End the connection to a host, whose agent then ends its ranks and itself."""

    host: str


class StopRun(NamedTuple):
    """Make the run stop at its next step, by the stop file."""


class Review(NamedTuple):
    """Look at the run directory after an attempt, and call `reviewed`.

    Attributes:
        end: how the attempt ended.
        again: whether another attempt may follow.
        asked: lost hosts; whether they answer has to be known for another attempt.
    """

    end: End
    again: bool
    asked: Sequence[str]


class Fault(NamedTuple):
    """Record a fault of hosts, of a kind of `host_ledger`."""

    hosts: Sequence[str]
    kind: str


class Say(NamedTuple):
    """Print a line for the user, with the time if it is dated."""

    text: str
    dated: bool = False


class ReportUnfit(NamedTuple):
    """Print the error for hosts that have failed their check."""

    unfit: Mapping[str, str]


class Finish(NamedTuple):
    """End the launch, with an exit code and the reason.

    Attributes:
        code, reason: exit code of `exit_codes` or of the last attempt, and the reason.
        records: whether the end is to be recorded, as the ranks did not.
    """

    code: int
    reason: str
    records: bool = False


Action = StartAgents | Run | EndRanks | Drop | StopRun | Review | Fault | Say | ReportUnfit | Finish


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What the caller has found after an attempt.

    Attributes:
        progress: whether there is a newer checkpoint than before the attempt.
        start: where the next attempt would begin, for the user.
        returned: those of the lost hosts that answer and are still in the job.
        left: hosts that are no longer in the job.
        avoided: hosts to use only if there are no others.
        opens: whether the script opens a session, by its source.
    """

    progress: bool = False
    start: str = ""
    returned: Sequence[str] = ()
    left: Sequence[str] = ()
    avoided: Sequence[str] = ()
    opens: bool = False


def settled(code: int, recorded: tuple[int, str] | None, stopped: bool) -> tuple[int, str] | None:
    """Return the exit code and reason if no other attempt is needed; None after a failure.

    Args:
        code: exit code of the attempt.
        recorded: content of rank 0's exit status file; None without one.
        stopped: whether this process got a signal.
    """
    exit_status, reason = recorded or (code, "")
    if recorded is None and code and (stopped or code in _UNHANDLED):
        # The signal has ended the ranks before they could handle it.
        exit_status, reason = exit_codes.STOPPED, "a signal before the first step"
    if (
        code == 0
        or stopped
        or exit_status in (exit_codes.DONE, UsageError.exit_code, exit_codes.STOPPED)
    ):
        # An exit status of 0 does not cover errors of a rank after its session.
        return exit_status or code, reason
    return None


def hopeless(
    failure: tuple[int, str], first: bool, changed: bool, fruitless: int, most: int
) -> tuple[int, str] | None:
    """Return the exit code and reason if another attempt would also fail; None if it may succeed.

    Another attempt may succeed if hosts were lost, or if this one made progress. A script that
    fails in its first attempt, with all hosts present, before its first checkpoint, would fail
    again. A script that later fails without progress gets only a few more attempts.

    Args:
        failure: exit code of the failed attempt, and the reason.
        first: whether this was the first attempt, and its program has ended by itself.
        changed: whether a host was lost, or a newer checkpoint exists.
        fruitless: number of consecutive attempts without a newer checkpoint, including this one.
        most: number of them after which the run is given up.
    """
    if (first and not changed) or most == 1:
        return failure
    if fruitless >= most:
        last = f": {failure[1]}" if failure[1] else ""
        return exit_codes.GIVEN_UP, f"{fruitless} attempts in a row without a new checkpoint{last}"
    return None


class JobState:
    """The state of a launch on the hosts of a job; see the module.

    Args:
        plan: plan of the launch.
        counts: number of ranks of each host, by its name, in the order of the ranks; 0 for one for
            each GPU.
        present: names of the hosts that can be used now.
        avoided: hosts to use only if there are no others.
        resumes: whether the run directory has a run that the program can continue.

    Attributes:
        phase: "gather", "run", "review" or "done".
        attempt: number of the current attempt.
        used: hosts of this attempt.
        deadline: time of the next `tick`; None for none.
    """

    def __init__(
        self,
        plan: Plan,
        counts: Mapping[str, int],
        present: Sequence[str],
        avoided: Sequence[str] = (),
        resumes: bool = False,
    ) -> None:
        self.phase, self.attempt, self.used = "gather", 0, list[str]()
        self.deadline: float | None = None
        self._plan, self._counts = plan, dict(counts)
        self._present, self._avoided = list(present), list(avoided)
        self._resumes = resumes or plan.plain
        self._wanted = len(counts) - plan.spares
        self._actions: list[Action] = []
        self._agents: dict[str, Facts] = {}
        self._expected: dict[str, int] = {}  # step that starts the agent of each host
        self._steps = 0  # number of steps so far
        self._running: set[str] = set()
        self._ends: dict[str, End] = {}
        self._gone: list[str] = []  # hosts that were lost in this attempt
        self._unfit: dict[str, str] = {}
        self._silent: set[str] = set()  # hosts that did not answer when last asked
        self._signals: list[int] = []
        self._opened = self._fresh = False
        self._fruitless = 0
        self._enough = self._begun = self._said = 0.0
        self._ending = False  # whether the ranks of this attempt were told to end
        self._code = 0  # of a step that has ended
        self._start = ""  # where the attempt begins
        self._started = 0.0  # when it began

    def take(self) -> list[Action]:
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # --- events

    def begin(self, now: float) -> None:
        """Begin: start the agents of all hosts."""
        self._start_agents(self._present, now)

    def connected(self, host: str, facts: Facts, now: float) -> None:
        """Take the agent of a host, which has connected."""
        if host in self._agents:
            self.gone(host, now)
        if self.phase == "done":
            self._act(Drop(host))
            return
        self._agents[host] = facts
        self._silent.discard(host)
        self._expected.pop(host, None)
        if facts.unfit:
            self._unfit[host] = facts.unfit
        self._check_gathered(now)

    def gone(self, host: str, now: float) -> None:
        """Take the end of the connection to a host."""
        self._agents.pop(host, None)
        self._expected.pop(host, None)
        self._silent.add(host)
        if host in self._running:
            self._running.discard(host)
            self._gone.append(host)
            for other in sorted(self._running):
                self._act(EndRanks(other, EndRequest(SIGKILL)))
            self._ending = True
            self.deadline = now + SECONDS_TO_END
            self._check_ended()
        else:
            self._check_gathered(now)

    def step_ended(self, step: int, code: int, now: float) -> None:
        """Take the end of the process that had started agents; those of a later one still come."""
        self._code = code or self._code
        for host in [host for host, number in self._expected.items() if number == step]:
            del self._expected[host]
            self._silent.add(host)
        self._check_gathered(now)

    def opened(self, host: str, attempt: int) -> None:
        """Take the news that a rank has opened a session."""
        if attempt == self.attempt and host in self._running:
            self._opened = True

    def failing(self, host: str, attempt: int, now: float) -> None:
        """Take the news that a rank of a host has failed, while others still run."""
        if attempt == self.attempt and host in self._running:
            self._fail(now)

    def ended(self, host: str, attempt: int, end: End, ports: Sequence[int], now: float) -> None:
        """Take the end of the ranks of a host."""
        if attempt != self.attempt or host not in self._running:
            return
        self._running.discard(host)
        self._ends[host] = end
        self._agents[host] = replace(self._agents[host], ports=ports)
        self._opened = self._opened or end.opened
        if end.code:
            self._fail(now)
        self._check_ended()

    def signalled(self, number: int, now: float) -> None:
        """Take a signal to this process."""
        again = number in self._signals
        self._signals.append(number)
        if self.phase == "done":
            return
        self._act(StopRun())
        waits = number in (SIGUSR1, SIGUSR2) and not self._plan.requeue_plain
        if self.phase == "gather":
            if again or self.attempt or not waits:
                self._finish(exit_codes.STOPPED, "a signal before the first step")
        elif self.phase == "review":
            pass  # `reviewed` finds it
        elif again:
            self._end_ranks(EndRequest(SIGTERM, SECONDS_TO_KILL))
            self._ending, self.deadline = True, now + SECONDS_TO_END
        elif self._opened:
            self._act(Say(f"{signal_name(number)} stops the run, which saves first; {_SECOND}"))
        elif waits:
            text = "stops the run as soon as its Session is open"
            self._act(Say(f"{signal_name(number)} {text}; {_SECOND}"))
        else:
            self._act(
                Say(f"{signal_name(number)} ends the ranks, which have no Session; {_SECOND}")
            )
            self._end_ranks(EndRequest(SIGTERM))

    def reviewed(self, found: Reviewed, now: float) -> None:
        """Take what the caller has found after an attempt, and decide what follows."""
        end = End.of_hosts(self._ends.values(), self._gone)
        stopped = bool(self._signals)
        if self._plan.requeue_plain and stopped and not self._opened:
            # Whatever its exit code: a program that has already done its work does no more.
            self._finish(exit_codes.STOPPED, "a signal")
            return
        result = settled(end.code, end.recorded, stopped)
        self._report(end)
        if result is not None and not stopped and (text := end.alone(self._plan.command)):
            self._act(Say(text))
        if result is not None:
            self._finish(*result)
            return
        lost = self._note_faults(end, found)
        # Nobody sees the checkpoints of a program without a session.
        lasted = self._is_plain and now - self._started >= SECONDS_OF_PROGRESS
        progress = found.progress or lasted
        self._fruitless = 0 if progress else self._fruitless + 1
        self._fresh = self._fresh or end.fresh
        failure = end.recorded[0] if end.recorded else end.code, end.cause
        killed = end.code >= 128
        started = end.ranks or self._gone  # else something of the launch is wrong
        by_itself = not (self.attempt or (started and (killed or self._resumes)))
        changed, most = bool(lost) or progress, self._plan.max_fruitless
        result = hopeless(failure, by_itself, changed, self._fruitless, most)
        self._resumes = self._resumes or self._opened
        # If a host is lost, or a rank is killed before its session, no program has failed.
        no_failure = self._gone or lost or (killed and found.opens)
        if result is None and not (self._resumes or no_failure):
            result = failure
        if end.error == _NO_ROOM:
            result = failure
        if result is not None:
            self._finish(*result, records=True)
            return
        self._avoided = list(found.avoided)
        self._start = "the program starts again" if self._is_plain else found.start
        self.attempt += 1
        self.phase, self._ends, self._gone, self._ending = "gather", {}, [], False
        self._start_agents([h for h in self._usable() if h not in self._agents], now)

    def tick(self, now: float) -> None:
        """Do what is due at `deadline`."""
        if self.deadline is None or now < self.deadline:
            return
        if self.phase == "gather":
            self._check_gathered(now)
        elif self.phase == "run" and not self._ending:
            self._end_ranks(EndRequest(SIGTERM, SECONDS_TO_KILL))
            self._ending, self.deadline = True, now + SECONDS_TO_END
        elif self.phase == "run":
            for host in sorted(self._running):
                self._act(Drop(host))
                self._agents.pop(host, None)
                self._gone.append(host)
                self._silent.add(host)
            self._running.clear()
            self._check_ended()

    # --- gather

    @property
    def _is_plain(self) -> bool:
        return self._plan.plain and not self._opened

    def _usable(self) -> list[str]:
        """Return the hosts that may have ranks, in order."""
        bad = self._silent | self._unfit.keys()
        return [host for host in self._present if host not in bad]

    def _start_agents(self, hosts: Sequence[str], now: float) -> None:
        self._begun = self._said = now
        self._enough = 0.0
        if hosts:
            self._expected.update(dict.fromkeys(hosts, self._steps))
            self._act(StartAgents(list(hosts), self._steps))
            self._steps += 1
        self._check_gathered(now)

    def _check_gathered(self, now: float) -> None:
        """Begin the attempt if enough agents are there, or no more will come."""
        if self.phase != "gather":
            return
        ready = [host for host in self._usable() if host in self._agents]
        patience = SECONDS_TO_RETURN if self.attempt else SECONDS_TO_CONNECT
        due = self._begun + patience
        if len(ready) >= self._wanted:
            self._enough = self._enough or now
            due = min(due, self._enough + (0.0 if self.attempt else SECONDS_FOR_SPARES))
        else:
            self._enough = 0.0
        late = now >= due
        if not (late or self._enough) and now >= self._said + SECONDS_BETWEEN_WORDS:
            self._said = now
            names, seconds = listed(list(self._expected)), now - self._begun
            self._act(Say(f"waiting for the agents on {names} since {seconds:.0f} s"))
        if self._expected and not late:
            self.deadline = due if self._enough else min(due, self._said + SECONDS_BETWEEN_WORDS)
            return
        self.deadline = None
        if late and not self.attempt:
            self._silent.update(self._expected)
        self._choose(ready, now)

    def _choose(self, ready: Sequence[str], now: float) -> None:
        """Choose the hosts of the attempt, and begin it; or end the launch."""
        new = {host: text for host, text in self._unfit.items() if host in self._agents}
        for host in new:
            self._act(Drop(host))
            self._agents.pop(host)
        if new:
            self._act(ReportUnfit(new))
            self._act(Fault(sorted(new), host_ledger.PREFLIGHT))
        before = self.used
        best = sorted(ready, key=lambda host: host in self._avoided)[: self._wanted]
        self.used = [host for host in ready if host in best]
        away = [h for h in before or self._present if h not in ready]
        enough = self.used if self._plan.elastic else len(self.used) >= self._wanted
        if not (enough or new or self.attempt):
            reason = f"no agent has connected from {listed(away)}"
            self._act(Say(reason))
            self._finish(self._code or exit_codes.FAILED, reason)
            return
        self._set_counts()
        ranks = sum(self._counts[host] for host in self.used)
        if ranks < self._plan.min_ranks or not self.used:
            reason = f"{ranks} ranks are left of at least {self._plan.min_ranks}"
            self._finish(exit_codes.GIVEN_UP, reason, records=True)
        elif len(self.used) < self._wanted and not self._plan.elastic:
            reason = f"{', '.join(away)} of the job's hosts are lost"
            self._finish(exit_codes.STOPPED, reason, records=True)
        else:
            self._run(away, now)

    def _set_counts(self) -> None:
        """Give each host without a number of ranks one for each GPU, and at least one."""
        for host in self.used:
            self._counts[host] = self._counts[host] or max(self._agents[host].gpus, 1)

    def _run(self, away: Sequence[str], now: float) -> None:
        if self.attempt:
            without = f", without {', '.join(away)}" if away else ""
            self._act(
                Say(
                    f"attempt {self.attempt + 1}: {len(self.used)} of {len(self._counts)} hosts"
                    f"{without}; {self._start}",
                    dated=True,
                )
            )
        self.phase, self._running, self._started = "run", set(self.used), now
        first = self._agents[self.used[0]]
        common = replace(
            self._plan,
            attempt=self.attempt,
            fresh=self._fresh,
            hosts=tuple(self.used),
            counts=tuple(self._counts[host] for host in self.used),
            main_address=first.address,
            ports=tuple(first.ports),
        )
        for index, host in enumerate(self.used):
            own = replace(common, index=index, own_address=self._agents[host].address)
            self._act(Run(host, own))

    # --- run, review and done

    def _fail(self, now: float) -> None:
        if self.deadline is None:
            self.deadline = now + SECONDS_TO_FAIL

    def _end_ranks(self, request: EndRequest) -> None:
        for host in sorted(self._running):
            self._act(EndRanks(host, request))

    def _check_ended(self) -> None:
        if self.phase == "run" and not self._running:
            self.phase, self.deadline = "review", None
            end = End.of_hosts(self._ends.values(), self._gone)
            again = settled(end.code, end.recorded, bool(self._signals)) is None
            self._act(Review(end, again, sorted(self._silent)))

    def _report(self, end: End) -> None:
        """Print which rank failed first, because its error is the cause of the other errors."""
        if len(self._gone) == len(self.used) > 1:
            self._act(Say("all agents have ended at once, as when a scheduler ends their step"))
            return
        for host in self._gone:
            self._act(Say(f"{host} was lost: the connection to its agent has ended"))
        # After a usage error every rank has printed the same few lines.
        if end.rank is None or end.ranks == 1 or end.usage:
            return
        if end.recorded is not None and end.recorded[0] == exit_codes.STOPPED:
            return
        where = f" on {end.host}" if end.host else ""
        self._act(Say(f"rank {end.rank}{where} {end.conclusion}"))

    def _note_faults(self, end: End, found: Reviewed) -> list[str]:
        """Record the faults of hosts; return those of this attempt that cannot be used again."""
        self._silent = (self._silent - set(found.returned)) | set(found.left)
        if end.error == _WRONG_NUMBERS:
            self._unfit[end.host] = "wrong numbers"
            self._act(Fault([end.host], host_ledger.PREFLIGHT))
            self._act(Drop(end.host))
            self._agents.pop(end.host, None)
        if end.error == _OTHER_WEIGHTS:
            self._act(Fault([end.host], host_ledger.UNLIKE))
        lost = [host for host in self.used if host in self._silent | self._unfit.keys()]
        if gone := [host for host in lost if host not in self._unfit]:
            self._act(Fault(gone, host_ledger.LOST))
        return lost

    def _finish(self, code: int, reason: str, records: bool = False) -> None:
        self.phase, self.deadline = "done", None
        self._act(Finish(code, reason, records))

    def _act(self, action: Action) -> None:
        self._actions.append(action)


_SECOND = "a second one ends them at once"
