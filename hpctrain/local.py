"""Starts ranks on this machine, passes their output on with the rank in front, and ends them.

Never imports torch.
"""

import ctypes
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from hpctrain import rundir, variables
from hpctrain.errors import UsageError
from hpctrain.launchers import LAUNCHERS
from hpctrain.speech import abandon
from hpctrain.world import World

__all__ = ["AS", "layout", "start"]

# What `--as` takes: the launchers whose variables the ranks can get.
AS = ("hpctrain", "slurm")

_LAST_LINES = 20
# A rank that lost another one ends by itself within seconds, with an error worth reading.
_SECONDS_TO_FAIL = 5.0
_SECONDS_TO_STOP = 5.0


def layout(nodes: int, per_node: str, gpus: int) -> tuple[int, ...]:
    """The number of ranks on each host.

    Args:
        nodes: hosts.
        per_node: a number, `auto` (this machine's GPUs, dealt out to
            the hosts, or one rank where there is none), or a list such as
            `2,1` with a number for each host.
        gpus: of this machine.

    Raises:
        UsageError: no number, none at all, or a list of another length.
    """
    if per_node == "auto":
        return (max(gpus // nodes, 1),) * nodes
    try:
        counts = tuple(int(piece) for piece in per_node.split(","))
    except ValueError:
        counts = ()
    if len(counts) == 1:
        counts *= nodes
    if len(counts) != nodes or any(count < 1 for count in counts):
        raise UsageError(
            f"--nproc-per-node {per_node} for {nodes} node{'s' if nodes > 1 else ''}",
            "a number from 1 on, auto, or as many numbers with commas as there are nodes",
            "--nproc-per-node 2    or: --nodes 2 --nproc-per-node 2,1",
        )
    return counts


def start(
    command: Sequence[str],
    tasks_per_node: Sequence[int],
    env: Mapping[str, str],
    style: str = "hpctrain",
    gpus: Sequence[str] = (),
) -> int:
    """Start a command once for each rank, and wait for all of them.

    Args:
        command: program and arguments, the same for all ranks.
        tasks_per_node: ranks on each host; several hosts are pretended, over loopback.
        env: the environment to start from; what launchers left in it is taken out.
        style: one of `AS`: whose variables the ranks get.
        gpus: of this machine, as CUDA_VISIBLE_DEVICES names them. Pretended hosts get their own
            ones, or none where they do not go round.

    Returns:
        The code of the verdict where rank 0 left one, else that of the first rank that failed.
    """
    launcher = next(one for one in LAUNCHERS if one.name == style)
    number = secrets.randbelow(2**31)
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        verdict = Path(folder) / "verdict"
        ranks: list[_Rank] = []
        try:
            for world in _worlds(tasks_per_node):
                environ = {
                    **_environ(world, env),
                    **_own_gpus(world, tasks_per_node, gpus),
                    **launcher.environ(world, tasks_per_node, number),
                    variables.VERDICT: str(verdict),
                }
                ranks.append(_Rank(world.rank, _popen(command, environ)))
            code = _Watch(ranks).wait()
        finally:
            for rank in ranks:
                rank.signal(signal.SIGKILL)
        said = rundir.read_verdict(verdict)
    # A verdict of 0 does not cover what a rank did after its session.
    return said[0] if said and (said[0] or not code) else code


def _environ(world: World, env: Mapping[str, str]) -> dict[str, str]:
    """What a rank gets whatever the launcher: a clean environment, one place to meet, its cores."""
    environ = {**variables.scrubbed(env), variables.MAIN_ADDRESS: "127.0.0.1"}
    if world.num_nodes != 1 and world.hosts and world.node_rank is not None:
        environ[variables.HOSTNAME] = world.hosts[world.node_rank]
    # Several ranks that each take all cores are slower than one.
    threads = max(1, len(os.sched_getaffinity(0)) // world.world_size)
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    environ.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold lines back
    return environ


def _own_gpus(world: World, tasks_per_node: Sequence[int], gpus: Sequence[str]) -> dict[str, str]:
    """The GPUs of a pretended host: real hosts do not share theirs."""
    if not gpus or world.node_rank is None or len(tasks_per_node) == 1:
        return {}
    if sum(tasks_per_node) > len(gpus):
        return {"CUDA_VISIBLE_DEVICES": ""}
    first = sum(tasks_per_node[: world.node_rank])
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + tasks_per_node[world.node_rank]])}


def _worlds(tasks_per_node: Sequence[int]) -> list[World]:
    """All ranks of a layout, host by host."""
    hosts = tuple(f"node{index + 1}" for index in range(len(tasks_per_node)))
    if len(hosts) == 1:
        hosts = (os.uname().nodename,)
    worlds: list[World] = []
    for node_rank, tasks in enumerate(tasks_per_node):
        for local_rank in range(tasks):
            worlds.append(
                World(
                    rank=len(worlds),
                    world_size=sum(tasks_per_node),
                    local_rank=local_rank,
                    local_world_size=tasks,
                    node_rank=node_rank,
                    num_nodes=len(hosts),
                    hosts=hosts,
                )
            )
    return worlds


def _popen(command: Sequence[str], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    # A session of its own, so that Ctrl-C reaches the ranks once, from here, and whatever they
    # start can be ended with them.
    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509, there are no threads yet
    )


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_parent() -> None:
    """Even a kill -9 of `hpctrain run` leaves no rank behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class _Rank:
    rank: int
    process: "subprocess.Popen[bytes]"
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))

    def signal(self, number: int) -> None:
        """To the rank and all that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


class _Watch:
    """Waits for ranks; when one fails, ends the others."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self.ranks = ranks
        self.left: queue.SimpleQueue[_Rank | int] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def wait(self) -> int:
        """The exit code of the first rank that failed, as a shell has it; 0 when none did."""
        pumps = [threading.Thread(target=self._pump, args=(rank,)) for rank in self.ranks]
        waiters = [threading.Thread(target=self._reap, args=(rank,)) for rank in self.ranks]
        for thread in pumps + waiters:
            thread.daemon = True
            thread.start()
        before = {
            number: signal.signal(number, lambda caught, _: self.left.put(caught))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            return self._watch(pumps)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, pumps: Sequence[threading.Thread]) -> int:
        running = {rank.rank for rank in self.ranks}
        first: _Rank | None = None
        interrupted = 0
        limit: float | None = None
        escalation: Iterator[int] = iter(())
        while running:
            try:
                event = self.left.get(timeout=limit)
            except queue.Empty:
                self._signal(next(escalation, signal.SIGKILL))
                limit = _SECONDS_TO_STOP
                continue
            if isinstance(event, int):
                interrupted += 1
                # Once the ranks may leave by themselves; the second time is an order.
                self._signal(event if interrupted == 1 else signal.SIGKILL)
                continue
            running.discard(event.rank)
            if event.process.returncode and first is None:
                first = event
                limit, escalation = _SECONDS_TO_FAIL, iter((signal.SIGTERM,))
        # Something that a rank started may hold its pipe open; it is killed right after.
        end = time.monotonic() + 1.0
        for thread in pumps:
            thread.join(timeout=max(0.0, end - time.monotonic()))
        if first is None:
            return 0
        self._tell(first)
        code = first.process.returncode
        return code if code > 0 else 128 - code

    def _signal(self, number: int) -> None:
        for rank in self.ranks:
            if rank.process.returncode is None:
                rank.signal(number)

    def _reap(self, rank: _Rank) -> None:
        rank.process.wait()
        self.left.put(rank)

    def _pump(self, rank: _Rank) -> None:
        streams = ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr))
        threads = [
            threading.Thread(target=self._copy, args=(rank, source, target), daemon=True)
            for source, target in streams
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _copy(self, rank: _Rank, source: BinaryIO, target: TextIO) -> None:
        label = f"{rank.rank}: " if len(self.ranks) > 1 else ""
        for line in source:
            text = line.decode(errors="replace")
            if target is sys.stderr:
                rank.last_lines.append(text)
            if label and not text.endswith("\n"):
                text += "\n"  # or the line of another rank would follow on this one
            encoding = target.encoding or "utf-8"
            text = (label + text).encode(encoding, "replace").decode(encoding)
            with self.lock:
                try:
                    target.write(text)
                    target.flush()
                except OSError:
                    abandon(target)  # and go on: a rank whose pipe nobody empties would hang

    def _tell(self, first: _Rank) -> None:
        """The first rank that failed has the cause; what the others say comes of it."""
        code = first.process.returncode
        # Of wrong use every rank has said the same, in a few lines.
        if len(self.ranks) == 1 or code == UsageError.exit_code:
            return
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        sys.stderr.write(f"hpctrain: rank {first.rank} failed first, with {how}. It said:\n")
        sys.stderr.write("".join(f"  {line}" for line in first.last_lines))
        sys.stderr.flush()
