"""A checkpoint that is written in the background has the state of the step of its save."""

import collections
import copy
import errno
import io
import logging
import os
import shutil
import threading
from contextlib import contextmanager

import numpy
import pytest
import torch
from checkpoints import load_newest
from torch import nn

from hpctrain.checkpoint import Writer, buffers, folder
from hpctrain.checkpoint.buffers import Buffers
from hpctrain.checkpoint.data_files import Team, plan
from hpctrain.checkpoint.snapshot import freeze
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.process.logging import logger
from hpctrain.rundir import RunDirectory


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def writer(run):
    writer = Writer(run)
    yield writer
    writer.close()


@pytest.fixture
def log(caplog):
    """Capture the log from INFO on."""
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.level, logger.propagate = before


class Gate:
    """A stand-in for a disk, on which a write waits until the test opens the gate."""

    def __init__(self, monkeypatch):
        self.waits, self.open = threading.Event(), threading.Event()
        real = folder.write

        def write(path, value):
            self.waits.set()
            assert self.open.wait(60)
            return real(path, value)

        monkeypatch.setattr(folder, "write", write)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(8, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_by_torch(value):
    """Save the value by `torch.save`; return it as loaded."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


def assert_same(one, other):
    """Check that two values have the same types and bits."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.layout == other.layout
        assert one.shape == other.shape
        assert one.requires_grad == other.requires_grad
        assert one.is_quantized == other.is_quantized
        assert one.is_conj() == other.is_conj()
        if one.layout == torch.strided and not one.is_meta:
            assert one.stride() == other.stride()
            assert one.storage_offset() == other.storage_offset()
        if not one.is_meta:
            assert torch.equal(one.to_dense(), other.to_dense())
        assert vars(one).keys() == vars(other).keys()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif torch.is_storage(one):
        assert list(one) == list(other)
    else:
        assert one == other


BASE = torch.arange(24.0).reshape(4, 6)
# Made in the test, because torch warns of these.
VALUES = {
    "tensor": BASE,
    "views": [BASE, BASE[1:3], BASE.t(), BASE[:, ::2], BASE.flatten()[5:]],
    "expanded": torch.ones(3, 1).expand(3, 4),
    "empty": [torch.empty(0), torch.empty(0, 3), torch.tensor(1.5)],
    "types": [torch.ones(3).to(t) for t in (torch.float16, torch.bfloat16, torch.int8, torch.bool)],
    "eighths": torch.ones(4).to(torch.float8_e4m3fn).view(torch.uint8),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 3, torch.quint8),
    "meta": torch.empty(3, device="meta"),
    "parameter": nn.Parameter(torch.randn(3)),
    "frozen": nn.Parameter(torch.randn(3), requires_grad=False),
    "of numpy": torch.from_numpy(numpy.arange(5)),
    "plain": {
        "numbers": (1, -1.5, 2**70, 1j, True, None, float("inf")),
        "texts": ["a", "ü", b"bytes", bytearray(b"x")],
        3: {"set": {1, 2}, "dtype": torch.float32, "size": torch.Size([2, 3])},
        "device": torch.device("cpu"),
    },
    "dicts": [collections.OrderedDict(a=1), collections.Counter("aab")],
    "model": nn.BatchNorm2d(3).state_dict(),
    "generator": torch.get_rng_state(),
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*quant", "ignore:TypedStorage")
@pytest.mark.parametrize("name", VALUES)
def test_checkpoint_writer_loads_what_torch_save_would(run, writer, name):
    value = VALUES[name]() if callable(VALUES[name]) else VALUES[name]
    for number in (1, 2):
        writer.save(number, {"part": value}, {})
    writer.wait()
    found, state = load_newest(run)
    assert found == 2
    assert_same(state["part"], saved_by_torch(value))


def test_checkpoint_writer_keeps_state_dict_metadata(run, writer):
    state = nn.Sequential(nn.BatchNorm1d(3)).state_dict()
    writer.save(1, {"model": [state]}, {})
    writer.wait()
    (loaded,) = load_newest(run)[1]["model"]
    assert loaded._metadata == state._metadata


def test_checkpoint_writer_keeps_shared_memory(run, writer):
    weight = torch.randn(4, 4)
    rows = [1, 2]
    writer.save(1, {"part": {"a": weight, "b": weight.t(), "c": weight[2], "d": [rows, rows]}}, {})
    writer.wait()
    part = load_newest(run)[1]["part"]
    part["a"][2, 1] = 99
    assert part["b"][1, 2] == 99
    assert part["c"][1] == 99
    assert part["d"][0] is part["d"][1]
    assert (run.checkpoint(1) / "part.pt").stat().st_size < 3000


Point = collections.namedtuple("Point", "x y")


class TensorSubclass(torch.Tensor):
    """A subclass of a tensor, as a script may define it."""


@pytest.mark.parametrize(
    "value",
    [
        numpy.float64(1.5),
        {"deep": [(numpy.arange(3),)]},
        Point(1, 2),
        collections.defaultdict(list),
        len,
        lambda: None,
        threading.Lock(),
        torch.ones(3).as_subclass(TensorSubclass),
        {"x": object()},
        [torch.ones(4), torch.ones(4).untyped_storage()],
        frozenset({1}),
        slice(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_checkpoint_writer_refuses_unloadable_state(run, writer, value):
    loads = True
    try:
        saved_by_torch(value)
    except Exception:
        loads = False
    if loads:  # in this release of torch
        writer.save(1, {"part": value}, {})
        writer.wait()
        assert_same(load_newest(run)[1]["part"], saved_by_torch(value))
        return
    with pytest.raises(UsageError, match="'part' contains a value that no checkpoint") as caught:
        writer.save(1, {"model": torch.ones(3), "part": value}, {})
    assert len(caught.value.fixes) == 3
    assert caught.value.code == "HT706"
    assert writer.failure() is None
    assert writer.seconds is None
    assert not run.checkpoints.exists()
    writer.save(1, {"model": torch.ones(3)}, {})
    writer.wait()
    assert writer.committed == 1


def test_checkpoint_writer_checks_changed_state_again(run, writer):
    state = {"best": 1.0, "weight": torch.ones(3)}
    for number in (1, 2):
        writer.save(number, {"part": state}, {})
    state["best"] = numpy.float64(2.0)
    for _ in range(2):
        with pytest.raises(UsageError, match="'part' contains"):
            writer.save(3, {"part": state}, {})
    writer.wait()
    assert run.steps() == [1, 2]


def test_checkpoint_writer_refuses_shared_memory_of_two_types(run, writer):
    weight = torch.randn(4)
    with pytest.raises(UsageError, match="different types that share memory"):
        writer.save(1, {"part": [weight, weight.view(torch.int32)]}, {})
    writer.save(1, {"part": weight, "other": weight.view(torch.int32)}, {})
    writer.wait()
    state = load_newest(run)[1]
    assert torch.equal(state["part"], weight)
    assert torch.equal(state["other"], weight.view(torch.int32))


@pytest.mark.parametrize("inference", [False, True])
def test_checkpoint_has_the_state_at_save_time(run, writer, gate, inference, monkeypatch, tmp_path):
    """Change everything in place while the writer has not written anything yet."""
    # The first step of an optimizer would set this.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, optimizer = model_and_optimizer()
    others = {"list": [1, [2]], "numpy": torch.from_numpy(numpy.zeros(4))}

    def state():
        return {"model": [model.state_dict()], "optimizer": optimizer.state_dict(), "x": others}

    expected = copy.deepcopy(state())
    facts = {"metrics": {"loss": 1.0}}
    with torch.inference_mode(inference):
        writer.save(1, state(), facts)
    gate.waits.wait(60)
    for _ in range(5):
        step(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    others["list"][1].append(3)
    others["numpy"].numpy()[:] = 7
    facts["metrics"]["loss"] = 2.0
    optimizer.param_groups[0]["lr"] = 99.0
    assert run.steps() == []
    gate.open.set()
    writer.wait()
    assert_same(load_newest(run)[1], expected)
    manifest = (run.checkpoint(1) / "manifest.json").read_text()
    assert '"loss": 1.0' in manifest
    model, optimizer = model_and_optimizer()
    expected = copy.deepcopy(state())
    writer.save(2, state(), {})  # into the same buffers
    writer.wait()
    assert_same(load_newest(run)[1], expected)


def test_second_checkpoint_save_waits_for_the_first(run, writer, gate):
    weight = torch.zeros(1000)
    writer.save(1, {"model": weight}, {})
    gate.waits.wait(60)
    weight += 1
    done = threading.Event()

    def save_second():
        writer.save(2, {"model": weight}, {})
        done.set()

    thread = threading.Thread(target=save_second)
    thread.start()
    assert not done.wait(0.2)
    assert writer.committed is None
    gate.open.set()
    thread.join(60)
    writer.wait()
    assert run.steps() == [1, 2]
    assert load_newest(run)[1]["model"].mean() == 1
    shutil.rmtree(run.checkpoint(2))
    assert load_newest(run)[1]["model"].mean() == 0


def test_checkpoint_buffers_are_reused():
    buffers = Buffers()

    def memory_of(value):
        taken = freeze({"part": value})
        plan(taken, Team())
        assert buffers.copy(taken)
        return [piece.source.data_ptr() for piece in taken.pieces]

    first = memory_of([torch.ones(3, 5), torch.ones(100)])
    assert memory_of([torch.zeros(15), torch.zeros(100)]) == first
    grown = memory_of([torch.zeros(15), torch.zeros(100), torch.zeros(7)])
    assert grown[:2] == first
    assert memory_of([torch.zeros(100)]) == first[1:]
    assert len(buffers._buffers) == 1


def test_checkpoint_memory_is_logged_once(run, writer, log, monkeypatch):
    writer.save(0, {"model": torch.ones(1_000)}, {})
    assert not log.records  # a small model needs no memory that is worth a line
    monkeypatch.setattr(buffers, "_TOLD", 4_000_000)
    for number in range(1, 4):
        writer.save(number, {"model": torch.ones(1_000_000)}, {})
    writer.wait()
    assert [record.message for record in log.records] == [
        "4.0 MB of memory hold copies of the state, which a thread writes in the background"
    ]


@pytest.mark.parametrize("why", ["room", "allocation", "torch"])
def test_checkpoint_without_memory_is_written_synchronously(run, log, monkeypatch, why):
    def fail(*_):
        raise {"allocation": MemoryError, "torch": RuntimeError}[why]("not enough memory")

    if why == "room":
        monkeypatch.setattr(buffers, "available", lambda: 1000)
    else:
        monkeypatch.setattr(buffers, "_new", fail)
    writer = Writer(run)
    weight = torch.ones(1000)
    for number in (1, 2):
        writer.save(number, {"model": weight}, {})
        assert writer.committed == number
        assert writer.seconds > 0
    assert threading.active_count() == len(threading.enumerate())
    assert not [t for t in threading.enumerate() if t.name == "checkpoint writer"]
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert "training waits while a checkpoint is written" in record.message
    assert ("4.0" in record.message or "0.0 MB more are needed" in record.message) == (
        why == "room"
    )
    monkeypatch.undo()
    writer.save(3, {"model": weight}, {})  # there is memory again
    writer.close()
    assert run.steps() == [1, 2, 3]
    assert len(log.records) == 2


def test_checkpoint_without_a_thread_is_written_synchronously(run, log, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    writer = Writer(run)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        writer.save(1, {"model": torch.ones(3)}, {})
    assert writer.committed == 1
    assert "can't start new thread" in log.records[-1].message
    writer.close()


def test_failed_synchronous_checkpoint_does_not_raise_in_save(run, monkeypatch):
    monkeypatch.setattr(buffers, "available", lambda: 0)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    writer = Writer(run)
    writer.save(1, {"model": torch.ones(3)}, {})
    assert "broken" in writer.failure().found


def test_failed_checkpoint_is_reported_once(run, writer, log, monkeypatch):
    writer.save(1, {"model": torch.ones(3)}, {})
    writer.wait()
    assert writer.failure() is None
    assert writer.committed == 1
    before = writer.seconds
    assert before > 0
    with monkeypatch.context() as patch:

        def fail(path, value):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(folder, "write", fail)
        writer.save(2, {"model": torch.ones(3)}, {})
        with pytest.raises(CheckpointError, match="step 2 could not be written"):
            writer.wait()
        writer.save(3, {"model": torch.ones(3)}, {})  # does not raise the previous error
        writer._join()
        error = writer.failure()
        for step in range(4, 10):
            writer.save(step, {"model": torch.ones(3)}, {})
        writer._join()
        assert "step 9 could not be written" in writer.failure().found
    assert "step 3 could not be written" in error.found
    assert error.fixes[0].startswith("df -h")
    assert error.code == "HT715"
    assert writer.failure() is None
    assert writer.committed == 1
    first, *others = [r.message for r in log.records if r.levelname == "ERROR"]
    assert "fix:      df -h" in first
    assert others == [
        f"{count} checkpoints in a row could not be written, the last one of step {count + 1}"
        for count in (2, 4, 8)
    ]
    assert run.steps() == [1]
    writer.save(10, {"model": torch.ones(3)}, {})
    writer.wait()
    assert writer.failure() is None
    assert writer.committed == 10
    assert writer.seconds >= before
    assert log.messages[-1] == "the checkpoint of step 10 is written, after 8 that could not be"
    monkeypatch.setattr(folder, "write", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    for step in (11, 12):  # an error of another kind
        writer.save(step, {"model": torch.ones(3)}, {})
        writer._join()
    assert "fix:      df -h" in log.messages[-2]
    assert log.messages[-1].startswith("2 checkpoints in a row")


def test_unknown_error_does_not_end_the_checkpoint_writer(run, writer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(folder, "write", lambda path, value: {}["strange"])
        writer.save(1, {"model": torch.ones(3)}, {})
        with pytest.raises(CheckpointError, match=r"KeyError\('strange'\)") as caught:
            writer.wait()
        assert caught.value.code == "HT705"
    writer.save(2, {"model": torch.ones(3)}, {})
    writer.wait()
    assert run.steps() == [2]


def test_checkpoint_writer_of_a_replaced_start_commits_nothing(run):
    for number in (1, 2, 3):
        first = Writer(run, keep=3)
        first.save(number, {"model": torch.full((3,), float(number))}, {})
        first.close()
    error = CheckpointError.of_text("HT704", "another start", "this one to have the run", "nothing")
    entered = []

    @contextmanager
    def commit():
        entered.append(sorted(entry.name for entry in run.checkpoints.iterdir()))
        raise error
        yield

    writer = Writer(run, keep=1, commit=commit)
    for number in (3, 4):
        writer.save(number, {"model": torch.zeros(3)}, {})
        with pytest.raises(CheckpointError) as caught:
            writer.wait()
        assert caught.value is error
    writer.save(4, {"model": torch.zeros(3)}, {})
    writer.close()
    assert writer.failure() is error
    assert writer.failure() is None
    assert [len(found) for found in entered] == [4, 4, 4]  # with the complete temporary folder
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        f"step-0000000{step}" for step in (1, 2, 3)
    ]
    step, state = load_newest(run)
    assert step == 3
    assert (state["model"] == 3).all()


def test_checkpoint_renames_happen_under_the_lock(run, monkeypatch):
    inside, outside = [], []
    holding = False
    real = folder.Path.rename

    def record_and_rename(self, target):
        (inside if holding else outside).append(target.name)
        return real(self, target)

    @contextmanager
    def commit():
        nonlocal holding
        holding = True
        yield
        holding = False

    monkeypatch.setattr(folder.Path, "rename", record_and_rename)
    writer = Writer(run, keep=1, commit=commit)
    for number in (1, 2):
        writer.save(number, {"model": torch.zeros(3)}, {})
    writer.close()
    assert inside[:2] == ["step-00000001", "step-00000002"]
    assert inside[2].startswith(".step-00000001.")
    assert not outside
    assert run.steps() == [2]


def test_checkpoint_writer_close_finishes_the_save(run, gate):
    writer = Writer(run)
    writer.close()  # nothing to do
    writer.save(1, {"model": torch.zeros(3)}, {})
    gate.waits.wait(60)
    (thread,) = [t for t in threading.enumerate() if t.name == "checkpoint writer"]
    assert thread.daemon
    gate.open.set()
    writer.close()
    assert not thread.is_alive()
    assert run.steps() == [1]
    writer.close()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"best": {"loss": numpy.float64(1)}}, "best['loss'] is a numpy.float64"),
        ({"runs": [1, {"lock": threading.Lock()}]}, "runs[1]['lock'] is a _thread.lock"),
    ],
)
def test_error_of_an_unloadable_state_names_the_value(value, named):
    with pytest.raises(UsageError) as caught:
        freeze({"part": value})
    assert caught.value.found.endswith(f"no checkpoint can restore: {named}")
