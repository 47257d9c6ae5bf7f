"""A rank forks while no collective of gloo is ending, where CPython would lose the child."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
from battery import session

OLD = pytest.mark.skipif(sys.version_info >= (3, 12), reason="CPython 3.12 renews the lock first")
# Lets a thread of gloo keep each lock of the interpreter for a millisecond longer.
SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <unistd.h>
int sem_post(sem_t *lock) {
  static int (*release)(sem_t *);
  char name[32] = "";
  if (!release) release = dlsym(RTLD_NEXT, "sem_post");
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (!strncmp(name, "pt_gloo", 7)) usleep(1000);
  return release(lock);
}
"""
FORKS = 60
SCRIPT = f"""
import os, time, torch, hpctrain

def hangs():
    child = os.fork()
    if child == 0:
        os._exit(0)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return 0
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 1

with hpctrain.Session(backend="ddp", batch_size=4, run_dir="run", log_every=1) as session:
    model = torch.nn.Linear(8, 1)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    found = 0
    with session.run() as run:
        for step in run.steps({FORKS}):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            session.step(loss)
            run.log(loss=loss)
            if step % 3 == 0:
                session.sum(1.0)
            found += hangs()
    open(f"hangs-{{session.world.rank}}", "w").write(str(found))
"""


def fork_beside_a_sum():
    with session() as opened:
        if opened.world.rank == 0:
            work = opened.backend.sum_async([1.0])
            child = os.fork()
            if child == 0:
                os._exit(0)
            ready = work.ready()
            os.waitpid(child, 0)
        else:
            time.sleep(0.5)  # rank 0 has begun, and would have forked
            work, ready = opened.backend.sum_async([1.0]), True
        return ready, work.values()


@OLD
def test_fork_waits_for_an_asynchronous_sum():
    assert ranks.values(ranks.run(2, fork_beside_a_sum)) == [(True, [2.0])] * 2


@OLD
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_no_child_is_lost_beside_the_sums_of_a_run(tmp_path):
    source, library, script = (tmp_path / name for name in ("slow.c", "slow.so", "train.py"))
    source.write_text(SLOW)
    script.write_text(SCRIPT)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-m", "hpctrain", "run", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=600, capture_output=True)
    assert [Path(tmp_path / f"hangs-{rank}").read_text() for rank in (0, 1)] == ["0", "0"]
