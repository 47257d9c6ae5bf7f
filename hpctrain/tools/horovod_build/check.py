"""Test of the installed Horovod: two ranks of this machine compute a sum over gloo."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from hpctrain.cluster import commands, env_vars

__all__ = ["try_out"]

_SECONDS = 240.0  # for two imports of torch, from a file system with a cold cache
_SHOWN_LINES = 12
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
    command = [sys.executable, "-P", "-m", "hpctrain", "run", "--nproc-per-node", "2", "--"]
    command += [sys.executable, "-P", "-c", _RANK]
    # Here, and not on all hosts of a job.
    here = {**env, env_vars.LAUNCHER: "none", "OMP_NUM_THREADS": "1"}
    try:
        done = commands.run(command, _SECONDS, here)
    except commands.NoAnswerError as error:
        return {}, f"\n    {error}"
    facts = done.stdout.partition("{")[1:]  # after the number of the rank
    if facts[0] and not done.returncode:
        return json.JSONDecoder().raw_decode("".join(facts))[0], ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {}, "".join(f"\n    {line[:300]}" for line in lines[-_SHOWN_LINES:])
