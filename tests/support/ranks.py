"""Ranks for tests: real processes that communicate, forked from a server that has imported torch.

Where the launcher is not the subject this takes 0.1 s instead of the seconds that importing torch
costs each rank.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any
from unittest import mock

from hpctrain.cluster.launchers.frameworks import HpctrainRun
from hpctrain.cluster.world import World

_CONTEXT = multiprocessing.get_context("forkserver")
# Modules that each rank would import: for its test, to open a backend, at the first step of an
# optimizer, to read a checkpoint. The server ignores missing ones.
_CONTEXT.set_forkserver_preload(
    [
        *(
            "pytest",
            "hpctrain.training.session",
            "hpctrain.backends.ddp",
            "hpctrain.backends.horovod",
        ),
        *("torch._dynamo", "torch.utils.serialization", "horovod.torch"),
    ]
)
# Tests start ranks in several threads; overlapping patches of the environment would remain.
_STARTING = threading.Lock()


def run(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    layout: Sequence[int] = (),
    timeout: float = 180.0,
    absent: Sequence[int] = (),
    env: dict[str, str] | None = None,
    kill_rest: bool = False,
) -> list[Any]:
    """Run a function of a test module on each rank; return its results, or exceptions, by rank.

    Args:
        size: ranks.
        function: called on each rank in the current folder, with the variables of
            `hpctrain run`; what it returns is pickled.
        arguments: of the function.
        layout: ranks on each simulated host (default: all on one).
        timeout: seconds; ranks that are left then are killed and the test fails.
        absent: ranks that are never started.
        env: more variables for all ranks.
        kill_rest: whether a rank that ends without a result ends the others, as launchers do.
    """
    # OpenMP reads this when it is loaded: in the server, or at the start of a rank.
    with _STARTING, mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    layout = layout or (size,)
    number = secrets.randbelow(2**31)
    pipes, processes = {}, {}
    hosts = tuple(f"node{n + 1}" for n in range(len(layout)))
    rank = 0
    for node_rank, tasks in enumerate(layout):
        for local_rank in range(tasks):
            world = World(rank, size, local_rank, tasks, node_rank, len(layout), hosts, "hpctrain")
            environ = {
                **HpctrainRun().environ(world, layout, number),
                "HPCTRAIN_MAIN_ADDRESS": "127.0.0.1",
                "HPCTRAIN_HOSTNAME": hosts[node_rank],
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            if rank not in absent:
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                process = _CONTEXT.Process(
                    target=_rank, args=(sender, os.getcwd(), environ, function, arguments)
                )
                process.start()
                sender.close()
                pipes[rank], processes[rank] = receiver, process
            rank += 1
    try:
        victims = list(processes.values()) if kill_rest else []
        return _collect(size, pipes, time.monotonic() + timeout, victims)
    finally:
        for process in processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in pipes.values():
            pipe.close()


def _collect(
    size: int, pipes: dict[int, Any], deadline: float, victims: Sequence[Any]
) -> list[Any]:
    results: list[Any] = [None] * size
    waiting = dict(pipes)
    while waiting:
        ready = multiprocessing.connection.wait(
            list(waiting.values()), max(0.0, deadline - time.monotonic())
        )
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting)} did not finish in time")
        for rank in [r for r, pipe in waiting.items() if pipe in ready]:
            try:
                results[rank] = pickle.loads(waiting[rank].recv_bytes())
            except EOFError:
                results[rank] = RuntimeError("the process ended without a result")
                for process in victims:
                    process.kill()
            del waiting[rank]
    return results


def values(results: Sequence[Any]) -> list[Any]:
    """Return the results of ranks; raise the first error, if any."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def _rank(
    pipe: Any, folder: str, environ: dict[str, str], function: Any, arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # else each collection would visit the server's objects again
    os.chdir(folder)
    os.environ.update(environ)
    sys.argv = ["test.py"]
    # As in a script. With the server's method, the first worker of each rank would start a server.
    multiprocessing.set_start_method(None, force=True)
    import torch

    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except SystemExit as leave:
        result = ("exit", leave.code)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        result = error
    try:
        # Plain pickle: multiprocessing shares tensors with a process that may have ended by then.
        pipe.send_bytes(pickle.dumps(result))
    except Exception as error:
        pipe.send_bytes(pickle.dumps(RuntimeError(f"{result!r} cannot be sent: {error}")))
    pipe.close()
