"""The watchdog in a rank: it shares the heartbeat and starts the helper of its host."""

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from hpctrain.cluster import system
from hpctrain.cluster.world import World
from hpctrain.monitoring.watchdog import shared_memory
from hpctrain.monitoring.watchdog.limits import LEAST
from hpctrain.process.heartbeat import Heartbeat
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory

__all__ = ["WAKE", "Watchdog"]

WAKE = signal.SIGUSR1  # blocked in the helper, which waits for it between its looks
# Signals to the whole job step or to all processes of a terminal; the helper blocks them. With
# SIGTTOU blocked it can write to a terminal that would otherwise stop background processes.
_NOT_FOR_THE_HELPER = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU),
    *(WAKE, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
}
_SECONDS_TO_LEAVE = 5.0


class Watchdog:
    """Watchdog that ends the run when a rank is silent for too long; every rank creates one.

    The first rank of each host starts the helper and does not wait for it. If that is not possible,
    the run continues without a helper and logs a warning.

    Args:
        world: complete world, as after the rendezvous.
        timeout: seconds that a rank may be silent.
        least: shortest learnt time-out in seconds (default: 60).
        directory: run directory.
        key: unique name of this start, the same on all ranks.
        exit_status_file: path of rank 0's exit status file; None on other ranks.
        heartbeat: heartbeat of this rank, which begins at step 0.
        dump: FIFO and file of `Backend.dump_to`, or None.
    """

    def __init__(
        self,
        world: World,
        timeout: float,
        least: int | None,
        directory: RunDirectory,
        key: str,
        exit_status_file: str | None,
        heartbeat: Heartbeat,
        dump: tuple[str, str] | None = None,
    ) -> None:
        node_rank = world.node_rank or 0
        host = world.hosts[node_rank] if world.hosts else socket.gethostname()
        self._part: shared_memory.Part | None = None
        self._helper: subprocess.Popen[bytes] | None = None
        self._alone = world.local_world_size == 1
        self._heartbeat = heartbeat
        heartbeat.begin()
        settings = {
            "host": host,
            "hosts": world.hosts or (host,),
            "node_rank": node_rank,
            "rank": world.rank,
            "local_world_size": world.local_world_size,
            "world_size": world.world_size,
            "timeout": timeout,
            "least": LEAST if least is None else least,
            "directory": str(directory.path.absolute()),
            "key": key,
        }
        try:
            pid = os.getpid()
            status_file = os.path.abspath(exit_status_file) if exit_status_file else None
            facts = shared_memory.Facts(
                world.rank, pid, system.stat(pid).started, status_file, *(dump or ())
            )
            name = shared_memory.name(key, node_rank)
            self._part = shared_memory.Part(name, world.local_rank, facts, settings)
            heartbeat.write_to(*self._part.views)
            faulthandler.register(
                system.SPARE_SIGNAL, self._part.stack, all_threads=True, chain=False
            )
            if self._part.new:
                self._helper = _start(self._part.path)
        except OSError as error:
            logger.warning("no watchdog on %s: %s", host, error)

    def close(self) -> None:
        """End the watch of this rank. The helper ends with the last rank of the host."""
        part, helper = self._part, self._helper
        self._part = self._helper = None
        if part is None:
            return
        self._heartbeat.write_to_nobody()
        with contextlib.suppress(Exception):  # no error here may end the run
            part.leave()
            # From here on the signal would end this process; the helper no longer sends it.
            faulthandler.unregister(system.SPARE_SIGNAL)
            part.close()
            if helper is not None:
                helper.send_signal(WAKE)
                if self._alone:  # else other ranks of the host may stay in the run
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        helper.wait(_SECONDS_TO_LEAVE)
                # No thread can start in an interpreter that ends.
                if helper.poll() is None:
                    threading.Thread(target=helper.wait, daemon=True).start()


def _start(path: Path) -> "subprocess.Popen[bytes]":
    # A new process inherits blocked signals, so that no signal can end the helper at its start.
    # The helper stays in the session of the ranks: with autogroup, Linux schedules processors by
    # session, and a helper in its own session waited for seconds beside ranks that poll.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_THE_HELPER)
    helper = str(Path(__file__).with_name("helper.py").absolute())
    try:
        return subprocess.Popen(
            [sys.executable, "-S", "-P", helper, str(path)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
