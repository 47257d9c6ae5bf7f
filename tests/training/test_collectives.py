"""Collectives of a session: the same results on all ranks, over every backend."""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ranks
import torch
from battery import HOROVOD_SLOW, session
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from hpctrain.errors import GivenUpError, UsageError

SIZES = pytest.mark.parametrize("size", [1, 3])
TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
]


def of_rank(rank, dtype, shape=(2, 3)):
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    return ((numbers * (rank + 2)) % 5 - (dtype.is_signed * 2)).to(dtype)


def reduce_all():
    found = {}
    with session(batch_size=2) as opened:
        rank = opened.world.rank
        for dtype in TYPES:
            for op in ("sum", "mean", "max", "min"):
                if op == "mean" and not dtype.is_floating_point:
                    continue
                given = of_rank(rank, dtype).T  # not contiguous
                found[dtype, op] = opened.all_reduce(given, op)
                assert torch.equal(given, of_rank(rank, dtype).T)
        found["shapes"] = [
            opened.all_reduce(torch.full(shape, rank)) for shape in [(), (0,), (1, 1, 2)]
        ]
        found["complex"] = opened.all_reduce(torch.tensor([1 + 2j]) * rank, "mean")
        undefined = torch.tensor([1.0, math.nan if rank == 1 else rank * 2.0])
        found["nan"] = [opened.all_reduce(undefined, op) for op in ("max", "min")]
        found["copies"] = [
            opened.broadcast(of_rank(rank, dtype), opened.world.world_size - 1) for dtype in TYPES
        ]
        found["scalar"] = opened.broadcast(torch.tensor(rank + 0.5))
        with torch.inference_mode():
            one = torch.ones(1)
            found["inference"] = [
                *(opened.all_reduce(one).item(), opened.all_reduce(one, "max").item()),
                *(opened.broadcast(one).item(), len(opened.all_gather(one)), opened.sum(one)),
                *(len(opened.gather_object(1)), opened.broadcast_object(1)),
            ]
    return found


@SIZES
def test_reductions_and_broadcasts_equal_those_of_torch(run, size):
    for found in ranks.values(run(size, reduce_all)):
        for dtype in TYPES:
            stacked = torch.stack([of_rank(rank, dtype).T for rank in range(size)])
            for op, expected in {
                "sum": stacked.sum(0),
                "mean": stacked.double().mean(0).to(dtype),
                "max": stacked.amax(0),
                "min": stacked.amin(0),
            }.items():
                if (dtype, op) in found:
                    torch.testing.assert_close(found[dtype, op], expected)
        total = sum(range(size))
        assert [one.tolist() for one in found["shapes"]] == [total, [], [[[total, total]]]]
        assert found["complex"].tolist() == [(1 + 2j) * total / size]
        for one in found["nan"]:
            assert one[0] == 1
            assert math.isnan(one[1]) == (size > 1)
        copies = [of_rank(size - 1, dtype) for dtype in TYPES]
        assert all(map(torch.equal, found["copies"], copies))
        assert found["scalar"] == 0.5
        assert found["inference"] == [size, 1, 1, size, size, size, 1]


LENGTHS = (2, 0, 3)


def gather_all():
    with session(batch_size=2) as opened:
        rank = opened.world.rank
        rows = {dtype: of_rank(rank, dtype, (LENGTHS[rank], 2)) for dtype in TYPES}
        return (
            {dtype: opened.all_gather(one) for dtype, one in rows.items()},
            opened.all_gather(torch.tensor(rank)),
            opened.gather_object({"rank": rank, "set": {rank}}),
            opened.broadcast_object(f"of {rank}", opened.world.world_size - 1),
        )


@SIZES
def test_gathered_rows_and_objects_are_in_the_order_of_ranks(run, size):
    for rows, scalars, objects, last in ranks.values(run(size, gather_all)):
        for dtype in TYPES:
            parts = [of_rank(rank, dtype, (LENGTHS[rank], 2)) for rank in range(size)]
            assert torch.equal(rows[dtype], torch.cat(parts))
        assert scalars.tolist() == list(range(size))
        assert objects == [{"rank": rank, "set": {rank}} for rank in range(size)]
        assert last == f"of {size - 1}"


def contrast(features, targets, own):
    """Return the mean loss of own rows, each of which has to find its pair among all rows."""
    features = normalize(features, dim=1)
    likeness = features[own] @ features.T / 0.5
    itself = torch.zeros_like(likeness, dtype=torch.bool)
    itself[torch.arange(len(likeness)), own] = True
    return cross_entropy(likeness.masked_fill(itself, -1e9), targets[own])


def train_contrastive(parts, whole):
    """Train on rows of this rank; return the weights.

    Args:
        parts: rows of each rank.
        whole: whether each rank computes the loss of all rows.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    targets = torch.arange(12) ^ 1
    with session(batch_size=2, precision="fp64") as opened:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.5, 0.9))
        own = torch.arange(12).split(parts)[opened.world.rank]
        for _ in range(5):
            features = opened.all_gather(model(inputs[own]))
            opened.step(contrast(features, targets, torch.arange(12) if whole else own))
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("parts", "whole"), [((4, 4, 4), False), ((5, 1, 6), True)])
def test_contrastive_loss_trains_as_in_one_process(run, parts, whole):
    (alone,) = ranks.values(ranks.run(1, train_contrastive, (12,), whole))
    for weights in ranks.values(run(3, train_contrastive, parts, whole)):
        for one, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-12)


@dataclass
class Outputs:
    logits: torch.Tensor
    hidden: torch.Tensor | None


COUNTS = (
    13,
    12,
    3,
    1,
    0,
    14,
)  # batches of 2 on three ranks: 3 2 2, 2 2 2, 1 1 0, 1 0 0, none, 3 2 2


def gather_samples():
    found = {}
    with session(batch_size=2) as opened:
        for count in COUNTS:
            loader = opened.loader(TensorDataset(torch.arange(count)), train=False)
            rounds = []
            for (numbers,) in loader:
                logits = numbers[:, None] * torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
                given = {"a": (numbers, [numbers > 3]), "b": Outputs(logits, None)}
                with torch.inference_mode(count == 12):
                    rounds.append(opened.gather_for_metrics(given))
            found[count] = (
                [n for one in rounds for n in one["a"][0].tolist()],
                [n for one in rounds for n in one["a"][1][0].tolist()],
                [n for one in rounds for n in one["b"].logits.tolist()],
            )
            assert all(type(one["b"]) is Outputs and one["b"].hidden is None for one in rounds)
            assert not any(one["b"].logits.requires_grad for one in rounds)
            assert opened.sum(1) == opened.world.world_size
        found["mean"] = opened.gather_for_metrics(torch.tensor(1.5))
    return found


@SIZES
def test_gathered_samples_are_the_data_set_in_its_order(run, size):
    for rank, found in enumerate(ranks.values(run(size, gather_samples))):
        for count in COUNTS:
            rounds = len(range(rank * 2, count, 2 * size))  # in which the rank has a batch
            numbers = list(range(min(count, rounds * 2 * size)))
            assert found[count][0] == numbers
            assert found[count][1] == [number > 3 for number in numbers]
            assert found[count][2] == [[float(number)] * 3 for number in numbers]
            assert rank or len(numbers) == count
        assert found["mean"].tolist() == [1.5] * size


def leave_in_the_last_round():
    with session(batch_size=2) as opened:
        for number, (_,) in enumerate(opened.loader(TensorDataset(torch.arange(14)), train=False)):
            if number == 2:
                break
        return opened.sum(1)


def test_evaluation_without_gathered_samples_ends_without_waiting(run):
    assert ranks.values(run(3, leave_in_the_last_round)) == [3] * 3


def sum_in_each_round():
    with session(batch_size=2) as opened:
        for (numbers,) in opened.loader(TensorDataset(torch.arange(13)), train=False):
            opened.gather_for_metrics(numbers)
            opened.sum(len(numbers))


def gather_other_types():
    with session(batch_size=2) as opened:
        opened.gather_for_metrics({"a": torch.zeros(2, 4 if opened.is_main else 5)})


def reduce_other_shapes():
    with session(batch_size=2) as opened:
        opened.all_reduce(torch.zeros(2, 3) if opened.is_main else torch.zeros(3, 2))


def gather_known_types_that_differ():
    with session(batch_size=2) as opened:
        whole, real = torch.zeros(2, dtype=torch.int32), torch.zeros(2)
        opened.all_gather(whole)
        opened.all_gather(real)
        opened.all_gather(whole if opened.is_main else real)


def gather_with_a_gradient_on_rank_0():
    with session(batch_size=2) as opened:
        opened.all_gather(torch.zeros(2, requires_grad=opened.is_main))


def call_on_rank_0(name, *arguments):
    with session(batch_size=2) as opened:
        if opened.is_main:
            getattr(opened, name)(*arguments)
        opened.sum(1)


UNLIKE = {
    sum_in_each_round: (
        "rank 0: session.sum() of 1 (test_collectives.py line",
        "ranks 1 and 2: no batch left in an evaluation (test_collectives.py line",
    ),
    gather_other_types: (
        "rank 0: session.gather_for_metrics() of {'a': float32 (N, 4)} (test_collectives.py",
        "ranks 1 and 2: session.gather_for_metrics() of {'a': float32 (N, 5)} (test_collectives.py",
    ),
    reduce_other_shapes: ("'sum') of float32 (2, 3) (", "'sum') of float32 (3, 2) ("),
    gather_known_types_that_differ: (
        "rank 0: session.all_gather() of int32 (N,)",
        "ranks 1 and 2: session.all_gather() of float32 (N,)",
    ),
    gather_with_a_gradient_on_rank_0: ("rank 0: session.all_gather() of float32 (N,) with a grad",),
}


@HOROVOD_SLOW
@pytest.mark.parametrize("program", UNLIKE, ids=lambda program: program.__name__)
def test_ranks_with_other_calls_or_types_are_named(run, program):
    for result in run(3, program, timeout=60):
        assert isinstance(result, UsageError), result
        assert result.code == "HT601"
        for words in UNLIKE[program]:
            assert words in str(result)


@HOROVOD_SLOW
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("all_reduce", (torch.ones(2),)),
        ("gather_for_metrics", (torch.ones(2),)),
        ("on_main", (int,)),
        pytest.param("all_gather", (torch.ones(2),), marks=pytest.mark.slow),
        pytest.param("broadcast", (torch.ones(2),), marks=pytest.mark.slow),
        pytest.param("broadcast_object", (2,), marks=pytest.mark.slow),
        pytest.param("gather_object", (2,), marks=pytest.mark.slow),
        pytest.param("barrier", (), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_call_on_rank_0_alone_is_named_on_all_ranks(run, name, arguments):
    for result in run(3, call_on_rank_0, name, *arguments, timeout=60):
        assert isinstance(result, UsageError), result
        assert f"rank 0: session.{name}(" in str(result)
        assert "ranks 1 and 2: session.sum() of 1" in str(result)


class ArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def fail(error):
    raise error


def call_on_main():
    found = []
    with session(batch_size=2) as opened:
        ids = opened.gather_object(opened.world.rank)
        found.append(opened.on_main(lambda: {"rank": opened.world.rank, "of": ids}))
        for function in [
            lambda: {}["no key"],
            lambda: fail(GivenUpError.of_text("HT619", "three starts", "progress", "look")),
            lambda: fail(ArgumentsError("own", "class")),
            lambda: sys.exit(5),
            lambda: fail,
            lambda: lambda: 0,
        ]:
            try:
                found.append(opened.on_main(function))
            except (Exception, SystemExit) as error:
                found.append((type(error).__name__, str(error)))
            opened.barrier()
        with Path(f"printed-{opened.world.rank}").open("w") as file:
            opened.print("epoch", 1, sep="-", file=file)
    return found


def test_main_rank_returns_its_result_or_error_to_all_ranks(run):
    for rank, found in enumerate(ranks.values(run(3, call_on_main, timeout=60))):
        assert found[0] == {"rank": 0, "of": [0, 1, 2]}
        assert found[1] == ("KeyError", "'no key'")
        assert found[2][0] == "GivenUpError"
        assert found[2][1].startswith("three starts")
        assert found[3] == (
            ("ArgumentsError", "own") if rank == 0 else ("RuntimeError", "ArgumentsError: own")
        )
        assert found[4] == ("SystemExit", "5")
        assert found[5] is fail
        assert "lambda" in found[6][1]  # cannot be pickled
    assert [Path(f"printed-{rank}").read_text() for rank in range(3)] == ["epoch-1\n", "", ""]


def load_on_each_host(failing):
    with session(batch_size=2) as opened:
        world = opened.world
        Path(f"here-{world.rank}").touch()
        with opened.local_main_first():
            if world.local_rank == 0:
                while len(list(Path().glob("here-*"))) < world.world_size:
                    time.sleep(0.02)
                if world.rank == failing:
                    raise OSError(f"no room on rank {failing}")
                Path(f"data-{world.node_rank}").write_text("whole")
            return Path(f"data-{world.node_rank}").read_text()


def test_local_main_loads_before_the_other_ranks_of_its_host(run):
    assert ranks.values(run(3, load_on_each_host, None, layout=(2, 1))) == ["whole"] * 3


def test_local_main_that_fails_ends_all_ranks(run):
    for result in run(3, load_on_each_host, 2, layout=(2, 1), timeout=60):
        assert isinstance(result, OSError), result
        assert "no room on rank 2" in str(result)


WRONG = [
    (lambda s: s.all_reduce(0.5), "session.all_reduce(…, 'sum') of a float"),
    (lambda s: s.all_reduce(torch.ones(2), "avg"), "one of sum, mean, max, min"),
    (lambda s: s.all_reduce(torch.ones(2).long(), "mean"), "of torch.int64"),
    (lambda s: s.all_reduce(torch.ones(2).to(torch.complex64), "max"), "of torch.complex64"),
    (lambda s: s.all_gather(torch.eye(2).to_sparse()), "of a sparse tensor"),
    (lambda s: s.broadcast([1]), "session.broadcast() of a list"),
    (lambda s: s.broadcast_object(1, 1), "source=1) in a world of 1 ranks"),
    (lambda s: s.gather_for_metrics({"loss": 0.5}), "a structure with a float"),
]


def try_wrong():
    found = []
    with session(batch_size=2) as opened:
        for call, _ in WRONG:
            try:
                call(opened)
            except UsageError as error:
                found.append((error.code, str(error)))
    return found


def test_wrong_arguments_are_refused():
    (found,) = ranks.values(ranks.run(1, try_wrong))
    for (code, text), (_, words) in zip(found, WRONG, strict=True):
        assert code == "HT631"
        assert words in text


def detections():
    """Return the gathered samples of a detector: image i has i boxes, whose values are all i."""
    images = TensorDataset(torch.arange(7))
    gathered, pairs = [], []
    with session(batch_size=2) as opened:
        for (numbers,) in opened.loader(images, train=False, batch_size=2):
            found = [
                {"boxes": torch.full((int(i), 4), float(i)), "image": int(i), "name": f"{i}.png"}
                for i in numbers
            ]
            samples, again = opened.gather_for_metrics((found, {"targets": numbers}))
            gathered += samples
            pairs += again["targets"].tolist()
        with pytest.raises(UsageError, match=r"a list with tensors of \[1, 2\] rows"):
            opened.gather_for_metrics([torch.ones(1, 4), torch.ones(2, 4)])
    return [(one["image"], one["name"], one["boxes"].tolist()) for one in gathered], pairs


@pytest.mark.parametrize("size", [1, 2, 3])
@HOROVOD_SLOW
def test_gathered_lists_of_dicts_are_the_samples_of_all_ranks(run, size):
    samples, numbers = ranks.values(run(size, detections))[0]
    assert samples == [(i, f"{i}.png", [[float(i)] * 4] * i) for i in range(7)]
    assert numbers == list(range(7))
