"""`hpctrain.submit` without Slurm: ranks on this machine, and one rank in this process."""

import os
import signal
import time
from pathlib import Path

import pytest

import hpctrain
from hpctrain import JobSpec
from hpctrain.errors import HpctrainError

HOSTILE = "a'b\"c $(touch canary) `touch canary` \\ \n; touch canary # ä%j\t*~!"


def test_submit_function_local_gives_ranks_their_world_arguments_and_environment(monkeypatch):
    # A nested function, so that the ranks do not import this module and torch.
    def place(what, *, more):
        import hpctrain

        world = hpctrain.detect()
        print("printed by", world.rank, more)
        return world, what, os.environ["HOSTILE"], os.environ["HPCTRAIN_RUN_DIR"]

    monkeypatch.setenv("RANK", "5")  # as in a rank in which a notebook runs
    job = hpctrain.submit(
        place,
        JobSpec(tasks_per_node=3, environment={"HOSTILE": HOSTILE}),
        via="local",
        args=({2},),
        kwargs={"more": "now"},
    )
    results = job.results()
    assert os.environ["RANK"] == "5"
    for rank, (world, *rest) in enumerate(results):
        assert (world.rank, world.world_size, world.local_rank) == (rank, 3, rank)
        assert (world.launcher, world.num_nodes) == ("submitit", 1)
        assert rest == [{2}, HOSTILE, str(job.run_dir)]
    assert job.state == "COMPLETED"
    assert "printed by 1 now\n" in job.logs(1)
    assert not list(Path().rglob("canary"))


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_submit_function_local_failed_rank_and_cancel(handler):
    def fail(rank):
        import hpctrain

        if hpctrain.detect().rank == rank:
            raise RuntimeError("the error of this rank")

    def sleep():
        import time

        print("asleep", flush=True)
        time.sleep(120)

    failed = hpctrain.submit(fail, JobSpec(tasks_per_node=3), via="local", args=(1,))
    before = signal.signal(signal.SIGINT, handler)
    asleep = hpctrain.submit(sleep, JobSpec(), via="local")
    signal.signal(signal.SIGINT, before)
    with pytest.raises(HpctrainError, match=r"rank 1 of 3 of job .* failed:\nTraceback") as caught:
        failed.result()
    assert caught.value.found.endswith("RuntimeError: the error of this rank")
    assert failed.state == "FAILED"
    end = time.monotonic() + 60
    while "asleep" not in asleep.logs():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert asleep.state == asleep.wait(timeout=0.1) == "RUNNING"
    asleep.cancel()
    with pytest.raises(HpctrainError, match="ended as CANCELLED: it was cancelled"):
        asleep.result()
    asleep.cancel()  # no effect on a job that has ended


# submitit 1.5.4 leaves the log files of its debug executor open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_submit_function_debug_runs_in_this_process(capsys):
    seen = []
    before = dict(os.environ)
    job = hpctrain.submit(
        lambda: seen.append(os.environ["ODD"]) or hpctrain.detect().world_size,
        JobSpec(nodes=2, tasks_per_node=4, environment={"ODD": HOSTILE}),
        via="debug",
    )
    assert (job.state, seen) == ("PENDING", [])
    assert job.result() == 1
    assert job.state == "COMPLETED"
    assert dict(os.environ) == before
    Path("script.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(0)")
    assert hpctrain.submit("script.py", JobSpec(), via="debug", args=("-x", 1)).result() is None
    assert "__main__ ['-x', '1']\n" in capsys.readouterr().out
