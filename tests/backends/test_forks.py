"""A rank may fork at any time, as a loader does for its workers, also beside a collective."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque

import pytest
import ranks
import torch
import torch.distributed as dist
from battery import HOROVOD_SLOW, session, train
from processes import until

# Newer versions renew all their locks in a forked process before they take one.
ONLY_3_11 = pytest.mark.skipif(sys.version_info >= (3, 12), reason="concerns Python 3.11")
TIMES = 30


def thread_states():
    """Return how many Python thread states this process has made, by the number of a new one."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = api.PyThreadState_New.restype = ctypes.c_void_p
    api.PyThreadState_GetID.restype = ctypes.c_uint64
    state = ctypes.c_void_p(api.PyThreadState_New(ctypes.c_void_p(api.PyInterpreterState_Get())))
    number = api.PyThreadState_GetID(state)
    api.PyThreadState_Clear(state)
    api.PyThreadState_Delete(state)
    return number


def made_by(function):
    """Return how many thread states other threads make while a function is called often."""
    before = thread_states()
    for _ in range(TIMES):
        function()
    time.sleep(0.1)  # a thread may release a tensor after the end of its collective
    return thread_states() - before - 1


def exchanges(backend):
    numbers = torch.ones(8, dtype=torch.float64)
    pending = deque([backend.sum_async([1.0])])

    def read_later():
        pending.append(backend.sum_async([1.0] * 8))
        if len(pending) > 4:
            pending.popleft().values()

    return {
        "sum_async": lambda: backend.sum_async([1.0] * 8).values(),
        "sum_async, read later": read_later,
        "sum": lambda: backend.sum(numbers.clone()),
        "all_gather": lambda: backend.all_gather(torch.ones(8, dtype=torch.uint8)),
        "gather_object": lambda: backend.gather_object("text"),
        "broadcast_object": lambda: backend.broadcast_object("text"),
        "broadcast": lambda: backend.broadcast([numbers]),
        "all_gather_text": lambda: backend.all_gather_text("text"),
        "barrier": backend.barrier,
    }


def thread_states_of_exchanges():
    with session(batch_size=2) as opened:
        return {name: made_by(act) for name, act in exchanges(opened.backend).items()}


@ONLY_3_11
@HOROVOD_SLOW
def test_no_thread_makes_a_thread_state_at_the_end_of_an_exchange(run):
    for made in ranks.values(run(3, thread_states_of_exchanges)):
        assert not any(made.values()), made


def thread_states_of_a_training():
    """Return how many thread states and how many threads a training makes."""
    started = []
    start = threading.Thread.start
    with pytest.MonkeyPatch.context() as patch, session(batch_size=2, max_steps=12) as opened:
        patch.setattr(threading.Thread, "start", lambda one: (started.append(one), start(one)))
        before = thread_states()
        train(opened, 12)
        time.sleep(0.1)
        return thread_states() - before - 1, len(started)


@ONLY_3_11
@pytest.mark.parametrize("run", ["auto", "horovod"], indirect=True)
def test_only_new_threads_make_thread_states_in_a_training(run):
    for made, started in ranks.values(run(3, thread_states_of_a_training)):
        assert made == started


def fork_beside_exchanges():
    """Fork while sums end; return how many of the processes never ran."""
    hung = 0
    with session(batch_size=2) as opened:
        for _ in range(TIMES):
            works = [opened.backend.sum_async([1.0] * 20) for _ in range(6)]
            opened.backend.sum(torch.ones(1))
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            try:
                until(lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0])
            except AssertionError:
                hung += 1
                os.kill(pid, signal.SIGKILL)
            for work in works:
                work.values()
    return hung


@pytest.mark.slow
@pytest.mark.parametrize("run", ["auto", "horovod"], indirect=True)
def test_forked_processes_run(run):
    assert ranks.values(run(3, fork_beside_exchanges)) == [0, 0, 0]


def thread_states_of_another_group():
    with session(batch_size=2):
        group = dist.new_group()

        def act():
            work = dist.all_reduce(torch.ones(8), group=group, async_op=True)
            work.get_future().then(lambda future: None).wait()

        return made_by(act)


@ONLY_3_11
def test_threads_of_the_process_group_of_a_script_make_thread_states():
    """Then the test above can fail."""
    assert max(ranks.values(ranks.run(3, thread_states_of_another_group))) > 0
