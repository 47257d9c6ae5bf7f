"""The backend `horovod`: its options, its failures, and what a session leaves behind."""

import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain
from hpctrain import backends
from hpctrain.backends.borrowed_env import Environment
from hpctrain.backends.horovod import placement
from hpctrain.backends.settings import BackendSettings
from hpctrain.cluster.world import World
from hpctrain.errors import RankLostError, StartError, UsageError
from hpctrain.rendezvous import Rendezvous, Roster

pytestmark = pytest.mark.usefixtures("horovod")


def session(**options):
    return hpctrain.Session(**{"backend": "horovod", "batch_size": 2, "timeout": 120, **options})


def model_and_data(rank):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(rank)
    return model.double(), torch.randn(12, 2, 8, generator=generator, dtype=torch.float64)


# Failures.


def train_until(fault, victim, seconds):
    """Take steps without end, until one rank fails."""
    rank = int(os.environ["HPCTRAIN_RANK"])
    try:
        with session(timeout=seconds) as opened:
            model, _ = opened.prepare(model := nn.Linear(8, 8), torch.optim.SGD(model.parameters()))
            for step in range(10**9):
                if step == 5 and rank == victim:
                    fault()
                opened.step(model(torch.ones(2, 8)).sum())
    finally:
        Path(f"ended-{rank}").touch()


def wait_until_ended(*ranks):
    """Wait until these ranks have left their sessions."""
    deadline = time.monotonic() + 120
    while not all(Path(f"ended-{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_without_error():
    sys.exit(0)


def stop_process():
    stopped = os.getpid()
    if os.fork() == 0:  # the child ends the stopped process
        os.setsid()
        try:
            wait_until_ended(1, 2)
        finally:
            os.kill(stopped, signal.SIGKILL)
            os._exit(0)
    os.kill(stopped, signal.SIGSTOP)


def wait_for_the_others():
    wait_until_ended(0, 1)


GONE = "rank {} on node1: the process is gone"
SILENT = "rank {} on node1: no answer"


@pytest.mark.parametrize(
    ("fault", "victim", "seconds", "message"),
    [
        pytest.param(die, 0, 60, GONE, marks=pytest.mark.slow),
        (die, 2, 60, GONE),
        pytest.param(wait_for_the_others, 2, 4, SILENT, marks=pytest.mark.slow),
        pytest.param(stop_process, 0, 4, SILENT, marks=pytest.mark.slow),
        pytest.param(
            *(
                exit_without_error,
                2,
                4,
                "rank 1 waits for gradients; rank {} waits for the other ranks",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["die-0", "die-2", "stall-2", "freeze-0", "leave-2"],
)
def test_horovod_ranks_end_and_name_the_rank_that_was_lost(fault, victim, seconds, message):
    results = ranks.run(3, train_until, fault, victim, seconds)
    for rank, result in enumerate(results):
        if rank != victim:
            assert isinstance(result, RankLostError), result
            assert result.code == "HT309"
            assert message.format(victim) in result.found


def send_without_a_pause():
    """Send tensors until rank 0 is killed; one of them waits for it."""
    with session() as opened:
        opened.sum(1)
        if opened.world.rank == 0:
            time.sleep(0.3)
            die()
        hvd = sys.modules["horovod.torch"]
        hvd.allreduce_async_(torch.ones(4), name="waits")
        for number in range(10**9):
            # Python's lock stays with this thread, as in a backward pass.
            while time.perf_counter_ns() % 2**17 > 2**14:
                pass
            hvd.allreduce_async_(torch.ones(4), name=f"sent.{number}")


def test_horovod_rank_that_sends_as_another_dies_ends():
    results = ranks.run(3, send_without_a_pause)
    for result in results[1:]:
        assert isinstance(result, RankLostError), result
        assert result.found == GONE.format(0)


def fail_while_another_is_busy():
    rank = int(os.environ["HPCTRAIN_RANK"])
    try:
        with session() as opened:
            opened.sum(1)
            if rank == 2:
                raise ValueError("no such file: data.bin")
            if rank == 1:
                wait_until_ended(2)  # in an evaluation of its own, say
            opened.sum(1)
    finally:
        Path(f"ended-{rank}").touch()


@pytest.mark.slow
def test_horovod_rank_that_was_busy_names_the_rank_that_failed():
    results = ranks.run(3, fail_while_another_is_busy)
    for result in results[:2]:
        assert isinstance(result, RankLostError), result
        assert result.found == "rank 2 on node1 failed: ValueError: no such file: data.bin"


def die_in_a_run():
    with session(max_steps=50, run_dir="run") as opened, opened.run() as run:
        model = opened.prepare(nn.Linear(64, 10))
        for _ in run.epochs():
            for number, _ in enumerate(run.batches(range(100))):
                if number == 3 and opened.world.rank == 1:
                    die()
                opened.backend.sum(torch.ones(1))
        return model


@pytest.mark.slow
def test_horovod_output_is_in_the_log_of_the_rank():
    for rank, result in enumerate(ranks.run(3, die_in_a_run)):
        if rank != 1:
            assert isinstance(result, RankLostError), result
    words = "Horovod background loop uncaught exception"
    logs = [Path(f"run/logs/rank-{rank}.log").read_text() for rank in (0, 2)]
    assert any(words in log for log in logs)
    assert [log.count("run directory") for log in logs] == [1, 1]


def exit_before_the_backend(victim):
    if int(os.environ["HPCTRAIN_RANK"]) == victim:
        backends.open_backend = lambda *arguments: os._exit(9)
    with session(start_timeout=10):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_horovod_start_names_a_rank_lost_after_the_rendezvous(victim):
    results = ranks.run(3, exit_before_the_backend, victim)
    for rank, result in enumerate(results):
        if rank != victim:
            assert isinstance(result, StartError), result
            assert result.code == "HT305"
            lost = f"rank {victim} on node1 took part in the rendezvous, but did not connect"
            assert lost in result.found


def die_in_hvd_init(victim):
    """Kill one rank in hvd.init(), where the other ranks wait for its values."""
    if int(os.environ["HPCTRAIN_RANK"]) == victim:
        import horovod.torch as hvd

        hvd.init = die
    with session(start_timeout=120):
        pass


@pytest.mark.slow
def test_horovod_start_names_a_rank_lost_in_hvd_init():
    results = ranks.run(3, die_in_hvd_init, 1, timeout=100)
    for result in (results[0], results[2]):
        assert isinstance(result, RankLostError), result
        assert result.found == "rank 1 on node1: the process is gone"


# Options: the same as the baseline, bit for bit.


def train_baseline(options, accumulate):
    """Run the loop of Horovod's documentation in a session, which has called hvd.init()."""
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
        return flat_weights(model)


def train_with_session(options, accumulate):
    with session(accumulate=accumulate, horovod=options) as opened:
        model, data = model_and_data(opened.world.rank)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        for inputs in data:
            opened.step(model(inputs).square().mean())
        return flat_weights(model)


def flat_weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


OPTIONS = [
    {},
    {"op": "sum"},
    {"compression": "fp16"},
    {"gradient_predivide_factor": 2.0},
    {"groups": 2},
]


def train_both_ways(accumulate):
    """Return, for each set of options, the weights of the baseline and with hpctrain."""
    return [
        (train_baseline(options, accumulate), train_with_session(options, accumulate))
        for options in OPTIONS
    ]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_horovod_options_are_bit_equal_to_horovod_baseline(accumulate):
    # With two ranks, the sum has the same bits however Horovod fuses gradients.
    first, second = ranks.values(ranks.run(2, train_both_ways, accumulate))
    plain, _ = first[0]
    for options, (baseline, session_weights), of_rank_1 in zip(OPTIONS, first, second, strict=True):
        assert all(torch.equal(weights, baseline) for weights in (session_weights, *of_rank_1)), (
            options
        )
        changes = options.keys() & {"op", "compression"}
        assert torch.equal(plain, baseline) == (not changes), options


# By number of ranks: options, part of the message, code, and the first fix.
REFUSED = {
    3: [
        (
            {"horovod": {"op": "sum", "gradient_predivide_factor": 2.0}},
            "--horovod gradient-predivide-factor=2 with op=sum",
            "HT311",
            "--horovod op=average",
        ),
        (
            {"horovod": {"groups": 1, "gradient_predivide_factor": 2.0}},
            "Horovod reduces groups without it",
            "HT311",
            "remove groups from --horovod",
        ),
        ({"horovod": "op=adasum"}, "--horovod op=adasum with 3 ranks", "HT314", "start 2 ranks"),
    ],
    2: [
        (
            {"horovod": "op=adasum", "precision": "fp16"},
            "adasum with --precision fp16",
            "HT313",
            "--precision bf16",
        ),
        (
            {"horovod": "op=adasum"},
            "--horovod op=adasum over gloo, under hpctrain",
            "HT314",
            "mpirun -np N python SCRIPT (after hpctrain horovod build --mpi)",
        ),
    ],
}


def refusals(size):
    found = []
    for options, *_ in REFUSED[size]:
        with pytest.raises(UsageError) as caught, session(**options):
            pass
        found.append((caught.value.found, caught.value.code, caught.value.fixes[0]))
    return found


@pytest.mark.parametrize("size", REFUSED)
def test_horovod_options_that_cannot_work_are_refused_on_every_rank(size):
    for messages in ranks.values(ranks.run(size, refusals, size)):
        for (_, found, *others), message in zip(REFUSED[size], messages, strict=True):
            assert found in message[0]
            assert others == list(message[1:])


def open_after_hvd_init():
    import horovod.torch as hvd

    hvd.init()
    try:
        with session():
            pass
    finally:
        hvd.shutdown()


def test_horovod_initialized_by_the_script_is_refused():
    (result,) = ranks.run(1, open_after_hvd_init)
    assert isinstance(result, UsageError)
    assert result.code == "HT308"
    assert "hvd.init()" in result.fixes[0]


def open_without_horovod():
    """Return the errors without Horovod and with a broken one, by stand-ins for both."""
    actual = importlib.import_module

    def fail_to_import(name, package=None):
        if name == "horovod.torch":
            raise ImportError("undefined symbol: _ZN2at4_ops")
        return actual(name, package)

    errors = []
    for patch in (
        mock.patch.object(importlib.util, "find_spec", return_value=None),
        mock.patch.object(importlib, "import_module", fail_to_import),
    ):
        with patch, pytest.raises(UsageError) as caught, session():
            pass
        errors.append((caught.value.found, caught.value.code, caught.value.fixes))
    return errors


def test_horovod_missing_or_broken_is_refused_with_the_build_command():
    for missing, broken in ranks.values(ranks.run(3, open_without_horovod)):
        assert "not installed" in missing[0]
        assert "undefined symbol" in broken[0]
        for _, code, fixes in (missing, broken):
            assert code == "HT315"
            assert fixes[0].startswith("hpctrain horovod build")


def open_files_and_threads():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def open_sessions_in_a_row():
    streams = os.fstat(2).st_ino, sys.stderr
    for number in range(3):
        with session(run_dir=f"run{number}", max_steps=1) as opened, opened.run():
            assert opened.sum(1) == 3
            handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({"msg": "a message"}))
        if number == 0:
            before = open_files_and_threads()
    deadline = time.monotonic() + 60
    while any(map(int.__gt__, open_files_and_threads(), before)) and time.monotonic() < deadline:
        time.sleep(0.02)  # for threads to end
    return before, open_files_and_threads(), streams == (os.fstat(2).st_ino, sys.stderr)


def test_horovod_sessions_in_a_row_leave_no_files_threads_or_streams_open():
    for before, after, same_streams in ranks.values(ranks.run(3, open_sessions_in_a_row)):
        assert all(now <= then for now, then in zip(after, before, strict=True))
        assert same_streams


def refuse_horovod_as_released():
    """Open Horovod without the mark of the patched build, as if on one of two real hosts."""
    import horovod

    from hpctrain.backends.horovod import horovod_import

    horovod.mended_by_hpctrain = False
    horovod_import.socket.gethostbyname = lambda name: "127.0.1.1"
    horovod_import.refuse_own_name(hpctrain.World(0, 2, 0, 2, 0, 1), {})  # one host
    horovod_import.refuse_own_name(hpctrain.World(0, 2, 0, 1, 0, 2), {"HPCTRAIN_HOSTNAME": "node1"})
    horovod_import.refuse_own_name(hpctrain.World(0, 2, 0, 1, 0, 2), {})


def test_horovod_as_released_is_refused_on_hosts_named_as_loopback():
    (result,) = ranks.run(1, refuse_horovod_as_released)
    assert isinstance(result, UsageError), result
    assert "is 127.0.1.1" in result.found
    assert result.code == "HT307"
    assert "hpctrain horovod build" in result.fixes[0]


# The broadcast of the first weights.


def prepare_unlike_weights():
    with session() as opened:
        torch.manual_seed(opened.world.rank)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if opened.is_main:  # as after loading a checkpoint on rank 0 alone
            model(torch.ones(1, 3, 8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer = opened.prepare(model, optimizer)
        start = (
            flat_weights(model),
            [s["momentum_buffer"].clone() for s in optimizer.state.values()],
        )
        images = torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last)
        opened.step(model(images * opened.world.rank).square().mean())
        return *start, flat_weights(model), type(optimizer).__name__


def test_horovod_broadcasts_weights_and_optimizer_of_rank_0_in_channels_last():
    results = ranks.values(ranks.run(3, prepare_unlike_weights))
    for weights, momenta, after, kind in results:
        assert torch.equal(weights, results[0][0])
        assert len(momenta) == 2
        for own, first in zip(momenta, results[0][1], strict=True):
            assert torch.equal(own, first)
        assert torch.equal(after, results[0][2])
        assert not torch.equal(after, weights)
        assert kind == "SGD"


def prepare_odd_buffers():
    with session() as opened:
        model = nn.Linear(2, 2)
        rank = opened.world.rank
        model.register_buffer("mask", torch.tensor([rank == 0, False, True]))
        model.register_buffer("phase", torch.tensor([rank + 1j]))
        model.register_buffer("low", torch.tensor(rank, dtype=torch.bfloat16))
        opened.prepare(model)
        return model.mask.tolist(), model.phase.tolist(), model.low.item()


def test_horovod_broadcasts_buffers_of_any_dtype():
    assert ranks.values(ranks.run(3, prepare_odd_buffers)) == [([True, False, True], [1j], 0.0)] * 3


def train_sparse(**options):
    with session(**options) as opened:
        torch.manual_seed(0)
        model = nn.Embedding(6, 4, sparse=True)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        opened.step(model(torch.tensor([opened.world.rank, 3])).sum())
        return flat_weights(model)


def train_sparse_with_options():
    found = [
        train_sparse(),
        train_sparse(horovod="sparse-as-dense"),
        train_sparse(horovod="compression=fp16"),
    ]
    with pytest.raises(UsageError) as caught:
        train_sparse(horovod="groups=1")
    return *found, caught.value


def test_horovod_averages_sparse_gradients():
    torch.manual_seed(0)
    expected = nn.Embedding(6, 4, sparse=True).weight.detach()
    expected[[0, 1, 2]] -= 1 / 3  # one of the three ranks has each of these
    expected[3] -= 1
    for *ways, error in ranks.values(ranks.run(3, train_sparse_with_options)):
        assert all(torch.allclose(one, expected.flatten()) for one in ways)
        assert "sparse gradients with --horovod groups" in error.found
        assert error.code == "HT312"


def prepare_bfloat16():
    with session() as opened:
        opened.prepare(nn.Linear(2, 2).bfloat16())


def prepare_shared_weight():
    with session() as opened:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        opened.prepare(first, second)


def checkpoint_a_layer_twice(use_reentrant):
    with session() as opened:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        inputs = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            inputs = checkpoint(model, inputs, use_reentrant=use_reentrant)
        opened.step(inputs.square().mean())
        return flat_weights(model)


def test_horovod_refuses_a_gradient_that_a_reentrant_checkpoint_computes_twice():
    first, second = ranks.values(ranks.run(2, checkpoint_a_layer_twice, False))
    assert torch.equal(first, second)
    for error in ranks.run(2, checkpoint_a_layer_twice, True):
        assert error.code == "HT312"
        assert "use_reentrant=False" in str(error)


@pytest.mark.parametrize(
    ("program", "found", "code"),
    [
        (prepare_bfloat16, "parameter model0.weight is torch.bfloat16", "HT312"),
        (prepare_shared_weight, "two prepared models share parameters", "HT317"),
    ],
)
def test_horovod_refuses_a_model_that_it_would_average_wrongly(program, found, code):
    results = ranks.run(2, program)
    assert code in [result.code for result in results if isinstance(result, UsageError)], results
    for result in results:  # all ranks raise the error of the first rank
        assert found in str(result)


# Bit-equal repeats.


def train_many_gradients(groups):
    with session(deterministic=True, horovod={"groups": groups}) as opened:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(12)))
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        generator = torch.Generator().manual_seed(opened.world.rank)
        for _ in range(10):
            opened.step(model(torch.randn(8, 9, generator=generator)).square().mean())
        return flat_weights(model)


@pytest.mark.parametrize(
    ("groups", "repeats"),
    [(None, 1), *(pytest.param(groups, 3, marks=pytest.mark.slow) for groups in (None, 2))],
)
def test_horovod_deterministic_repeats_are_bit_equal(groups, repeats):
    first = ranks.values(ranks.run(3, train_many_gradients, groups))[0]
    for _ in range(repeats):
        for repeat in ranks.values(ranks.run(3, train_many_gradients, groups)):
            assert torch.equal(repeat, first)


def fusion_thresholds():
    seen = []
    for deterministic in (False, True, False):
        with session(deterministic=deterministic):
            seen.append(os.environ.get("HOROVOD_FUSION_THRESHOLD"))
    return seen, os.environ.get("HOROVOD_FUSION_THRESHOLD")


def test_horovod_deterministic_is_undone_when_the_session_closes():
    """Without this, Horovod keeps a threshold until another one is set."""
    assert ranks.values(ranks.run(1, fusion_thresholds)) == [([None, "0", "134217728"], None)]


def test_horovod_places_of_a_cyclic_layout():
    nodes, hosts = (0, 1, 0, 1, 0), ("node1", "node 2")
    roster = Roster((), ("127.0.0.1",) * 5, hosts, nodes, 0)
    places = []
    for rank, node in enumerate(nodes):
        world = World(rank, 5, nodes[:rank].count(node)).completed(hosts, nodes)
        environ = {}
        settings = BackendSettings(10.0, 10.0)
        met = Rendezvous(world, roster, None, None, "")
        placement.set_variables(Environment(environ), "gloo", met, settings, 4711)
        places.append(environ)
    found = {name: [int(place[f"HOROVOD_{name}"]) for place in places] for name in CYCLIC}
    assert found == CYCLIC
    assert [place["HOROVOD_HOSTNAME"] for place in places] == [f"host-{node}" for node in nodes]
    for place in places:
        assert place["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert place["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"


CYCLIC = {
    "RANK": [0, 1, 2, 3, 4],
    "SIZE": [5] * 5,
    "LOCAL_RANK": [0, 0, 1, 1, 2],
    "LOCAL_SIZE": [3, 2, 3, 2, 3],
    "CROSS_RANK": [0, 1, 0, 1, 0],
    "CROSS_SIZE": [2, 2, 2, 2, 1],
}
