"""Checkpoints that several ranks write together: here, a thread for each rank."""

import json
import os
import shutil
import threading

import pytest
import torch
from checkpoints import load_newest, names
from torch import nn

from hpctrain.backends.extent import Extent
from hpctrain.checkpoint import (
    Team,
    Writer,
    data_files,
    durable_files,
    open_checkpoint,
    process_name,
)
from hpctrain.checkpoint.loading import digest
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.rundir import RunDirectory

SIZE = 3


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let ranks share the bytes of small tensors, and use small blocks."""
    monkeypatch.setattr(data_files, "LEAST_BYTES", 1)
    for module in ("durable_files", "loading", "stored"):
        monkeypatch.setattr(f"hpctrain.checkpoint.{module}.BLOCK", 256)


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


class Ranks:
    """Writers of three ranks.

    Args:
        run: run directory.
        divided: whether each rank holds its rows of the weights, and not all of them.
    """

    def __init__(self, run, divided):
        self.divided, name = divided, process_name()
        teams = [Team(rank, range(SIZE), divided, name, "7") for rank in range(SIZE)]
        self.writers = [Writer(run, team=team) for team in teams]

    def state(self, rank, step):
        """Return the state of a rank, and what it holds of the tensors."""
        weights = weights_of(step)
        if self.divided:
            for name, whole in weights.items():
                weights[name] = whole.tensor_split(SIZE)[rank]
        extents = {
            id(part): extent(whole, rank) if self.divided else Extent.whole(part.shape, range(SIZE))
            for part, whole in zip(weights.values(), weights_of(step).values(), strict=True)
        }
        state = {"model": [weights], **({"position": {"step": step}} if rank == 0 else {})}
        return state, extents

    def save(self, step, ranks=range(SIZE)):
        for rank in ranks:
            state, extents = self.state(rank, step)
            self.writers[rank].start(self.writers[rank].prepare(step, state, {}, extents))

    def settle(self):
        for writer in self.writers:
            writer.settle()
        self.writers[0].all_written()

    def close(self):
        for writer in reversed(self.writers):
            writer.close()


def weights_of(step):
    """Return tensors that show their step: of a size that ranks do not divide, tiny and empty."""
    return {
        "large": torch.arange(700.0).reshape(7, 100) + step,
        "short": torch.full((2, 3), float(step), dtype=torch.bfloat16),
        "flags": torch.arange(5) % 2 == step % 2,
        "empty": torch.empty(0, 4),
    }


def extent(whole, rank):
    """Return the rows that `tensor_split` gives to a rank."""
    rows = [len(part) for part in whole.tensor_split(SIZE)]
    row = whole[:1].numel()
    start = sum(rows[:rank]) * row
    return Extent(tuple(whole.shape), start, start + rows[rank] * row, range(rank, SIZE, SIZE))


@pytest.fixture(params=[False, True], ids=["same", "divided"])
def saved(run, request):
    """Return the ranks after saves of steps 1 and 2."""
    ranks = Ranks(run, request.param)
    for step in (1, 2):
        ranks.save(step)
        ranks.settle()
    ranks.writers[0].wait()
    yield ranks
    ranks.close()


def newest(run):
    """Load the newest checkpoint; return its step, and check all of its state."""
    step, state = load_newest(run)
    assert state["position"]["step"] == step
    for name, expected in weights_of(step).items():
        value = state["model"][0][name]
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name
    return step


def test_ranks_write_a_checkpoint_together(run, saved):
    assert newest(run) == 2
    files = names_in(run)
    assert [name for name in files if name.endswith(".bin")] == [
        f"rank-0000{rank}.bin" for rank in range(SIZE)
    ]
    assert not [name for name in files if name.endswith((".half", ".failed"))]
    assert [name for name in files if name.endswith(".json")] == ["manifest.json"]
    sizes = [(run.checkpoint(2) / f"rank-0000{rank}.bin").stat().st_size for rank in range(SIZE)]
    assert max(sizes) <= 1.3 * sum(sizes) / SIZE
    assert names(run) == ["step-00000001", "step-00000002"]


def names_in(run, step=2):
    return sorted(path.name for path in run.checkpoint(step).iterdir())


def test_small_states_are_written_by_one_rank(run, monkeypatch):
    monkeypatch.setattr(data_files, "LEAST_BYTES", 1 << 24)
    ranks = Ranks(run, False)
    ranks.save(2)
    ranks.settle()
    ranks.close()
    assert newest(run) == 2
    assert [name for name in names_in(run) if name.startswith("rank")] == ["rank-00000.bin"]


@pytest.mark.parametrize("rank", range(SIZE))
def test_each_rank_reads_its_rows_alone(run, saved, monkeypatch, rank):
    opened = open_checkpoint(run.checkpoint(2), 2)
    large = opened.state["model"][0]["large"]
    own = extent(weights_of(2)["large"], rank)
    large.divide(own.start, own.stop, lambda values: values.reshape(-1, 100))
    blocks, real = set(), os.pread

    def note(descriptor, size, offset):
        blocks.add((os.readlink(f"/proc/self/fd/{descriptor}"), offset // 256))
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", note)
    read = opened.read()["model"][0]["large"]
    assert torch.equal(read, weights_of(2)["large"].tensor_split(SIZE)[rank])
    assert sum(-(-path.stat().st_size // 256) for path in run.checkpoint(2).glob("*.bin")) >= 12
    # The small tensors are in two more blocks.
    assert len(blocks) <= -(-(own.stop - own.start) * 4 // 256) + 1 + 2


def test_order_of_memory_and_shared_weights_stay(run):
    images = torch.randn(3, 4, 5, 2).to(memory_format=torch.channels_last)
    tied = nn.Linear(3, 3).weight.detach()
    writer = Writer(run)
    writer.save(
        1, {"model": {"images": images, "a": tied, "b": tied, "number": torch.tensor(2)}}, {}
    )
    writer.close()
    model = open_checkpoint(run.checkpoint(1), 1).read()["model"]
    assert torch.equal(model["images"], images)
    assert model["images"].stride() == images.stride()
    assert model["a"] is model["b"]
    opened = open_checkpoint(run.checkpoint(1), 1)
    opened.state["model"]["images"].divide(40, 80, lambda values: values)
    part = opened.read()["model"]["images"]
    assert torch.equal(part, images.reshape(-1)[40:80])
    assert part.untyped_storage().nbytes() == part.nbytes


class Divided(torch.Tensor):
    """A subclass of a tensor, as a library may divide it."""


def test_part_that_cannot_be_written_is_refused(run):
    part = torch.ones(4).as_subclass(Divided)
    team = Team(0, range(SIZE), True, "host.1", "7")
    with pytest.raises(UsageError, match="Divided that is divided among the ranks"):
        Writer(run, team=team).prepare(
            1, {"model": [part]}, {}, {id(part): Extent((8,), 0, 4, (0,))}
        )


def test_tied_weights_are_written_once(run):
    ranks = Ranks(run, True)
    weight = torch.randn(300)
    for rank, writer in enumerate(ranks.writers):
        parts = [weight.tensor_split(SIZE)[rank].detach() for _ in range(2)]
        extents = {id(part): extent(weight, rank) for part in parts}
        writer.start(writer.prepare(1, {"model": parts}, {}, extents))
    ranks.settle()
    ranks.close()
    state = open_checkpoint(run.checkpoint(1), 1).read()
    assert all(torch.equal(one, weight) for one in state["model"])
    sizes = [path.stat().st_size for path in run.checkpoint(1).glob("*.bin")]
    assert sum(sizes) < 1300


# Faults


@pytest.mark.parametrize("rank", [1, 2])
def test_full_disk_of_one_rank_keeps_the_previous(run, saved, monkeypatch, rank):
    real = open

    def full(path, *more, **keywords):
        if str(path).endswith(f"rank-0000{rank}.bin"):
            raise OSError(28, "No space left on device")
        return real(path, *more, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "open", full, raising=False)
        saved.save(3)
        saved.settle()
    with pytest.raises(CheckpointError, match=rf"\(rank {rank} on .*No space left on") as caught:
        saved.writers[0].wait()
    assert caught.value.code == "HT715"
    assert saved.writers[rank].failure().fixes[0].startswith("df -h")
    saved.close()
    assert names(run) == ["step-00000001", "step-00000002"]
    assert newest(run) == 2


def test_rank_that_died_costs_the_checkpoint_and_no_wait(run, saved, monkeypatch):
    monkeypatch.setitem(data_files._PATIENCE, "leaving", (0.1, "did not write its part"))
    saved.save(3, ranks=[1, 0])
    saved.writers[1].settle()
    saved.close()
    assert "rank 2 did not write its part" in saved.writers[0].failure().found
    assert newest(run) == 2
    assert names(run) == ["step-00000001", "step-00000002"]


def test_part_that_does_not_show_up_is_named(run, saved, monkeypatch):
    """Let a rank write to another file system."""
    text = "wrote a part, which does not show up here"
    monkeypatch.setitem(data_files._PATIENCE, "ready", (0.1, text))
    saved.save(3, ranks=[1, 0])
    saved.settle()
    with pytest.raises(CheckpointError, match="rank 2 wrote a part, which does not show up here"):
        saved.writers[0].wait()
    assert newest(run) == 2


def test_rank_that_still_writes_at_the_end_is_waited_for(run, saved, monkeypatch):
    """Let a rank wait for its disk for longer than rank 0 waits for a dead rank."""
    monkeypatch.setitem(data_files._PATIENCE, "leaving", (0.3, "did not write its part"))
    monkeypatch.setattr("hpctrain.checkpoint.writer._SECONDS_OF_A_SIGN", 0.05)
    real, waits = os.fsync, threading.Event()

    def slow(descriptor):
        if "rank-00002.bin" in os.readlink(f"/proc/self/fd/{descriptor}"):
            waits.wait(1.0)
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        saved.save(3)
        threads = [threading.Thread(target=writer.close) for writer in saved.writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert newest(run) == 3


def test_dead_rank_does_not_hold_a_training_without_memory_for_copies(run, saved, monkeypatch):
    """Without a copy, rank 0 waits for the others inside of its training."""
    late = 0.1, "did not write its part"
    monkeypatch.setitem(data_files._PATIENCE, "waited for by the training", late)
    monkeypatch.setattr("hpctrain.checkpoint.buffers.available", lambda: 0)
    for writer in saved.writers:
        writer._buffers._buffers = []  # those of the saves before
    saved.save(3, ranks=[1, 0])
    assert "rank 2 did not write its part" in saved.writers[0].failure().found
    assert newest(run) == 2


def test_save_after_a_refused_one_has_one_folder_for_all_ranks(run, saved):
    """Rank 0 alone has a value that no checkpoint can hold; the script goes on."""
    for rank, writer in enumerate(saved.writers):
        state, extents = saved.state(rank, 3)
        if rank == 0:
            state["position"]["thing"] = threading.Lock()
            with pytest.raises(UsageError):
                writer.prepare(3, state, {}, extents)
        else:
            writer.prepare(3, state, {}, extents)
    saved.save(3)
    saved.settle()
    saved.writers[0].wait()
    assert newest(run) == 3


@pytest.mark.parametrize("mistake", ["size", "pieces"])
def test_manifest_that_would_be_refused_is_not_committed(run, saved, monkeypatch, mistake):
    if mistake == "size":
        monkeypatch.setattr("hpctrain.checkpoint.loading._MOST_BYTES", 300)
    else:
        real = data_files.tables
        monkeypatch.setattr(
            "hpctrain.checkpoint.folder.tables", lambda *one: lose_a_piece(real(*one))
        )
    saved.save(3)
    saved.settle()
    with pytest.raises(CheckpointError, match="the manifest of step 3"):
        saved.writers[0].wait()
    assert names(run) == ["step-00000001", "step-00000002"]


def lose_a_piece(tables):
    tables["model"][0]["pieces"].pop()
    return tables


def test_rank_with_other_tensors_is_named(run, saved):
    saved.save(3, ranks=[0, 1])
    writer = saved.writers[2]
    tensor = torch.ones(3, 5)
    state = {"model": [{"large": tensor}]}
    writer.start(writer.prepare(3, state, {}, {id(tensor): Extent.whole((3, 5), range(SIZE))}))
    saved.settle()
    with pytest.raises(CheckpointError, match="rank 2 has tensors of other sizes or types"):
        saved.writers[0].wait()
    assert newest(run) == 2


def test_each_save_has_a_folder_of_its_own(run, saved):
    """Let a rank write its part of a failed save late: the next save does not use it."""
    saved.save(3, ranks=[1])
    saved.writers[1].settle()
    (first,) = (name for name in names(run) if name.startswith(".step-00000003"))
    saved.save(3, ranks=[1])
    saved.writers[1].settle()
    (second,) = {name for name in names(run) if name.startswith(".")} - {first}
    assert first.rpartition(".")[0] == second.rpartition(".")[0]


def test_checkpoint_waits_for_the_last_part(run, saved):
    saved.save(3, ranks=[0, 1])
    saved.writers[1].settle()
    assert newest(run) == 2
    saved.save(3, ranks=[2])
    saved.writers[0].wait()
    assert newest(run) == 3


def refuse_newest(run):
    """Check that step 2 is not read, and that the newest checkpoint is step 1."""
    with pytest.raises(CheckpointError, match="rank-00001"):
        open_checkpoint(run.checkpoint(2), 2).read()
    assert newest(run) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "swap"])
def test_damaged_part_is_found(run, saved, damage):
    """Damage a part of the newest checkpoint; the previous one loads."""
    path = run.checkpoint(2) / "rank-00001.bin"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        for position in range(0, len(content), 37):
            changed = bytearray(content)
            changed[position] ^= 4
            path.write_bytes(changed)
            refuse_newest(run)
        return
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "swap":
        shutil.copy(run.checkpoint(1) / path.name, path)
    refuse_newest(run)


def edited(run, edit):
    """Change the table of the first tensor of step 2, and give the manifest the matching hash."""
    path = run.checkpoint(2) / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest["tensors"]["model"][0], manifest)
    manifest["sha256"] = digest(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "edit",
    [
        lambda one, _: one["pieces"].pop(0),
        lambda one, _: one["pieces"].pop(),
        lambda one, _: one["pieces"].reverse(),
        lambda one, _: one["pieces"].append(one["pieces"][-1]),
        lambda one, _: one["pieces"][0].__setitem__(1, 1 << 40),
        lambda one, _: one["pieces"][0].__setitem__(1, -16),
        lambda one, _: one["pieces"][0].__setitem__(0, 7),
        lambda one, _: one["pieces"][0].__setitem__(0, "../x.bin"),
        lambda one, _: one["pieces"][0].pop(),
        lambda one, _: one.update(shape=[1 << 40, 1 << 40]),
        lambda one, _: one.update(shape=[-7, -100]),
        lambda one, _: one.update(shape="7"),
        lambda one, _: one.update(dtype="nn"),
        lambda one, _: one.update(dtype="load"),
        lambda one, _: one.update(dtype="float64"),
        lambda one, _: one.update(order=[0, 0]),
        lambda one, _: one.update(order=[2, 0]),
        lambda one, _: one.update(number=99),
        lambda one, _: one.update(number=-1),
        lambda one, _: one.update(same=0),
        lambda one, _: one.pop("pieces"),
        lambda one, all_: all_["tensors"].update(model=[1]),
        lambda one, all_: all_["tensors"].update(model={}),
        lambda one, all_: all_.update(tensors=[]),
        lambda one, all_: all_["files"]["rank-00001.bin"].pop("blocks"),
        lambda one, all_: all_["files"]["rank-00001.bin"]["blocks"].pop(),
    ],
)
def test_forged_table_is_refused(run, saved, edit):
    """Give the manifest pieces that are not all of a tensor, or not in its files."""
    edited(run, edit)
    assert newest(run) == 1


def test_checkpoint_of_a_lost_table_is_not_whole(run, saved):
    """Leave the tensors out of the manifest: their places in the state are empty."""
    edited(run, lambda _, manifest: manifest["tensors"].clear())
    step, state = load_newest(run)
    assert step == 1 or state["model"][0]["large"].is_meta


def test_many_saves_leave_no_thread(run, saved):
    for step in range(3, 9):
        saved.save(step)
        saved.settle()
    saved.writers[0].wait()
    assert newest(run) == 8
    for writer in saved.writers:
        writer.settle()
    assert not [one for one in threading.enumerate() if one.name == "checkpoint writer"]
    assert run.steps() == [6, 7, 8]
