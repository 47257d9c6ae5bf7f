"""What is Horovod's alone: its options, its failures, and what it leaves behind."""

import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn

import hpctrain
from hpctrain import backends
from hpctrain.errors import RankLostError, StartError, UsageError

pytestmark = pytest.mark.usefixtures("horovod")


@pytest.fixture(scope="module")
def horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")


def session(**options):
    return hpctrain.Session(**{"backend": "horovod", "batch_size": 2, "timeout": 30, **options})


def model_and_data(rank):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(rank)
    return model.double(), torch.randn(12, 2, 8, generator=generator, dtype=torch.float64)


# Failures.


def train_until(how, victim, seconds):
    """Steps without end, until one rank comes to grief."""
    with session(timeout=seconds) as opened:
        model, _ = opened.prepare(model := nn.Linear(8, 8), torch.optim.SGD(model.parameters()))
        for step in range(10**9):
            if step == 5 and opened.world.rank == victim:
                how()
            opened.step(model(torch.ones(2, 8)).sum())


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    sys.exit(0)


def freeze():
    if os.fork() == 0:  # nobody else ends a process that is stopped
        os.setsid()
        time.sleep(24)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def dawdle():
    time.sleep(17)


def fail():
    raise ValueError("no such file: data.bin")


GONE = "rank {} on node1: the process is gone"


@pytest.mark.parametrize(
    ("how", "victim", "seconds", "said"),
    [
        pytest.param(die, 0, 60, GONE, marks=pytest.mark.slow),
        (die, 2, 60, GONE),
        (fail, 2, 60, "rank {} on node1 failed: ValueError: no such file: data.bin"),
        (dawdle, 2, 1, "rank {} on node1: no answer"),
        pytest.param(freeze, 0, 1, "rank {} on node1: no answer", marks=pytest.mark.slow),
        (leave, 2, 1, "rank 1 waits for gradients; rank {} waits for a barrier"),
    ],
    ids=["die-0", "die-2", "fail-2", "dawdle-2", "freeze-0", "leave-2"],
)
def test_the_others_end_and_name_the_rank(how, victim, seconds, said):
    results = ranks.run(4, train_until, how, victim, seconds, timeout=60)
    for rank, result in enumerate(results):
        if rank != victim:
            assert isinstance(result, RankLostError), result
            assert said.format(victim) in result.found


def fail_while_another_is_busy():
    with session() as opened:
        opened.sum(1)
        if opened.world.rank == 2:
            raise ValueError("no such file: data.bin")
        if opened.world.rank == 1:
            time.sleep(6)  # an evaluation of its own, say
        opened.sum(1)


def test_a_rank_that_was_busy_meanwhile_blames_the_right_one():
    results = ranks.run(3, fail_while_another_is_busy)
    for result in results[:2]:
        assert isinstance(result, RankLostError), result
        assert result.found == "rank 2 on node1 failed: ValueError: no such file: data.bin"


def die_in_a_run():
    with session(max_steps=50, run="run") as opened, opened.run() as run:
        model = opened.prepare(nn.Linear(64, 10))
        for _ in run.epochs():
            for number, _ in enumerate(run.batches(range(100))):
                if number == 3 and opened.world.rank == 1:
                    die()
                opened.backend.sum(torch.ones(1))
        return model


def test_what_horovod_prints_is_kept_in_the_log_of_the_rank():
    for rank, result in enumerate(ranks.run(3, die_in_a_run)):
        if rank != 1:
            assert isinstance(result, RankLostError), result
    words = "Horovod background loop uncaught exception"
    logs = [Path(f"run/logs/rank-{rank}.log").read_text() for rank in (0, 2)]
    assert any(words in log for log in logs)
    assert [log.count("run directory") for log in logs] == [1, 1]


def lost_before_the_start(victim):
    if int(os.environ["HPCTRAIN_RANK"]) == victim:
        backends.open_backend = lambda *arguments: os._exit(9)
    with session(start_timeout=6):
        pass


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        (1, "rank 1 on node1 came to the meeting and was lost"),
        (0, "rank 0 on node1 came to the meeting and was lost"),
    ],
)
def test_a_rank_that_is_lost_before_the_start_is_named(victim, said):
    results = ranks.run(3, lost_before_the_start, victim)
    for rank, result in enumerate(results):
        if rank != victim:
            assert isinstance(result, StartError), result
            assert said in result.found


def lost_in_the_start(victim):
    """Horovod asks for its values, and one rank is gone before it has left its own."""
    if int(os.environ["HPCTRAIN_RANK"]) == victim:
        import horovod.torch as hvd

        hvd.init = die
    with session(start_timeout=30):
        pass


def test_a_rank_that_is_lost_while_horovod_connects_is_named():
    results = ranks.run(3, lost_in_the_start, 1, timeout=25)
    for result in (results[0], results[2]):
        assert isinstance(result, RankLostError), result
        assert result.found == "rank 1 on node1: the process is gone"


# Options: the same as Horovod by hand, bit for bit.


def by_hand(options, accumulate):
    """The loop of Horovod's documentation, inside of a session, which has called hvd.init()."""
    import horovod.torch as hvd

    with session() as opened:
        model, data = model_and_data(opened.world.rank)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=accumulate,
            op=getattr(hvd, options.get("op", "average").capitalize()),
            compression=getattr(hvd.Compression, options.get("compression", "none")),
            gradient_predivide_factor=options.get("gradient_predivide_factor", 1.0),
            groups=options.get("groups"),
        )
        for number, inputs in enumerate(data, 1):
            (model(inputs).square().mean() / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)


def with_hpctrain(options, accumulate):
    named = {f"horovod_{name}": value for name, value in options.items()}
    with session(accumulate=accumulate, **named) as opened:
        model, data = model_and_data(opened.world.rank)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        for inputs in data:
            opened.step(model(inputs).square().mean())
        return flat(model)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": "sum"},
        {"compression": "fp16"},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
    ],
    ids=str,
)
def test_options_do_what_they_do_by_hand(options, accumulate):
    hand = ranks.values(ranks.run(2, by_hand, options, accumulate))
    ours = ranks.values(ranks.run(2, with_hpctrain, options, accumulate))
    for one in (*hand[1:], *ours):
        assert torch.equal(one, hand[0])
    plain = ranks.values(ranks.run(2, with_hpctrain, {}, accumulate))[0]
    changes = options.keys() & {"op", "compression"}
    assert torch.equal(plain, hand[0]) == (not changes)


def refused(options):
    with session(**options):
        pass


@pytest.mark.parametrize(
    ("options", "found", "fix"),
    [
        (
            {"horovod_op": "sum", "horovod_gradient_predivide_factor": 2.0},
            "--horovod-gradient-predivide-factor 2 with --horovod-op sum",
            "--horovod-op average",
        ),
        (
            {"horovod_groups": 1, "horovod_gradient_predivide_factor": 2.0},
            "Horovod reduces groups without it",
            "leave --horovod-groups out",
        ),
        ({"horovod_op": "adasum"}, "--horovod-op adasum with 3 ranks", "2 ranks"),
        (
            {"horovod_op": "sum", "backend": "ddp"},
            "--horovod-op with --backend ddp",
            "--backend horovod",
        ),
    ],
    ids=["predivided sum", "predivided groups", "adasum of 3", "over ddp"],
)
def test_options_that_horovod_would_leave_out_of_account_are_refused(options, found, fix):
    for result in ranks.run(3, refused, options):
        assert isinstance(result, UsageError), result
        assert found in result.found
        assert fix in result.fix


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"precision": "fp16"}, "adasum with --precision fp16"),
        ({}, "--horovod-op adasum over gloo, under hpctrain"),
    ],
    ids=["a loss scale", "gloo"],
)
def test_adasum_is_refused_where_it_cannot_work(options, found):
    for result in ranks.run(2, refused, {"horovod_op": "adasum", **options}):
        assert isinstance(result, UsageError), result
        assert found in result.found


def initialized_before():
    import horovod.torch as hvd

    hvd.init()
    try:
        with session():
            pass
    finally:
        hvd.shutdown()


def test_a_script_that_initialized_horovod_itself_is_refused():
    (result,) = ranks.run(1, initialized_before)
    assert isinstance(result, UsageError)
    assert "hvd.init()" in result.fix


def not_installed():
    importlib.util.find_spec = lambda name: None
    with session():
        pass


def broken():
    found = importlib.import_module

    def fail_to_import(name, package=None):
        if name == "horovod.torch":
            raise ImportError("undefined symbol: _ZN2at4_ops")
        return found(name, package)

    importlib.import_module = fail_to_import
    with session():
        pass


# Stand-ins for another Python environment.
@pytest.mark.parametrize(
    ("state", "found"), [(not_installed, "not installed"), (broken, "undefined symbol")]
)
def test_without_a_horovod_that_works_one_error_says_how_to_get_it(state, found):
    for result in ranks.run(3, state):
        assert isinstance(result, UsageError), result
        assert found in result.found
        assert result.fix.startswith("hpctrain horovod build")


def sessions_in_a_row():
    kept = os.fstat(2).st_ino, sys.stderr
    for number in range(4):
        with session(run=f"run{number}", max_steps=1) as opened, opened.run():
            assert opened.sum(1) == 3
            handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({"msg": "still heard"}))
        if number == 0:
            before = len(os.listdir("/proc/self/fd")), threading.active_count()
    time.sleep(0.2)  # for threads to end
    return (
        before,
        (len(os.listdir("/proc/self/fd")), threading.active_count()),
        kept
        == (
            os.fstat(2).st_ino,
            sys.stderr,
        ),
    )


def test_sessions_in_a_row_leave_no_files_threads_or_streams_behind():
    for before, after, same in ranks.values(ranks.run(3, sessions_in_a_row)):
        assert after <= before
        assert same


def as_released():
    """A stand-in: this Horovod without the mark of a mended one, on one of two real hosts."""
    import horovod

    from hpctrain.backends.horovod import installed

    horovod.mended_by_hpctrain = False
    installed.socket.gethostbyname = lambda name: "127.0.1.1"
    installed.refuse_own_name(hpctrain.World(0, 2, 0, 2, 0, 1), {})  # one host
    installed.refuse_own_name(hpctrain.World(0, 2, 0, 1, 0, 2), {"HPCTRAIN_HOSTNAME": "node1"})
    installed.refuse_own_name(hpctrain.World(0, 2, 0, 1, 0, 2), {})


def test_a_horovod_that_would_listen_on_loopback_is_refused_on_several_hosts():
    (result,) = ranks.run(1, as_released)
    assert isinstance(result, UsageError), result
    assert "is 127.0.1.1" in result.found
    assert "hpctrain horovod build" in result.fix


# What the ranks begin with.


def unlike_starts():
    with session() as opened:
        torch.manual_seed(opened.world.rank)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if opened.is_main:  # as after loading a checkpoint on rank 0 alone
            model(torch.ones(1, 3, 8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer = opened.prepare(model, optimizer)
        start = flat(model), [s["momentum_buffer"].clone() for s in optimizer.state.values()]
        images = torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last)
        opened.step(model(images * opened.world.rank).square().mean())
        return *start, flat(model), type(optimizer).__name__


def test_all_ranks_begin_with_the_weights_and_the_optimizer_of_rank_0_in_any_layout():
    results = ranks.values(ranks.run(3, unlike_starts))
    for weights, momenta, after, kind in results:
        assert torch.equal(weights, results[0][0])
        assert len(momenta) == 2
        for own, first in zip(momenta, results[0][1], strict=True):
            assert torch.equal(own, first)
        assert torch.equal(after, results[0][2])
        assert not torch.equal(after, weights)
        assert kind == "SGD"


def odd_buffers():
    with session() as opened:
        model = nn.Linear(2, 2)
        rank = opened.world.rank
        model.register_buffer("mask", torch.tensor([rank == 0, False, True]))
        model.register_buffer("phase", torch.tensor([rank + 1j]))
        model.register_buffer("low", torch.tensor(rank, dtype=torch.bfloat16))
        opened.prepare(model)
        return model.mask.tolist(), model.phase.tolist(), model.low.item()


def test_buffers_of_any_type_are_those_of_rank_0():
    assert ranks.values(ranks.run(3, odd_buffers)) == [([True, False, True], [1j], 0.0)] * 3


def sparse(options):
    named = {f"horovod_{name}": value for name, value in options.items()}
    with session(**named) as opened:
        torch.manual_seed(0)
        model = nn.Embedding(6, 4, sparse=True)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        opened.step(model(torch.tensor([opened.world.rank, 3])).sum())
        return flat(model)


def test_sparse_gradients_are_averaged_in_every_way_that_horovod_has():
    plain = ranks.values(ranks.run(3, sparse, {}))
    for options in ({"sparse_as_dense": True}, {"compression": "fp16"}):
        for result in ranks.values(ranks.run(3, sparse, options)):
            assert torch.allclose(result, plain[0])
    for result in ranks.run(3, sparse, {"groups": 1}):
        assert isinstance(result, UsageError), result
        assert "sparse gradients with --horovod-groups" in result.found


def unfrozen_later():
    with session() as opened:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        model[0].requires_grad_(True)
        opened.step(model(torch.ones(1, 2)).sum())


def weights_in_bfloat16():
    with session() as opened:
        opened.prepare(nn.Linear(2, 2).bfloat16())


def one_weight_in_two_models():
    with session() as opened:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        opened.prepare(first, second)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (unfrozen_later, "frozen or unfrozen after session.prepare()"),
        (weights_in_bfloat16, "parameter model0.weight is torch.bfloat16"),
        (one_weight_in_two_models, "two prepared models share parameters"),
    ],
)
def test_what_horovod_would_average_wrongly_is_refused(program, found):
    for result in ranks.run(2, program):
        assert isinstance(result, UsageError), result
        assert found in result.found


# Bit-equal repeats.


def many_gradients(groups):
    with session(deterministic=True, horovod_groups=groups) as opened:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(12)))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        generator = torch.Generator().manual_seed(opened.world.rank)
        for _ in range(10):
            opened.step(model(torch.randn(8, 9, generator=generator)).square().mean())
        return flat(model)


@pytest.mark.parametrize("groups", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_deterministic_repeats_are_bit_equal(groups):
    first = ranks.values(ranks.run(3, many_gradients, groups))[0]
    for _ in range(3):
        for repeat in ranks.values(ranks.run(3, many_gradients, groups)):
            assert torch.equal(repeat, first)


def thresholds():
    seen = []
    for deterministic in (False, True, False):
        with session(deterministic=deterministic):
            seen.append(os.environ.get("HOROVOD_FUSION_THRESHOLD"))
    return seen, os.environ.get("HOROVOD_FUSION_THRESHOLD")


def test_what_deterministic_sets_does_not_outlive_the_session():
    """In Horovod it would: a threshold stays until another one is set."""
    assert ranks.values(ranks.run(1, thresholds)) == [([None, "0", "134217728"], None)]
