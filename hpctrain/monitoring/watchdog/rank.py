"""The side of a rank: it says how far it is."""

import contextlib
import faulthandler
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.cluster.world import World
from hpctrain.monitoring.watchdog import slots
from hpctrain.monitoring.watchdog.phases import IDLE, PHASES
from hpctrain.monitoring.watchdog.processes import start_time
from hpctrain.monitoring.watchdog.stacks import SIGNAL
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

__all__ = ["Watchdog"]

# Signals that go to the whole step, or to all that a terminal has started: not for the helper.
# With SIGTTOU blocked it may write to a terminal that stops background jobs for that.
_NOT_FOR_THE_HELPER = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
}
_SECONDS_TO_LEAVE = 5.0

_pack, _now = slots.PLACE.pack_into, time.monotonic_ns


class Watchdog:
    """Ends this run when a rank is silent for too long. Made by every rank.

    The first rank of each host starts its helper and does not wait for it. Where that is not
    possible the run goes on without, and says so.

    Args:
        world: complete, as after the rendezvous.
        timeout: seconds that a rank may be silent.
        directory: of the run.
        key: names this start: unlike that of any other, the same on all ranks.
        verdict: the file in which rank 0 would say how the run ended; None on the other ranks.

    Attributes:
        step: optimizer steps done; told with the next beat.
        seconds: by phase, how long this rank has been in it; the one under way is not counted yet.
        beat: called with each phase of `PHASES` as it begins, several times in each step: says that
            this rank lives. In `IDLE` silence is allowed.
    """

    def __init__(
        self,
        world: World,
        timeout: float,
        directory: RunDirectory,
        key: str,
        verdict: str | None,
    ) -> None:
        node_rank = world.node_rank or 0
        host = world.hosts[node_rank] if world.hosts else socket.gethostname()
        self._slot: slots.Slot | None = None
        self._helper: subprocess.Popen[bytes] | None = None
        self._alone = False  # whether the helper ends with this rank
        # Beats go there, and to nobody, where there is no slot.
        self._memory: bytearray | mmap.mmap = bytearray(slots.PLACE.size)
        self.step = 0
        self.seconds = [0.0] * len(PHASES)
        self.heartbeat = self._pulse()
        settings = {
            "host": host,
            "hosts": world.hosts or (host,),
            "node_rank": node_rank,
            "rank": world.rank,
            "local_world_size": world.local_world_size,
            "world_size": world.world_size,
            "timeout": timeout,
            "directory": str(directory.path.absolute()),
            "key": key,
        }
        try:
            pid = os.getpid()
            told = os.path.abspath(verdict) if verdict else None
            facts = slots.Facts(world.rank, pid, start_time(pid), told)
            folder = slots.name(key, node_rank)
            self._slot, new = slots.take(folder, facts, settings)
            self._memory = self._slot.memory
            faulthandler.register(SIGNAL, self._slot.stack, all_threads=True, chain=False)
            if new:
                self._helper = _start(self._slot.folder)
                self._alone = world.local_world_size == 1
        except OSError as error:
            logger.warning("no watch for hangs on %s: %s", host, error)

    def _pulse(self) -> Callable[[int], None]:
        """One function and one look at the clock for all that has to know of a phase.

        Between the kernels of a model the processor has forgotten all of this each time, so every
        further call would cost microseconds.
        """
        seconds, last, since = self.seconds, IDLE, _now()

        def heartbeat(phase: int) -> None:
            nonlocal last, since
            now = _now()
            _pack(self._memory, 0, self.step, phase, now)
            seconds[last] += (now - since) * 1e-9
            last, since = phase, now

        return heartbeat

    def close(self) -> None:
        """Watch this rank no more. With the last one of the host the helper ends."""
        slot, helper = self._slot, self._helper
        self._slot = self._helper = None
        if slot is None:
            return
        self._memory = bytearray(slots.PLACE.size)
        with contextlib.suppress(Exception):  # nothing that fails here is worth a run
            slot.leave()
            # From here on that signal would end this process; the helper sends it no more.
            faulthandler.unregister(SIGNAL)
            slot.close()
            if helper is not None:
                _part(helper, self._alone)


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    # What is blocked stays so in a new process: no moment in which a signal would end the helper.
    # It stays in the session of the ranks: Linux shares processors out by session where autogroup
    # is on, and beside ranks that poll, a helper in one of its own was seen to wait for seconds.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_THE_HELPER)
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-S", "-P"),
                *(str(Path(__file__).with_name("helper.py").absolute()), str(folder)),
            ],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _part(helper: "subprocess.Popen[bytes]", alone: bool) -> None:
    """Wait for the helper's end where no other rank is at work; else a thread does."""
    if alone:
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(_SECONDS_TO_LEAVE)
    if helper.poll() is None:
        threading.Thread(target=helper.wait, name="watchdog's end", daemon=True).start()
