"""Scores of a classifier on a GPU equal those of the CPU, without a sync."""

import on_gpu
import pytest
import ranks
import torch
from test_exact_evaluation import CASES, check_equal, evaluate_cases, samples

from hpctrain.backends.single import Single
from hpctrain.training.evaluation import Classification


def test_evaluation_on_gpu_equals_cpu(gpu):
    (found,) = ranks.values(gpu(1, evaluate_cases))
    (expected,) = ranks.values(ranks.run(1, evaluate_cases, env={"CUDA_VISIBLE_DEVICES": ""}))
    # The loss of a sample differs in its last digits.
    check_equal([found], expected, loss=1e-6)


def test_evaluation_over_nccl_equals_one_process(nccl, gpu):
    (alone,) = ranks.values(gpu(1, evaluate_cases))
    check_equal(ranks.values(nccl(2, evaluate_cases)), alone)


def count_samples(deterministic, dtype):
    """Evaluate one case with batches on the GPU; return the number of samples."""
    case = "counts that divide by nothing"
    outputs, targets = (tensor.to(on_gpu.DEVICE) for tensor in samples(case))
    outputs = outputs.to(dtype)
    torch.use_deterministic_algorithms(deterministic)
    scores = Classification(Single(None, outputs.device, None), CASES[case][1])
    scores.update(outputs[:64], targets[:64])
    with on_gpu.never_waits():
        for start in range(64, len(targets), 64):
            scores.update(outputs[start : start + 64], targets[start : start + 64])
    return scores.compute().count


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_evaluation_does_not_sync_the_gpu(gpu, deterministic, dtype):
    assert ranks.values(gpu(1, count_samples, deterministic, dtype)) == [
        997 - len(range(0, 997, 11))
    ]
