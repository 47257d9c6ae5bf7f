"""`hpctrain bench` on a GPU: ResNet-50 in half precision, memory by arm, sums within the device."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import ranks

from hpctrain.cli import main
from hpctrain.tools.bench import allreduce, step


def benches(*words):
    """Run the command on a rank and return what it printed."""
    for module in (step, allreduce):
        module._BLOCK_SECONDS = 0.05
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["bench", *words, "--seconds", "1", "--json", "found.json"]) == 0
    return shown.getvalue()


def record():
    """Return the record that rank 0 saved."""
    return json.loads(Path("found.json").read_text())


def test_bench_step_of_resnet50_in_half_precision(gpu):
    (said,) = ranks.values(gpu(1, benches, "step", "--batch-size", "16"))
    found = record()
    assert found["model"] in ("resnet50", "small")  # without torchvision the small one
    assert found["precision"] in ("bf16", "fp16")
    assert found["channels_last"]
    baseline, ours = found["arms"]["by hand"], found["arms"]["hpctrain"]
    # Weights, momenta, gradients and activations of one loop; those of the other do not count.
    assert ours["peak_memory"] == pytest.approx(baseline["peak_memory"], rel=0.2)
    assert "peak memory" in said


def test_bench_allreduce_over_one_gpu(nccl):
    said, _ = ranks.values(nccl(2, benches, "allreduce", "--sizes", "4,1MB"))
    found = record()
    assert found["transport"] == "nccl"
    for one in found["results"]:
        ours = one["arms"]["hpctrain"]
        assert ours["busbw"] == pytest.approx(ours["algbw"])  # 2(n-1)/n of two ranks
    assert "copy GB/s" in said


def test_bench_checkpoint_of_state_on_gpu(gpu):
    ranks.values(gpu(1, benches, "checkpoint", "--size", "10MB"))
    found = record()
    assert found["bytes"] == 10**7
    assert found["pause"]["seconds"]["median"] <= found["arms"]["hpctrain"]["seconds"]["median"]


def test_bench_input_on_gpu(gpu):
    ranks.values(gpu(1, benches, "input", "--workers", "0,1", "--batch-size", "8"))
    assert list(record()["arms"]) == ["decoded, no loader", "0 workers", "1 worker"]
