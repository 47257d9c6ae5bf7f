"""Test of the installed Horovod: two ranks of this machine compute a sum over gloo."""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from hpctrain.cluster.launchers.horovodrun import Horovodrun
from hpctrain.cluster.world import World
from hpctrain.rendezvous.http_store import HttpStore

__all__ = ["try_out"]

_SECONDS = 240.0  # for two imports of torch, from a file system with a cold cache
_SHOWN_LINES = 12
_RANKS = 2
_RANK = """
import json, pathlib, torch, horovod, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum, name="check").tolist()
assert total == [3.0] * 3, f"the sum over two ranks is {total}, not 3"
if hvd.rank() == 0:
    built = json.loads(pathlib.Path(horovod.__file__).with_name("metadata.json").read_text())
    print(json.dumps({"version": horovod.__version__, "torch": built.get("pytorch"),
                      "gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()),
                      "nccl": bool(hvd.nccl_built())}))
hvd.shutdown()
"""


def try_out(env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Import Horovod in two ranks, and let them compute a sum over gloo.

    Returns:
        Facts and "": "version", the "torch" it was built for, and whether "gloo", "mpi" and "nccl"
        are built in. After a failure, no facts and the last lines of the output.
    """
    store = HttpStore(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=store.serve_forever, daemon=True).start()
    with tempfile.TemporaryFile() as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", _RANK],
                env={**env, **_variables(rank, store.server_address[1])},
                stdout=output,
                stderr=output,
            )
            for rank in range(_RANKS)
        ]
        try:
            failed = not _succeed(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            store.shutdown()
            store.server_close()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    facts = [line for line in lines if line.startswith("{")]
    if facts and not failed:
        return json.loads(facts[-1]), ""
    return {}, "".join(f"\n    {line[:300]}" for line in lines[-_SHOWN_LINES:])


def _succeed(ranks: "list[subprocess.Popen[bytes]]") -> bool:
    """Wait until all ranks have ended; return False at the first failure or after some minutes."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            return not any(codes)
        time.sleep(0.05)
    return False


def _variables(rank: int, port: int) -> dict[str, str]:
    """Return the variables that horovodrun sets for a rank."""
    return {
        **Horovodrun().environ(World(rank, _RANKS, rank, _RANKS, 0, 1), (_RANKS,), 0),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
