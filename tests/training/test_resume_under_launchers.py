"""Runs that are stopped under the launchers of a laptop resume, bit for bit."""

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import faults
import launches
import pytest
import survivor

from hpctrain import rundir
from hpctrain.errors import exit_codes
from hpctrain.rundir.exit_status import read_exit_status

pytestmark = pytest.mark.slow

SIZE = 3
LAUNCHERS = {
    "hpctrain run": ["hpctrain", "run", "--nproc-per-node", "3"],
    "torchrun": ["torchrun", "--nproc-per-node", "3", "--"],
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "3"],
    "mpich": ["mpiexec.hydra", "-np", "3"],
    "horovodrun": ["horovodrun", "--gloo", "-np", "3"],
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request, lacking):
    """Return a launcher's name, and its command for three ranks of a Python script."""
    program, *arguments = LAUNCHERS[request.param]
    found = shutil.which(program, path=f"{launches.BIN}:{os.environ['PATH']}")
    if request.param == "horovodrun" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    if found is None:
        lacking(request.param, f"{program} is not there")
    python = [] if program in ("torchrun", "hpctrain") else [launches.PYTHON]
    return request.param, [found, *arguments, *python]


def backend_options(name):
    return ("--backend", "horovod" if name == "horovodrun" else "ddp")


def start(command, *options, act=lambda process: None):
    """Start survivor.py; return the exit code of the launcher, and that of the exit status file."""
    exit_status_file, stop = Path("run.exit-status").absolute(), Path("run.stop").absolute()
    exit_status_file.unlink(missing_ok=True)
    stop.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*command, survivor.__file__, *faults.OPTIONS, *options, "--resume", "--run-dir", "run"],
        env=launches.environ(
            HPCTRAIN_EXIT_STATUS_FILE=str(exit_status_file), HPCTRAIN_STOP_FILE=str(stop)
        ),
        start_new_session=True,
    )
    try:
        act(process)
        code = process.wait(180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status = read_exit_status(exit_status_file)
    return code, status[0] if status else None


def wait_until_training(seconds=120.0):
    deadline = time.monotonic() + seconds
    while faults.last_steps("run").keys() != set(range(SIZE)):
        assert time.monotonic() < deadline, "no rank took a step"
        time.sleep(0.05)


def stop_run(process, how):
    wait_until_training()
    if how == "file":
        Path("run.stop").touch()
    elif how == "a rank":
        os.kill(ranks_of(process)[1], signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)


def ranks_of(process):
    """Return the ids of the processes that run the script."""
    commands = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
        for pid in survivor.descendants(process.pid)
    }
    return sorted(
        pid
        for pid, (program, *more) in commands.items()
        if b"python" in program and survivor.__file__.encode() in more
    )


@pytest.mark.parametrize("how", ["file", "a rank", "the launcher"])
def test_preemption_and_resume_under_a_launcher(references, launcher, how):
    """Stop by a stop file, by TERM to a rank, or by TERM to the launcher, then resume."""
    name, command = launcher
    over = backend_options(name)
    paced = (*over, "--pace", "0.2")
    _, exit_status = start(command, *paced, act=lambda process: stop_run(process, how))
    # Open MPI's mpirun kills its ranks a second after TERM, even if they have not saved.
    saved = (name, how, exit_status) != ("openmpi", "the launcher", None)
    if saved:
        assert exit_status == exit_codes.STOPPED
        assert set(faults.last_steps("run").values()) == {rundir.RunDirectory("run").steps()[-1]}
    assert start(command, *over) == (0, exit_codes.DONE)
    faults.same("run", references(SIZE, *over), twice=0 if saved else None)
