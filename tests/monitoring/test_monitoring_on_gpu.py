"""Timings and traces on a GPU: the forward pass by CUDA events, without a sync."""

import gzip
import json

import ranks
import torch
from battery import images, session, small_model
from torch import nn

from hpctrain.monitoring import timings
from hpctrain.rundir import RunDirectory

WARM_UP, STEPS = 3, 30
# Takes some milliseconds on any GPU; the host launches it in microseconds.
CYCLES = 20_000_000


def train(profile=None):
    """Train with a forward pass that is long on the GPU only, and lines of timings every second."""
    timings._SECONDS_BETWEEN_LINES = 0.1
    with session(
        batch_size=4, max_steps=STEPS + 10, log_every=1, run_dir="run", profile=profile
    ) as opened:
        model = small_model()
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(opened.loader(images(240))):
                    if run.step == WARM_UP and profile is None:
                        torch.cuda.set_sync_debug_mode("error")
                    if run.step == WARM_UP + STEPS:
                        torch.cuda.set_sync_debug_mode("default")
                    with opened.autocast():
                        torch.cuda._sleep(CYCLES)
                        loss = nn.functional.cross_entropy(model(batch), targets)
                    opened.step(loss)
                    run.log(loss=loss, number=1.0)
        lines = RunDirectory("run").lines(run.directory.timings)
        rows = run.directory.rows()
        return lines, rows, torch.cuda.max_memory_allocated()


def test_training_loop_and_forward_timing_do_not_sync_the_gpu(gpu):
    ((lines, rows, memory),) = ranks.values(gpu(1, train))
    assert lines[-1]["step"] == STEPS + 10
    measured = [line["forward"][0] for line in lines if line["steps"] > 1]
    assert max(measured) > 0.003
    assert [row["step"] for row in rows] == list(range(1, STEPS + 11))
    assert {row["number"] for row in rows} == {1.0}
    assert all(0 < row["gpu_memory"] <= memory for row in rows)


def test_profile_has_gpu_kernels(gpu):
    ranks.values(gpu(1, train, "5:8"))
    path = RunDirectory("run").profile / "rank-0.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
