"""Training of which one rank gets a fault: faulty.py FAULT RANK PLACE STEP.

The faults are those of NVIDIA's resiliency extension that need no GPU, made as it makes them: a
thread or another process makes them a moment after the rank has reached a place. It writes the time
to the file `fault`.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import hpctrain

# A shell without job control ignores it for what it starts in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

FAULT, VICTIM, PLACE, AT = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rank = hpctrain.detect().rank
asked = threading.Event()


def make_fault():
    """Make the fault, in a thread."""
    asked.wait()
    time.sleep(0.3)  # until the main thread waits in the sums
    note_time()
    pid, main = os.getpid(), ctypes.c_ulong(threading.main_thread().ident)
    if FAULT == "ASYNC_EXC":
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(RuntimeError))
    elif FAULT == "OS_ABORT":
        os.abort()
    elif FAULT == "LOCK_GIL":
        re.match(r"(a?){40}a{40}", "a" * 40)
    elif FAULT == "SEGFAULT":
        ctypes.string_at(1)
    elif FAULT != "WORKLOAD_EXC" and os.fork() == 0:
        os.kill(pid, signal.SIGUSR1 if FAULT == "SIGNAL_EXC" else getattr(signal, FAULT))
        os._exit(0)


def note_time():
    """Write the time of the fault."""
    Path("fault").write_text(repr(time.time()))


def raise_error(*_):
    """Raise the error of the victim."""
    note_time()
    raise RuntimeError("the error of the victim")


def reach(place):
    """Ask for the fault in its place, and stay there for a moment."""
    if run.step != AT or place != PLACE:
        return
    if rank == VICTIM:
        asked.set()
    if (rank == VICTIM) == (place == "collective"):
        return  # the victim waits in the sums for the others, or they for the victim
    for _ in range(150):
        time.sleep(0.01)
    if rank == VICTIM and FAULT == "WORKLOAD_EXC":
        raise_error()


class Samples(torch.utils.data.Dataset):
    """Samples of more steps than are needed."""

    def __len__(self):
        return 12 * (AT + 30)

    def __getitem__(self, index):
        reach("loading")
        return torch.full((64,), 1.0)


class Model(torch.nn.Sequential):
    """Layers with the fault in the forward pass."""

    def forward(self, points):
        """Return the output."""
        reach("forward")
        return super().forward(points)


if rank == VICTIM:
    threading.Thread(target=make_fault, daemon=True).start()
with hpctrain.Session(batch_size=4, workers=0, backend=os.environ["BLAMED_BACKEND"]) as session:
    model = Model(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = session.loader(Samples())
    with session.run() as run:
        if rank == VICTIM:
            signal.signal(signal.SIGUSR1, raise_error)
        for _ in run.epochs(1):
            for points in run.batches(loader):
                loss = model(points).square().mean()
                reach("collective")
                if (FAULT, PLACE, rank, run.step) == ("WORKLOAD_EXC", "collective", VICTIM, AT):
                    loss.register_hook(raise_error)
                session.step(loss)
                if run.step > AT:
                    time.sleep(0.2)  # until the ranks agree on a stop
