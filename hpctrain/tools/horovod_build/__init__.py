"""Build, cache and installation of a Horovod that fits the installed torch.

Horovod's last release, 0.28.1, does not compile against torch 2.1 or later, as it requires C++14.
pip fetches its source package. hpctrain changes a few lines (`patches.toml`), lets pip compile it
once for each combination of versions, and keeps the wheel in the cache.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.cluster import commands, env_vars
from hpctrain.errors import HpctrainError
from hpctrain.tools.horovod_build import wheel
from hpctrain.tools.horovod_build.plan import Plan, ask_torch, decide
from hpctrain.tools.horovod_build.wheel import VERSION, PrintLine

__all__ = ["build", "try_out"]

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
                      "nccl": bool(hvd.nccl_built()),
                      "recipe": getattr(horovod, "mended_by_hpctrain", 0)}))
hvd.shutdown()
"""


def build(
    cuda: bool | None, mpi: bool, wheel_only: bool, env: Mapping[str, str], print_line: PrintLine
) -> Path | None:
    """Build the wheel or find it in the cache, install it, and test it with two ranks.

    Args:
        cuda: whether to build for GPUs with NCCL; None to choose by torch and the machine.
        mpi: whether to build with MPI as well.
        wheel_only: whether to skip the installation and the test.
        env: environment of this process.
        print_line: function that prints one line for each step.

    Returns:
        Path of the wheel; None if the installed Horovod fits.

    Raises:
        UsageError: the machine or its torch does not support such a build.
        HpctrainError: a requirement is missing, or a step failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise HpctrainError("HT910.no-pip", python=sys.executable)
    # Horovod's build reads Horovod's variables too. Of them, keep only the NCCL that the user set.
    env = {
        name: value
        for name, value in env_vars.scrubbed(env).items()
        if not name.startswith("HOROVOD_") or name.startswith("HOROVOD_NCCL_")
    }
    torch = ask_torch(env)
    plan = decide(torch, cuda, mpi, env)
    device = f"GPUs over NCCL, with CUDA {plan.cuda.version}" if plan.cuda else "CPUs"
    over = f"gloo and the MPI of {plan.mpi}" if plan.mpi else "gloo"
    print_line(
        f"Horovod {VERSION} for torch {torch.version} on {device}; ranks connect over {over}"
    )
    if not wheel_only and importlib.util.find_spec("horovod") is not None:
        wrong, facts = _examine(plan, env)
        if not wrong:
            print_line(f"the installed Horovod fits: {_described(facts)}")
            return None
        print_line(f"the installed Horovod {wrong}")
    path = wheel.get(plan, env, print_line)
    if not wheel_only:
        _install(path, plan, env, print_line)
    return path


def _examine(plan: Plan, env: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return what is wrong with the installed Horovod ("" if nothing is), and its facts."""
    facts, output = try_out(env)
    features = {"gloo": True, "mpi": bool(plan.mpi), "nccl": plan.cuda is not None}
    missing = [name for name, needed in features.items() if needed and not facts.get(name)]
    if not facts:
        return f"does not work:{output}", facts
    if facts["torch"] != plan.torch.version:
        return f"was built for torch {facts['torch']}", facts
    if facts["recipe"] < wheel.RECIPE:
        return "lacks changes that this build makes", facts
    return (f"has no {', '.join(missing)}" if missing else ""), facts


def try_out(env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Import Horovod in two ranks, and let them compute a sum over gloo.

    Returns:
        Facts and "": "version", the "torch" it was built for, whether "gloo", "mpi" and "nccl" are
        built in, and the "recipe" of the build. After a failure, no facts and the last lines of the
        output.
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


def _described(facts: Mapping[str, Any]) -> str:
    over = ", ".join(name for name in ("gloo", "mpi", "nccl") if facts[name])
    return f"{facts['version']}, built with {over}; two ranks computed a sum over gloo"


def _install(path: Path, plan: Plan, env: Mapping[str, str], print_line: PrintLine) -> None:
    """Install a wheel for this Python with its requirements that are missing, and test it.

    Raises:
        HpctrainError: pip fails, or the installed Horovod does not work.
    """
    print_line(f"installing it for {sys.executable}")
    # pip replaces an installation of the same release only with --force-reinstall. Without
    # --no-deps that would reinstall the requirements too, so a second call adds the missing ones.
    with tempfile.TemporaryDirectory(prefix="hpctrain-horovod-") as folder:
        log = Path(folder) / "log"
        for options in (("--force-reinstall", "--no-deps"), ()):
            command = wheel.pip("install", "-q", *options, str(path))
            if code := wheel.run(command, env, log, print_line):
                shown, python = wheel.excerpt(log), sys.executable
                raise HpctrainError(
                    "HT917.not-installed", path=path, code=code, excerpt=shown, python=python
                )
    wrong, facts = _examine(plan, env)
    if wrong:
        raise HpctrainError("HT918.does-not-work", path=path, problem=wrong)
    print_line(f"installed Horovod {_described(facts)}")
