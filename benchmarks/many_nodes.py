"""Time and the launcher's CPU time of a launch on many nodes, and of a restart there.

    python benchmarks/many_nodes.py [--rounds 5] [--save FILE]

`hpctrain run` is real; the nodes are on this machine, without Slurm. Of 8 and 64 nodes, all agents
are real, each starts one process that does nothing, and all of them share the cores of this
machine, where a cluster has cores for each. Of 512 and 2,048 nodes, one other process plays all
agents: it uses their protocol, and starts nothing. What is left are the costs of the launcher:
connections, proofs, plans and results. There, the first rank fails in the first attempt, so
`restart_s` is the time from this news to the last node that has the plan of the next one.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from harness import Results, run

from hpctrain import rundir
from hpctrain.cluster import env_vars
from hpctrain.launch import agent_links, job_supervisor
from hpctrain.launch.agent_links import Link, Received
from hpctrain.launch.end import End
from hpctrain.launch.job_hosts import JobHosts
from hpctrain.launch.plan import Plan
from hpctrain.process import file_limit
from hpctrain.rendezvous.messages import Credentials
from hpctrain.tools.bench.measure import summary, take_turns

REAL, PLAYED = (8, 64), (512, 2048)
_SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"


class PlayedHosts(JobHosts):
    """Hosts whose agents one process plays.

    Args:
        count: number of hosts.
        result: file for the figures of that process.
    """

    def __init__(self, count: int, result: Path) -> None:
        super().__init__({f"node{number:05d}": 1 for number in range(count)}, None)
        self._result = result

    def present(self) -> list[str]:
        """Return all hosts."""
        return self.names

    def command(
        self, hosts: Sequence[str], plan: Plan, environ: Mapping[str, str], folder: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command of the process that plays the agents."""
        words = [sys.executable, __file__, "--play", str(len(hosts)), str(self._result)]
        return words, dict(environ)


async def play(count: int, result: Path) -> None:
    """Play the agents of a number of hosts until the launcher ends them."""
    file_limit.make_room(count)
    where = json.loads(os.environ[env_vars.AGENT])
    address, port = where["places"][0]
    credentials = Credentials(where["launch"], os.environ[env_vars.SECRET])
    links = [
        await agent_links.join((address, port), credentials, partial(_hello, number))
        for number in range(count)
    ]
    inbox: asyncio.Queue[Received] = asyncio.Queue()
    reading = [asyncio.create_task(link.deliver(inbox.put_nowait)) for link in links]
    failed = await _attempt(links, inbox, 0)
    restarted = await _attempt(links, inbox, 1)
    result.write_text(json.dumps({"restart_s": restarted - failed}))
    for _ in links:
        await inbox.get()  # "leave"
    for one in reading:
        one.cancel()


def _hello(number: int, address: str) -> dict[str, object]:
    facts = {"address": address, "gpus": 0, "ports": [1, 2], "unfit": ""}
    return {"name": f"node{number:05d}", "step": 0, "index": number, "facts": facts}


async def _attempt(links: Sequence[Link], inbox: "asyncio.Queue[Received]", attempt: int) -> float:
    """Answer the plans of an attempt; return when the last one came, or the failure was told."""
    for _ in links:
        await inbox.get()
    at = time.monotonic()
    for rank, link in enumerate(links):
        # The others are ended because of rank 0.
        own = {"rank": rank, "time": time.time(), "caused_by_other_rank": rank > 0}
        end = End(0, 1, opened=True) if attempt else End(137, 1, opened=True, **own)
        link.send(opened=attempt)
        link.send(ended=attempt, end=end.as_json(), ports=[1, 2])
    return at


def launched(count: int, real: bool) -> dict[str, float]:
    """Launch on a number of hosts, and return the figures."""
    if str(_SUPPORT) not in sys.path:
        sys.path.insert(0, str(_SUPPORT))
    from agents import LocalHosts

    with tempfile.TemporaryDirectory() as name:
        result = Path(name, "result")
        hosts = LocalHosts(count) if real else PlayedHosts(count, result)
        plan = Plan(["true"], "", plain=True)
        directory = rundir.RunDirectory(Path(name, "run"))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        start, cpu, said = time.perf_counter(), time.process_time(), io.StringIO()
        with contextlib.redirect_stderr(said):
            code, reason = job_supervisor.run(hosts, plan, directory, environ)
        figures = {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        if code:
            raise SystemExit(f"{said.getvalue()}\n{count} nodes: {reason}")
        return figures if real else figures | json.loads(result.read_text())


def measure(arguments: argparse.Namespace) -> Results:
    """Return the figures by number of nodes."""
    arms = {f"{count} nodes, all agents real": partial(launched, count, True) for count in REAL}
    arms |= {f"{count} nodes, agents played": partial(launched, count, False) for count in PLAYED}
    rounds = take_turns(arms, arguments.rounds, warm_up=1)
    return {
        name: {key: summary([one[key] for one in own]) for key in own[0]}
        for name, own in rounds.items()
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        asyncio.run(play(int(sys.argv[2]), Path(sys.argv[3])))
    else:
        run("A launch on many nodes.", 5, ["hpctrain"], measure)
