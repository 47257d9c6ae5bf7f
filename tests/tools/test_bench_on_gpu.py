"""`hpctrain bench` on a GPU: ResNet-50 in half precision, memory by arm, sums on one GPU."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import ranks

from hpctrain.cli import main
from hpctrain.tools.bench import allreduce, step


def run_bench(*words):
    """Run the command on a rank and return what it printed."""
    for module in (step, allreduce):
        module._BLOCK_SECONDS = 0.05
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["bench", *words, "--seconds", "1", "--json", "found.json"]) == 0
    return output.getvalue()


def record():
    """Return the record that rank 0 saved."""
    return json.loads(Path("found.json").read_text())


def test_bench_step_of_resnet50_in_half_precision(gpu):
    (output,) = ranks.values(gpu(1, run_bench, "step", "--batch-size", "16"))
    found = record()
    assert found["model"] in ("resnet50", "small")  # the small one without torchvision
    assert found["precision"] in ("bf16", "fp16")
    assert found["channels_last"]
    baseline, own = found["results"]["baseline"], found["results"]["hpctrain"]
    # Weights, momenta, gradients and activations of one loop, without those of the other.
    assert own["peak_memory"] == pytest.approx(baseline["peak_memory"], rel=0.2)
    assert "peak memory" in output


def test_bench_allreduce_over_one_gpu(nccl):
    output, _ = ranks.values(nccl(2, run_bench, "allreduce", "--sizes", "4,1MB"))
    found = record()
    assert found["transport"] == "nccl"
    for arms in found["results"].values():
        own = arms["hpctrain"]
        assert own["busbw"] == pytest.approx(own["algbw"])  # 2(n-1)/n of two ranks
    assert "busbw GB/s" in output
