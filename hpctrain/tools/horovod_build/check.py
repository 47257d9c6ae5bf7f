"""Test of the installed Horovod: two ranks on this machine import it and compute a sum.

    python -P check.py

This is a separate program, so that its caller does not load Horovod. It starts the ranks itself,
with gloo on the loopback interface, and a rendezvous server on a free port. With -P, Python imports
no module from this folder or the current one.
Source: horovod/runner/gloo_run.py and http/http_server.py, Horovod 0.28.1.
"""

import os
import subprocess
import sys
import threading
import time
from typing import Any

_RANKS = 2
_SECONDS_BETWEEN_LOOKS = 0.05
_RANK = """
import json, torch, horovod, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum, name="check").tolist()
assert total == [3.0] * 3, f"the sum over two ranks is {total}, not 3"
if hvd.rank() == 0:
    print(json.dumps({"version": horovod.__version__, "gloo": bool(hvd.gloo_built()),
                      "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())}))
hvd.shutdown()
"""


def main() -> int:
    """Start the ranks and wait for them; return 0 if all succeed, else 1."""
    server, port = _serve()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", _RANK], env={**os.environ, **_variables(rank, port)}
        )
        for rank in range(_RANKS)
    ]
    # Stop at the first failure, as the other rank would wait for the failed one.
    while not any(rank.poll() for rank in ranks) and None in (rank.returncode for rank in ranks):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    codes = [rank.returncode for rank in ranks if rank.returncode]
    for rank in ranks:
        rank.kill()
        rank.wait()
    server.shutdown()
    return 1 if codes else 0


def _serve() -> tuple[Any, int]:
    """Start the rendezvous server of the ranks, on loopback only, and return it and its port."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    server.init([SlotInfo("localhost", rank, rank, 0, _RANKS, _RANKS, 1) for rank in range(_RANKS)])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, server.server_address[1]


def _variables(rank: int, port: int) -> dict[str, str]:
    """Return the variables that horovodrun sets for a rank."""
    return {
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(_RANKS),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(_RANKS),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
