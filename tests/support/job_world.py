"""A simulated job for `JobState`: hosts, agents, ranks, a network, and what can happen to them.

It stands in for Slurm, sockets and processes, and has a clock of its own, so that thousands of
schedules take seconds. A seed gives one schedule. `World.run` raises an AssertionError if the
launch hangs, if two attempts run at once, if a result is lost, or if a healthy host is blamed.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field

from hpctrain.launch import job_state
from hpctrain.launch.end import End
from hpctrain.launch.job_state import Facts, JobState, Reviewed
from hpctrain.launch.plan import Plan

# Seconds of `agent_links`: an agent gives up first.
AGENT_GIVES_UP, SUPERVISOR_GIVES_UP = 9.0, 10.0
KILLED, SAVED = 137, 75
LONGEST = 3600.0
# From the news of a failure to the end of the last rank: 5 s to notice it, 10 s to end.
LONGEST_END = 25.0


@dataclass
class Host:
    """A host with its agent and its ranks.

    Attributes:
        alive: whether the host has power.
        agent: number of the agent's connection; 0 without an agent.
        frozen: time until which the agent is suspended.
        cut: whether no message passes between the host and the supervisor.
        unfit: whether it fails its check.
        attempt: attempt whose ranks run here; None for none.
        faulty: whether something happened to this host.
        late: messages of the agent and to it, while it is suspended or cut off.
    """

    name: str
    alive: bool = True
    agent: int = 0
    frozen: float = 0.0
    cut: bool = False
    unfit: bool = False
    attempt: int | None = None
    faulty: bool = False
    last_arrival: float = 0.0
    last_order: float = 0.0
    faults: list[str] = field(default_factory=list)


class World:
    """A job and its launch.

    Args:
        seed: number of the schedule.
        state_class: class of the state, for planted bugs.
    """

    def __init__(self, seed, state_class=JobState):
        self.seed, self.random = seed, random.Random(seed)
        chance = self.random.random
        size, spares = self.random.randint(1, 5), self.random.randint(0, 2)
        self.hosts = {f"node{i}": Host(f"node{i}") for i in range(1, size + spares + 1)}
        self.plan = Plan(
            ["train"],
            "/folder",
            elastic=chance() < 0.3,
            spares=spares,
            max_fruitless=self.random.choice([1, 3, 5]),
            requeue_plain=chance() < 0.2,
        )
        self.has_session = chance() < 0.8
        for host in self.hosts.values():
            host.unfit = host.faulty = chance() < 0.03
        counts = dict.fromkeys(self.hosts, 2)
        self.state = state_class(self.plan, counts, list(self.hosts), resumes=chance() < 0.5)
        self.now, self.counter, self.queue = 0.0, itertools.count(1), []
        self.connections = itertools.count(1)
        self.ended = set()  # connections of which the supervisor knows the end
        self.links = {}  # connection of each host that the supervisor knows
        self.stopped, self.finish, self.supervisor_frozen = False, None, 0.0
        self.step, self.saved = 0, 0
        self.succeeded = self.signalled = False
        self.cause = None  # when the supervisor has heard of a failure in this attempt
        self.failed_by_themselves = set()  # hosts of ranks that failed in this attempt
        self.reports, self.said, self.trace = {}, [], []
        self.newest_step = 0

    # --- the loop

    def at(self, delay, what, *args):
        self.at_time(self.now + delay, what, *args)

    def at_time(self, time, what, *args):
        heapq.heappush(self.queue, (time, next(self.counter), what, args))

    def run(self):
        """Run the schedule; return the end of the launch."""
        self.state.begin(self.now)
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 3, 6])):
            self.at(self.random.expovariate(1 / 40), self._fault)
        self._act()
        while self.finish is None:
            deadline = self.state.deadline
            if deadline is not None:
                deadline = max(deadline, self.supervisor_frozen, self.now)
            due = self.queue[0][0] if self.queue else None
            assert (due, deadline) != (None, None), f"hangs at {self.now:.0f} s"
            if deadline is not None and (due is None or deadline < due):
                self.now = deadline
                self.trace.append((self.now, "tick"))
                self.state.tick(self.now)
                assert self.state.deadline is None or self.state.deadline > self.now, "busy"
                self._act()
                continue
            self.now, _, what, args = heapq.heappop(self.queue)
            assert self.now < LONGEST, f"does not end within {LONGEST:.0f} s"
            self.trace.append((self.now, what.__name__, *args))
            what(*args)
            self._act()
            self._check()
        if self.succeeded:
            assert self.finish.code == 0 or self.signalled, f"a result is lost: {self.finish}"
        return self.finish

    def _check(self):
        running = {
            host.attempt
            for host in self.hosts.values()
            # A suspended agent cannot kill its ranks; it does when it goes on.
            if host.attempt is not None
            and not (host.frozen and self.links.get(host.name) != host.agent)
        }
        assert len(running) <= 1, f"attempts {running} run at once"

    # --- the supervisor

    def _tell(self, name, connection, method, *args, first=False):
        """Send a message of an agent: it arrives in order, if the connection lasts."""
        host = self.hosts[name]
        delay = self.random.expovariate(1 / 0.01)
        host.last_arrival = max(host.last_arrival, self.now + delay, host.frozen)
        self.at_time(host.last_arrival, self._arrive, name, connection, method, args, first)

    def _arrive(self, name, connection, method, args, first):
        host = self.hosts[name]
        if host.cut or not host.alive or connection in self.ended:
            return  # never arrives
        if self.supervisor_frozen > self.now:
            self.at(
                self.supervisor_frozen - self.now,
                self._arrive,
                name,
                connection,
                method,
                args,
                first,
            )
            return
        if first:
            self.links[name] = connection
        if self.links.get(name) == connection:
            if method == "opened":
                self.state.opened(*args)
                return
            if method == "ended" and args[2].code == 0 and args[1] == self.state.attempt:
                self.told.add(name)
                self.succeeded = self.succeeded or self.told == set(self.used)
            if method == "ended" and args[1] == self.state.attempt:
                self.heard.add(name)
            if method == "failing" or (method == "ended" and args[2].code):
                self._hears()
            getattr(self.state, method)(*args, self.now)

    def _gone(self, name, connection):
        """The supervisor notices the end of a connection."""
        if self.supervisor_frozen > self.now:
            self.at_time(self.supervisor_frozen, self._gone, name, connection)
            return
        self.ended.add(connection)
        if self.links.get(name) == connection:
            del self.links[name]
            if self.state.phase == "run" and name in self.used and name not in self.heard:
                self._hears()
            self.state.gone(name, self.now)

    def _hears(self):
        self.cause = self.now if self.cause is None else self.cause

    def _act(self):
        while actions := self.state.take():
            for action in actions:
                self.trace.append((self.now, action))
                self._perform(action)

    def _perform(self, action):
        match action:
            case job_state.StartAgents(hosts, step):
                self.newest_step = step
                for name in hosts:
                    delay = 0.2 + self.random.expovariate(2)
                    if self.random.random() < 0.02:
                        delay += 400  # a slow disk
                        self.hosts[name].faulty = True
                    self.at(delay, self._start_agent, name)
            case job_state.Run(name, plan):
                assert name in self.links, f"{name} is to run, and has no agent"
                if plan.index == 0:
                    self._begin_attempt(plan)
                self._order(name, self._run, plan)
            case job_state.EndRanks(name, request):
                assert self.cause is not None or self.signalled, (
                    f"the ranks of {name} are ended for nothing"
                )
                self._order(name, self._end_ranks, self.state.attempt, request)
            case job_state.Drop(name):
                assert self.hosts[name].faulty, f"{name} is dropped"
                connection = self.links.pop(name, None)
                self.at(0.01, self._lose_supervisor, name, connection)
            case job_state.StopRun():
                self.stopped = True
                for name, host in self.hosts.items():
                    if host.attempt is not None and self.has_session and not self._broken():
                        self.at(1.0 + self.random.random(), self._save, name, host.attempt)
            case job_state.Review(_, again, asked):
                if self.cause is not None:
                    late = self.now - max(self.cause, self.supervisor_frozen)
                    assert late < LONGEST_END, f"ranks end {late:.0f} s after a failure"
                self.at(self.random.choice([0.01, 0.1, 20.0]), self._review, again, asked)
            case job_state.Fault(hosts, kind):
                for name in hosts:
                    assert self.hosts[name].faulty, f"{name} is blamed: {kind}"
            case job_state.Say(text):
                self.said.append(text)
            case job_state.Finish():
                self.finish = action

    def _review(self, again, asked):
        if self.supervisor_frozen > self.now:
            self.at_time(self.supervisor_frozen, self._review, again, asked)
            return
        progress = self.step > self.saved
        self.saved = self.step
        returned = [
            name for name in asked if again and self.hosts[name].alive and not self.hosts[name].cut
        ]
        found = Reviewed(progress, "from there", returned)
        self.state.reviewed(found, self.now)

    # --- agents

    def _order(self, name, what, *args):
        """Send a message to an agent: it arrives in order, if the connection lasts."""
        host, connection = self.hosts[name], self.links.get(name)
        delay = self.random.expovariate(1 / 0.01)
        host.last_order = max(host.last_order, self.now + delay)
        self.at_time(host.last_order, self._ordered, name, connection, what, args)

    def _ordered(self, name, connection, what, args):
        host = self.hosts[name]
        if host.cut or not host.alive or host.agent != connection:
            return
        if host.frozen > self.now:
            self.at_time(host.frozen, self._ordered, name, connection, what, args)
            return
        if self.links.get(name) != connection:
            return  # it finds the end of its connection behind this message
        what(name, *args)

    def _start_agent(self, name):
        host = self.hosts[name]
        if not host.alive or host.cut or host.agent:
            return
        host.agent = next(self.connections)
        facts = Facts("10.0.0.1", 0, (1, 2), "no memory" if host.unfit else "")
        self._tell(name, host.agent, "connected", name, facts, first=True)

    def _lose_supervisor(self, name, connection):
        """The agent notices that its connection has ended: it kills its ranks, and itself."""
        host = self.hosts[name]
        if connection and host.agent == connection:
            if host.frozen > self.now:
                self.at_time(host.frozen, self._lose_supervisor, name, connection)
                return
            host.agent, host.attempt = 0, None

    # --- ranks

    def _begin_attempt(self, plan):
        self.failed_by_themselves.clear()
        self.cause, self.heard = None, set()
        self.used, self.ended_well, self.told = list(plan.hosts), set(), set()
        for name in self.used:
            self.hosts[name].faults.clear()
        self.outcome = self.random.choices(["done", "error", "exit 0 early"], [8, 1, 1])[0]
        self.seconds = 1 + self.random.expovariate(1 / 30)
        self.spread = self.random.choice([1.0, 1.0, 30.0])

    def _run(self, name, plan):
        host = self.hosts[name]
        assert host.attempt is None, f"{name} runs two attempts"
        host.attempt = plan.attempt
        if self.has_session:
            self.at(0.3, self._open, name, plan.attempt)
        if self.stopped and self.has_session:
            self.at(1.0, self._save, name, plan.attempt)
        if self._broken():
            self._lose_peer(name, plan.attempt)
        elif self.outcome == "error" and plan.index == 0:
            self.at(self.seconds, self._fail, name, plan.attempt)
        else:
            delay = self.seconds + self.spread * self.random.random()
            self.at(delay, self._finish_ranks, name, plan.attempt)

    def _broken(self):
        """Whether a rank of this attempt is gone, so that the others cannot go on."""
        attempts = [self.hosts[name].attempt for name in self.used]
        gone = [n for n in self.used if self.hosts[n].attempt is None and n not in self.ended_well]
        return bool(self.failed_by_themselves) or (
            any(a is not None for a in attempts) and bool(gone) and self._begun()
        )

    def _begun(self):
        return all(
            name in self.ended_well
            or self.hosts[name].attempt is not None
            or self.hosts[name].faults
            for name in self.used
        )

    def _open(self, name, attempt):
        host = self.hosts[name]
        if host.attempt == attempt:
            self._tell(name, host.agent, "opened", name, attempt)

    def _end(self, name, end):
        host = self.hosts[name]
        attempt, host.attempt = host.attempt, None
        if host.agent:
            self._tell(name, host.agent, "ended", name, attempt, end, (3, 4))

    def _finish_ranks(self, name, attempt):
        host = self.hosts[name]
        if host.attempt != attempt or self._broken():
            return
        self.step += self.random.randint(0, 3)
        self.ended_well.add(name)
        recorded = (0, "done") if name == self.used[0] and self.has_session else None
        self._end(name, End(0, 2, opened=self.has_session, recorded=recorded))

    def _save(self, name, attempt):
        host = self.hosts[name]
        if host.attempt != attempt or self._broken():
            return
        self.ended_well.add(name)
        recorded = (SAVED, "a signal") if name == self.used[0] else None
        self._end(name, End(SAVED, 2, opened=True, recorded=recorded))

    def _fail(self, name, attempt):
        """A rank fails by itself."""
        host = self.hosts[name]
        if host.attempt != attempt or not host.alive:
            return
        self.failed_by_themselves.add(name)
        host.faults.append("rank")
        self._tell(name, host.agent, "failing", name, attempt)
        self.at(self.random.random(), self._end_failed, name, attempt)
        for other in self.used:
            if other != name:
                self._lose_peer(other, attempt)

    def _end_failed(self, name, attempt):
        host = self.hosts[name]
        if host.attempt == attempt:
            how = {"rank": self.used.index(name) * 2, "host": name, "time": self.now}
            self._end(name, End(1, 2, brief="with exit code 1", opened=self.has_session, **how))

    def _lose_peer(self, name, attempt):
        """The ranks of a host notice that another one is gone; or they wait for it for ever."""
        # Or they wait until a time-out of their library.
        seconds = 300.0 if self.random.random() < 0.3 else self.random.random() * 2
        self.at(seconds, self._fail_because, name, attempt)

    def _fail_because(self, name, attempt):
        host = self.hosts[name]
        if host.attempt != attempt:
            return
        how = {"rank": self.used.index(name) * 2, "host": name, "time": self.now}
        end = End(1, 2, brief="lost a rank", caused_by_other_rank=True, opened=True, **how)
        self._end(name, end)

    def _end_ranks(self, name, attempt, request):
        host = self.hosts[name]
        if host.attempt == attempt:
            ignores = request.number != 9 and self.random.random() < 0.5
            delay = request.seconds if ignores else 0.05
            if delay is not None:
                self.at(delay, self._killed, name, attempt)
            else:
                self.at(5.0, self._killed, name, attempt)  # it saves something, and ends

    def _killed(self, name, attempt):
        host = self.hosts[name]
        if host.attempt == attempt:
            host.faults.append("killed")
            self._end(name, End(KILLED, 2, opened=self.has_session))

    # --- faults

    def _fault(self):
        host = self.random.choice(list(self.hosts.values()))
        kinds = [
            "rank",
            "agent",
            "power",
            "silence",
            "cut",
            "freeze",
            "supervisor",
            "signal",
            "step",
        ]
        kind = self.random.choice(kinds)
        self.trace.append((self.now, kind, host.name))
        if kind == "signal":
            self.signalled = True
            self.state.signalled(self.random.choice([10, 12, 15]), self.now)
        elif kind == "supervisor":
            until = self.now + self.random.choice([1, 15, 60])
            self.supervisor_frozen = max(self.supervisor_frozen, until)
        elif kind == "step":
            for one in self.hosts.values():
                one.faulty = one.faulty or bool(one.agent)
                self._lose_agent(one)
            # srun ends later than its tasks.
            self.at(self.random.choice([0.0, 2.0]), self._step_ended, self.newest_step)
        elif not host.alive:
            return
        elif kind == "rank":
            if host.attempt is not None:
                self._fail(host.name, host.attempt)
        elif kind == "agent":
            host.faulty = True
            self._lose_agent(host)
        elif kind == "freeze":
            host.faulty = True
            host.frozen = self.now + self.random.choice([1, 15, 60])
        else:
            self._lose_host(host, kind)

    def _step_ended(self, step):
        if self.supervisor_frozen > self.now:
            self.at_time(self.supervisor_frozen, self._step_ended, step)
        else:
            self.state.step_ended(step, KILLED, self.now)

    def _lose_agent(self, host):
        """The agent is killed: the kernel ends its ranks, and its connection."""
        connection, attempt = host.agent, host.attempt
        host.agent, host.attempt = 0, None
        if connection:
            host.faults.append("agent")
            self.at(0.01, self._gone, host.name, connection)
        self._tell_peers(host, attempt)

    def _lose_host(self, host, kind):
        host.faulty = True
        connection, attempt = host.agent, host.attempt
        host.faults.append(kind)
        host.frozen = 0.0
        if kind == "cut":
            host.cut = True
            self.at(AGENT_GIVES_UP, self._lose_supervisor, host.name, connection)
            self.at(self.random.choice([5.0, 60.0]), self._mend, host)
        else:
            host.alive, host.agent, host.attempt = False, 0, None
        delay = 0.01 if kind == "power" else SUPERVISOR_GIVES_UP
        if connection:
            self.at(delay, self._gone_if_cut, host.name, connection, kind)
        self._tell_peers(host, attempt)

    def _gone_if_cut(self, name, connection, kind):
        self._gone(name, connection)
        if kind == "cut" and self.hosts[name].agent == connection:
            self._lose_supervisor(name, connection)

    def _mend(self, host):
        host.cut = False

    def _tell_peers(self, host, attempt):
        if attempt is None:
            return
        for other in self.used:
            if other != host.name and self.hosts[other].attempt == attempt:
                self._lose_peer(other, attempt)
