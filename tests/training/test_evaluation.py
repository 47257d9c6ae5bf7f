"""Scores of a classifier in one process, compared with torchmetrics and NumPy."""

import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_confusion_matrix,
)

from hpctrain.backends.single import Single
from hpctrain.errors import UsageError
from hpctrain.training.evaluation import Classification, total

IGNORED = -100


def classification(classes, device="cpu"):
    return Classification(Single(None, torch.device(device), None), classes)


def data(classes, samples=997, dtype=torch.float32, steps=None):
    """Return outputs and targets; outputs rounded to `steps` have many ties."""
    generator = torch.Generator().manual_seed(classes + samples)
    outputs = torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    if steps:
        outputs = (outputs * steps).round() / steps
    # The last class has no sample.
    targets = torch.randint(max(classes - 1, 1), (samples,), generator=generator)
    return outputs.to(dtype), targets


def scores(outputs, targets, batch=64):
    counts = classification(outputs.shape[1])
    for start in range(0, len(targets), batch):
        counts.update(outputs[start : start + batch], targets[start : start + batch])
    return counts.compute()


def mean_loss(outputs, targets):
    """Return the mean cross entropy, computed in NumPy's float64."""
    logits = outputs.double().numpy()
    highest = logits.max(axis=1, keepdims=True)
    logarithms = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
    return (logarithms - logits[np.arange(len(logits)), targets.numpy()]).mean()


@pytest.mark.parametrize("classes", [2, 3, 5, 10, 100])
def test_classification_equals_torchmetrics(classes):
    outputs, targets = data(classes)
    found = scores(outputs, targets)
    options = {"num_classes": classes, "average": "micro"}
    top1 = multiclass_accuracy(outputs, targets, **options)
    top5 = multiclass_accuracy(outputs, targets, top_k=min(5, classes), **options)
    each = multiclass_accuracy(outputs, targets, num_classes=classes, average="none")
    assert (found.count, found.ignored) == (997, 0)
    assert found.top1 == pytest.approx(top1.item(), rel=1e-6)
    assert found.top5 == pytest.approx(top5.item(), rel=1e-6)
    assert found.loss == pytest.approx(mean_loss(outputs, targets), rel=1e-6)
    assert torch.equal(
        found.confusion, multiclass_confusion_matrix(outputs, targets, num_classes=classes)
    )
    assert found.confusion.dtype == torch.int64
    assert found.per_class.dtype == torch.float64
    seen = torch.bincount(targets, minlength=classes) > 0
    torch.testing.assert_close(found.per_class[seen].float(), each[seen])
    assert found.per_class[~seen].isnan().all()
    assert found.metrics() == {"top1": found.top1, "top5": found.top5, "eval_loss": found.loss}


def test_evaluation_loss_of_float64_outputs_is_float64():
    outputs, targets = data(10, dtype=torch.float64)
    assert scores(outputs, targets).loss == pytest.approx(mean_loss(outputs, targets), rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_topk_breaks_ties_by_lower_class(dtype):
    outputs, targets = data(10, dtype=dtype, steps=2)
    found = scores(outputs, targets)
    order = np.argsort(-outputs.double().numpy(), axis=1, kind="stable")
    hits = order == targets.numpy()[:, None]
    assert found.top1 == hits[:, 0].sum() / 997
    assert found.top5 == hits[:, :5].sum() / 997
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (targets.numpy(), order[:, 0]), 1)
    assert np.array_equal(found.confusion.numpy(), confusion)


@pytest.mark.parametrize("batch", [1, 7, 997])
def test_scores_do_not_depend_on_batch_size(batch):
    outputs, targets = data(10)
    found, expected = scores(outputs, targets, batch), scores(outputs, targets)
    assert (found.top1, found.top5, found.count) == (expected.top1, expected.top5, expected.count)
    assert torch.equal(found.confusion, expected.confusion)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)


def test_ignored_samples_count_nowhere():
    outputs, targets = data(10)
    expected = scores(outputs[100:], targets[100:])
    outputs[:100] = math.nan
    targets[:99], targets[99] = IGNORED, -1
    found = scores(outputs, targets)
    assert (found.count, found.ignored) == (897, 100)
    assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-12)
    assert torch.equal(found.confusion, expected.confusion)
    torch.testing.assert_close(found.per_class, expected.per_class, rtol=0, atol=0, equal_nan=True)


def test_nan_output_is_never_correct():
    outputs = torch.tensor([[2.0, 1.0, 0.0], [math.nan, 0.0, 0.0], [5.0, math.nan, math.nan]])
    found = scores(outputs, torch.tensor([0, 0, 0]))
    assert (found.top1, found.top5, found.count) == (1 / 3, 1 / 3, 3)
    assert math.isnan(found.loss)
    assert found.confusion.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert found.per_class[0] == 1 / 3


def test_infinite_outputs():
    outputs = torch.tensor([[-math.inf, 1.0, 0.0], [2.0, -math.inf, 0.0], [math.inf, 0.0, 0.0]])
    found = scores(outputs, torch.tensor([0, 0, 0]))
    assert (found.top1, found.top5) == (1 / 3, 2 / 3)
    assert found.confusion[0].tolist() == [1, 1, 0]
    found = scores(outputs[1:2], torch.tensor([0]))
    assert found.loss == pytest.approx(math.log1p(math.exp(-2)), rel=1e-6)


def test_scores_computed_before_the_end():
    outputs, targets = data(10)
    counts = classification(10)
    counts.update(outputs[:500], targets[:500])
    assert counts.compute().metrics() == scores(outputs[:500], targets[:500], 500).metrics()
    counts.update(outputs[500:], targets[500:])
    assert counts.compute().count == 997
    assert counts.compute().top1 == scores(outputs, targets).top1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_scores_under_inference_mode_and_autocast(mode):
    outputs, targets = data(10, dtype=torch.bfloat16)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        counts = classification(10)
        outputs = outputs.clone().requires_grad_(not torch.is_inference_mode_enabled())
        counts.update(outputs[:500], targets[:500])
    counts.update(outputs[500:].detach().clone(), targets[500:])
    found = counts.compute()
    assert found.metrics() == pytest.approx(scores(outputs.detach(), targets).metrics(), rel=1e-12)
    assert not found.per_class.requires_grad


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (torch.zeros(4, 9), torch.zeros(4).long(), r"outputs of shape \(4, 9\)"),
        (torch.zeros(4, 10, 2), torch.zeros(4).long(), r"outputs of shape \(4, 10, 2\)"),
        (torch.zeros(4, 10), torch.zeros(3).long(), r"targets of shape \(3,\) for 4 outputs"),
        (torch.zeros(4, 10), torch.zeros(4, 10).long(), r"targets of shape \(4, 10\)"),
        (torch.zeros(4, 10), torch.zeros(4), "targets of type torch.float32"),
        (torch.zeros(4, 10).long(), torch.zeros(4).long(), "outputs of type torch.int64"),
        (torch.zeros(4, 10, device="meta"), torch.zeros(4).long(), "outputs on meta"),
    ],
)
def test_shape_and_type_mismatches_are_refused(outputs, targets, message):
    with pytest.raises(UsageError, match=message):
        classification(10).update(outputs, targets)


def test_targets_out_of_range_are_refused():
    counts = classification(10)
    counts.update(torch.zeros(4, 10), torch.tensor([10, 3, 500, -1]))
    with pytest.raises(UsageError, match="targets of 10 or more: 2"):
        counts.compute()


def test_empty_evaluation_is_refused():
    counts = classification(10)
    with pytest.raises(UsageError, match="no sample to score; ignored samples: 0"):
        counts.compute()
    counts.update(torch.zeros(0, 10), torch.zeros(0).long())
    counts.update(torch.zeros(2, 10), torch.tensor([IGNORED, IGNORED]))
    with pytest.raises(UsageError, match="no sample to score; ignored samples: 2"):
        counts.compute()
    with pytest.raises(UsageError, match=r"classification\(1\)"):
        classification(1)


def test_sum_takes_numpy_and_torch_scalars():
    backend = Single(None, torch.device("cpu"), None)
    values = (3, np.int64(4), np.float32(0.5), torch.tensor(2), torch.tensor([1.5]), True)
    sums = total(backend, *values)
    assert sums == (3, 4, 0.5, 2, 1.5, 1)
    assert [type(value) for value in sums] == [int, int, float, int, float, int]
