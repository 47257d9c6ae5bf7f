"""A rank may fork at any time, as a loader does for its workers, also beside a collective."""

import ctypes
import sys
import time
from collections import deque

import pytest
import ranks
import torch
import torch.distributed as dist
from battery import session

# Newer versions renew all their locks in a forked process before they take one.
pytestmark = pytest.mark.skipif(sys.version_info >= (3, 12), reason="concerns Python 3.11")
TIMES = 100


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


@pytest.mark.parametrize("run", ["auto", "horovod"], indirect=True)
def test_no_thread_makes_a_thread_state_at_the_end_of_an_exchange(run):
    for made in ranks.values(run(3, thread_states_of_exchanges)):
        assert not any(made.values()), made


def thread_states_of_another_group():
    with session(batch_size=2):
        group = dist.new_group()

        def act():
            work = dist.all_reduce(torch.ones(8), group=group, async_op=True)
            work.get_future().then(lambda future: None).wait()

        return made_by(act)


def test_threads_of_the_process_group_of_a_script_make_thread_states():
    """Then the test above can fail."""
    assert max(ranks.values(ranks.run(3, thread_states_of_another_group))) > 0
