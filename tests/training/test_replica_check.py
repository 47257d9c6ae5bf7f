"""Flipped bits on one rank: the ranks find them, name that rank, save nothing and go on."""

import importlib.util
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
import ranks
import torch
from battery import images, session, small_model
from torch import nn

from hpctrain.errors import ReplicaError, exit_codes
from hpctrain.process import failure_record
from hpctrain.rundir import RunDirectory
from hpctrain.training.replica_check import ReplicaCheck

SLOW = pytest.mark.slow
LOSS = nn.functional.cross_entropy
EVERY, FLIP_AFTER = 2, 8
WRONG = 1  # the rank with the flipped bit
LARGE = 20  # a bit of fp32 that no update rounds away
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, 0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
}


def flip(tensor, element=0, bit=0):
    """Flip a bit of an element, in place; the lowest one by default."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    with torch.no_grad():
        bits = tensor.detach().view(-1).view(kinds[tensor.element_size()])
        size = 8 * tensor.element_size()
        value = int(bits[element]) ^ (-(2 ** (size - 1)) if bit == size - 1 else 1 << bit)
        bits[element] = value


def weight(opened):
    return opened.models[0][4].bias


def moment(opened):
    optimizer = opened.optimizers[0]
    return optimizer.state[optimizer.param_groups[0]["params"][-1]]["exp_avg"]


def master(opened):
    return opened.optimizers[0].param_groups[0]["params"][-1]


def gradient(opened):
    return opened.models[0][4].bias.grad


def train(what=None, optimizer="SGD", flips=(WRONG,), bit=0, **options):
    """Train; the gradient is flipped before an optimizer's step, all else after the step.

    Args:
        what: returns the tensor that is flipped on some ranks at one step, or None.
        optimizer: one of OPTIMIZERS.
        flips: these ranks.
        bit: of its first element; of a gradient always LARGE.
        options: of the session.
    """
    options = {"global_batch": 12, "max_steps": 24, "seed": 2, **options}
    options = {"checkpoint_every": 5, "check_replicas_every": EVERY, **options}
    with session(run_dir="run", **options) as opened:
        model = small_model()
        model, stepper = opened.prepare(model, OPTIMIZERS[optimizer](model.parameters()))
        loader = opened.loader(images(600))
        with opened.run() as run:
            for _ in run.epochs():
                for batch, targets in run.batches(loader):
                    with opened.autocast():
                        loss = LOSS(model(batch), targets)
                    opened.backward(loss)
                    now = run.step == FLIP_AFTER - 1 and opened.sync_gradients
                    now = now and opened.world.rank in flips
                    if what is gradient and now:
                        flip(what(opened), bit=LARGE)
                    stepper.step()
                    stepper.zero_grad()
                    if what not in (None, gradient) and now:
                        flip(what(opened), bit=bit)
        return run.step


def check_culprit(results, wrong, folder="evidence"):
    """Check that all ranks fail, some of them as the cause; return the text of the error."""
    for result in results:
        assert isinstance(result, ReplicaError), result
        assert result.exit_code == exit_codes.FAILED
    failures = failure_record.failures(Path(folder))
    assert set(failures) == set(range(len(results)))
    assert [rank for rank, one in failures.items() if not one.caused_by_other_rank] == wrong
    assert [result.reported_by_rank_0 for result in results] == [
        rank > 0 for rank in range(len(results))
    ]
    return str(results[0])


@pytest.mark.parametrize(
    ("what", "name", "options"),
    [
        (weight, "4.bias", {"backend": "ddp"}),
        pytest.param(weight, "4.bias", {"backend": "horovod"}, marks=SLOW),
        (moment, "exp_avg of Adam for 4.bias", {"optimizer": "Adam"}),
        (master, "4.bias", {"precision": "O2", "loss_scale": 64.0}),
        (gradient, "4.bias", {}),
        pytest.param(gradient, "4.bias", {"accumulate": 2, "global_batch": 24}, marks=SLOW),
    ],
)
def test_flipped_bit_is_found_at_the_next_check_and_its_rank_named(
    evidence, lacking, what, name, options
):
    options = dict(options)
    backend = options.pop("backend", "ddp")
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    results = ranks.run(
        3, partial(train, **options), what, layout=(1, 2), env={**evidence, "TEST_BACKEND": backend}
    )
    message = check_culprit(results, [WRONG])
    # Not with the checkpoint of step 10, where the ranks would wait.
    assert message.startswith(
        f"after step 8 the weights of rank 1 on node2 differ from most ranks: first in {name}\n"
    )
    assert "as after step 6" in message
    assert RunDirectory("run").steps() == [5]


def test_flipped_bit_on_one_of_two_ranks_is_found_and_no_rank_blamed(evidence):
    message = check_culprit(ranks.run(2, train, weight, env=evidence), [])
    assert message.startswith(
        "after step 8 the weights of ranks 0 and 1 on node1 differ: first in 4.bias; "
        "it is not known which rank is wrong\n"
    )
    assert RunDirectory("run").steps() == [5]


@pytest.mark.slow
def test_flipped_bit_on_rank_0_is_its_own_fault(evidence):
    results = ranks.run(3, partial(train, flips=(0,)), weight, env=evidence)
    message = check_culprit(results, [0])
    assert message.startswith("after step 8 the weights of rank 0 on node1 differ")


def test_flipped_bit_without_the_periodic_check_is_found_before_a_save(evidence):
    results = ranks.run(3, partial(train, check_replicas_every=0, bit=LARGE), weight, env=evidence)
    message = check_culprit(results, [WRONG])
    assert message.startswith("after step 10 the weights of rank 1 on node1 differ")
    assert RunDirectory("run").steps() == [5]


def resume():
    train(max_steps=FLIP_AFTER - 1)
    return train(weight, resume=True, check_replicas_every=1000)


def test_flipped_bit_in_the_first_step_of_a_resume_is_no_wrong_use(evidence):
    results = ranks.run(3, resume, env=evidence)
    assert check_culprit(results, [WRONG]).startswith("after step 8 the weights of rank 1")


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "global_batch": 24, "optimizer": "Adam"},
        pytest.param({"precision": "O2", "optimizer": "Adam"}, marks=SLOW),
        pytest.param({"precision": "fp64"}, marks=SLOW),
        pytest.param({"check_replicas_every": None}, marks=SLOW),
    ],
)
def test_ranks_with_other_batch_norm_statistics_pass_the_check(options):
    """Each rank has its own statistics of batch norm."""
    options = {"check_replicas_every": 1, **options}
    assert ranks.values(ranks.run(3, partial(train, **options))) == [24] * 3


def train_elastic(steps):
    return train(
        elastic=True, max_steps=steps, check_replicas_every=1, batch_size=2,
        global_batch=12, optimizer="Adam",
    )  # fmt: skip


@pytest.mark.slow
def test_elastic_run_with_other_numbers_of_ranks_passes_the_check():
    assert ranks.values(ranks.run(2, train_elastic, 5)) == [5] * 2
    assert ranks.values(ranks.run(3, train_elastic, 10)) == [10] * 3
    assert ranks.values(ranks.run(1, train_elastic, 12)) == [12]


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=SLOW)])
def test_run_with_a_flipped_bit_ends_as_an_uninterrupted_one(references, backend):
    """Start it again as `hpctrain run` does."""
    options = ("--backend", backend, "--check-replicas-every", "2")
    hurt = faults.start(3, *options, hurt=("flip@11:rank2",))
    assert hurt.code == exit_codes.FAILED
    assert all(isinstance(result, ReplicaError) for result in hurt.results), hurt
    faults.resume(3, *options)
    faults.same("run", references(3, "--backend", backend))
    assert 3 <= faults.repeated("run") <= 4  # steps 11 and 12, and those until the sum was read


# --- the digest


class Alone:
    """A model of given tensors, with a check whose digest can be read.

    Args:
        tensors: weights.
    """

    def __init__(self, *tensors, every=1):
        model = nn.Module()
        for number, tensor in enumerate(tensors):
            parameter = nn.Parameter(tensor, requires_grad=False)
            model.register_parameter(f"p{number}", parameter)
        self.tensors = list(model.parameters())
        context = SimpleNamespace(
            options=SimpleNamespace(check_replicas_every=every),
            backend=SimpleNamespace(world_size=3, sharded=False, gather_object=None),
            device=torch.device("cpu"),
            precision=SimpleNamespace(master=lambda parameter: parameter),
            models=[model],
            optimizers=[],
        )
        self.seconds = [0.0] * 10
        self.check = ReplicaCheck(context, self.seconds, 0, resumed=True)
        self.step = 0

    def digest(self):
        self.step += 1
        values = self.check.values(self.step)
        return tuple(values.values())[:4]


DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64),
)


def tensor(dtype, *shape):
    return (100 * torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_changes_with_each_single_bit(dtype):
    alone = Alone(tensor(dtype, 3, 2), tensor(dtype, 3, 2), tensor(dtype, 20_000))
    before = alone.digest()
    for one, element in ((0, 0), (1, 5), (2, 19_999)):
        words = alone.tensors[one].view(-1).view(torch.uint8)
        size = words.numel() // alone.tensors[one].numel()
        for byte in range(element * size, (element + 1) * size):
            for bit in range(8):
                words[byte] ^= 1 << bit
                assert alone.digest() != before, (one, byte, bit)
                words[byte] ^= 1 << bit
    assert alone.digest() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_digest_changes_with_the_same_bit_of_two_tensors(dtype):
    """Flip a bit in each of two tensors: from 0 to 1 in one, and in the other from 1 to 0."""
    size = torch.empty(0, dtype=dtype).element_size() * 8
    for bit in range(size):
        alone = Alone(*(torch.zeros(4, dtype=dtype) for _ in range(4)))
        flip(alone.tensors[3], 1, bit)
        before = alone.digest()
        flip(alone.tensors[3], 1, bit)
        for other in range(3):
            flip(alone.tensors[other], 2, bit)
            assert alone.digest() != before, (bit, other)
            flip(alone.tensors[other], 2, bit)
    assert size >= 16


def test_digest_changes_with_tensors_that_are_swapped():
    generator = random.Random(0)
    alone = Alone(*(torch.full((4,), generator.random()) for _ in range(5)))
    before = alone.digest()
    first, last = (alone.tensors[number].clone() for number in (0, 4))
    alone.tensors[0].copy_(last)
    alone.tensors[4].copy_(first)
    assert alone.digest() != before


def test_distance_of_the_checks_follows_from_their_measured_cost():
    alone = Alone(torch.zeros(4), every=None)
    check = alone.check
    first = check.due
    assert not check.values(first - 1)
    values = check.values(first)
    cost, a_step = list(values)[-2:]
    assert check.due > 10**9  # none until this one is read
    # Of three ranks: 1.9 ms of 40 ms are 4.75 %, almost twelve times 0.4 %.
    sums = {name: 3 * value for name, value in values.items()}
    check.judge({**sums, cost: 3 * 0.0019, a_step: 3 * 0.040})
    assert check.due == first + 12
    assert check.forced > 10**9  # they wait for a consensus that is due anyway
