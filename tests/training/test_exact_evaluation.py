"""Scores of a classifier over ranks equal those of one process, over every backend."""

import pytest
import ranks
import torch
from battery import images, session, train
from torch import nn
from torch.utils.data import TensorDataset

import hpctrain
from hpctrain.backends.single import Single
from hpctrain.training.evaluation import Classification

IGNORED = -100
# Samples, classes, batch size, steps per unit to which outputs are rounded (0: not rounded).
CASES = {
    "counts that divide by nothing": (997, 10, 64, 0),
    "small batches": (211, 7, 7, 0),
    "ties": (503, 10, 32, 2),
    "few classes": (101, 3, 16, 4),
    "a rank without a batch": (5, 10, 2, 0),
    "one batch": (61, 10, 64, 0),
}


def samples(case):
    """Return outputs and targets of a case; every eleventh target is ignored."""
    count, classes, _, steps = CASES[case]
    generator = torch.Generator().manual_seed(count)
    outputs = torch.randn(count, classes, generator=generator)
    targets = torch.randint(classes, (count,), generator=generator)
    targets[::11] = IGNORED
    return (outputs * steps).round() / steps if steps else outputs, targets


def evaluate_cases():
    """Return the scores of every case, over the loader of an evaluation."""
    found = {}
    with session(batch_size=2) as opened:
        for case, (_, classes, batch, _) in CASES.items():
            loader = opened.loader(TensorDataset(*samples(case)), train=False, batch_size=batch)
            scores = opened.classification(classes)
            for outputs, targets in loader:
                scores.update(outputs, targets)
            found[case] = (len(loader), scores.compute())
    return found


@pytest.fixture(scope="module")
def alone():
    """Return the scores of one process."""
    return ranks.values(ranks.run(1, evaluate_cases))[0]


def check_equal(results, alone, loss=1e-12):
    """Check the scores of all ranks against one process, the loss with a relative tolerance."""
    for case, (count, *_) in CASES.items():
        _, first = alone[case]
        for result in results:
            _, found = result[case]
            assert found.count + found.ignored == count
            assert (found.top1, found.top5, found.ignored) == (
                first.top1,
                first.top5,
                first.ignored,
            )
            assert torch.equal(found.confusion, first.confusion)
            torch.testing.assert_close(
                found.per_class, first.per_class, rtol=0, atol=0, equal_nan=True
            )
            assert found.loss == pytest.approx(first.loss, rel=loss)
        assert len({result[case][1].loss for result in results}) == 1


def test_evaluation_over_a_loader_equals_one_batch_of_all_samples(alone):
    one_batch = {}
    for case, (count, classes, *_) in CASES.items():
        scores = Classification(Single(None, torch.device("cpu"), None), classes)
        scores.update(*samples(case))
        one_batch[case] = (1, scores.compute())
        assert one_batch[case][1].ignored == len(range(0, count, 11))
    check_equal([alone], one_batch)


def test_evaluation_on_three_ranks_equals_one(run, alone):
    check_equal(ranks.values(run(3, evaluate_cases)), alone)


@pytest.mark.parametrize("size", [2, 4])
def test_evaluation_on_two_and_four_ranks_equals_one(size, alone):
    results = ranks.values(ranks.run(size, evaluate_cases))
    batches = [result["a rank without a batch"][0] for result in results]
    assert (0 in batches) == (size == 4)
    check_equal(results, alone)


def refusals():
    """Return the errors of this rank: for invalid targets on rank 1, and for no samples."""
    found = []
    with session(batch_size=2) as opened:
        for targets in ([0, 4, 1], []):
            scores = opened.classification(4)
            if opened.world.rank == 1:
                scores.update(torch.zeros(len(targets), 4), torch.tensor(targets).long())
            with pytest.raises(hpctrain.errors.UsageError) as error:
                scores.compute()
            found.append((error.value.found, error.value.reported_by_rank_0))
    return found


def test_evaluation_errors_are_raised_on_all_ranks(run):
    results = ranks.values(run(3, refusals))
    for outside, nothing in results:
        assert "got targets of 4 or more: 1" in outside[0]
        assert "no sample to score" in nothing[0]
    assert [outside[1] for outside, _ in results] == [False, True, True]


def statistics_in_evaluation():
    """Return the running mean of batch norm after a few steps, before and in an evaluation."""
    with session(global_batch=6, max_steps=3, log_every=1, run_dir="run") as opened:
        _, model = train(opened, 3)
        norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
        before = norm.running_mean.tolist()
        for _ in opened.loader(images(24), train=False):
            pass
        return before, norm.running_mean.tolist()


def test_evaluation_has_batch_norm_statistics_of_rank_0():
    before, inside = zip(*ranks.values(ranks.run(3, statistics_in_evaluation)), strict=True)
    assert len(set(map(tuple, before))) == 3
    assert inside == (before[0],) * 3


class Noisy(torch.utils.data.Dataset):
    """Samples with a random number of torch each."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return index, torch.rand(()).item()


def numbers_of_samples(workers):
    """Return the random number of each sample in two evaluations, and the next of the script."""
    with session(batch_size=2, workers=workers) as opened:
        loader = opened.loader(Noisy(), train=False, batch_size=2)
        found = []
        for _ in range(2):
            own = {}
            for indices, numbers in loader:
                own.update(zip(indices.tolist(), numbers.tolist(), strict=True))
            every = opened.gather_object(own) or []
            found.append({index: number for part in every for index, number in part.items()})
        return found, torch.rand(()).item()


def test_random_numbers_of_samples_in_an_evaluation_do_not_depend_on_the_ranks():
    ((first, again), after) = ranks.values(ranks.run(1, numbers_of_samples, 0))[0]
    assert sorted(first) == list(range(7))
    assert len(set(first.values())) == 7
    assert again == first
    for size, workers in ((1, 1), (2, 0), (3, 0), (3, 1)):
        found = ranks.values(ranks.run(size, numbers_of_samples, workers))
        assert found[0][0] == [first, first]
        assert {own for _, own in found} == {after}
