"""Copies of the state in the memory of the hosts: the next attempt goes on from the newest one."""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import faults
import pytest
import survivor

from hpctrain import rundir
from hpctrain.checkpoint import open_checkpoint
from hpctrain.errors import exit_codes
from hpctrain.training import memory_copies

# On the disk are the ends of the epochs: steps 8, 16 and 24.
EVERY = faults.IN_MEMORY
# At step 14, both hosts have the copy of step 12. Rank 1 does not write that of its host.
KILLED = ("copied=12@14:rank1", "kill@14:rank1")


@pytest.fixture
def killed(attempt, memory):
    """Kill a rank of the first attempt by kill -9; return the copies of its hosts."""
    assert attempt(0, hurt=KILLED).code in (None, exit_codes.FAILED)
    one, other = sorted(memory.glob("*/checkpoints/*"))
    assert one.name == other.name == "step-00000012"
    assert (one.parts[-3][:6], other.parts[-3][:6]) == ("node1-", "node2-")
    return one, other


def damage(copy):
    with open(copy / "model.pt", "r+b") as file:
        file.seek(200)
        file.write(b"?")


def elements(folder, step):
    """Return the number of a checkpoint's weights."""
    (weights,) = open_checkpoint(folder, step, ["model"]).read()["model"]
    return sum(one.numel() for one in weights.values())


def log():
    return Path("run/logs/rank-0.log").read_text()


def done(start):
    assert start.code == exit_codes.DONE, start
    assert start.results == [None] * len(start.results)
    return faults.begins("run")


@pytest.mark.parametrize(
    "over", ["ddp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("horovod", "fsdp"))]
)
def test_next_attempt_goes_on_from_the_copy_in_memory(attempt, memory, references, lacking, over):
    """Kill a rank, and another one in the next attempt; the end is bit-equal to a quiet run."""
    if over == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    attempt(0, "--backend", over, hurt=KILLED)
    attempt(1, "--backend", over, hurt=("copied=18@20:rank2", "kill@20:rank2"))
    assert done(attempt(2, "--backend", over)) == [0, 12, 18]
    faults.same("run", references(3, "--backend", over), twice=2 + 2)
    assert not memory.exists()


@pytest.mark.parametrize("loss", [damage, pytest.param(shutil.rmtree, marks=pytest.mark.slow)])
def test_copy_of_another_host_replaces_one_that_is_damaged_or_lost(
    attempt, killed, references, loss
):
    loss(killed[0])
    assert done(attempt(1)) == [0, 12]
    faults.same("run", references(3), twice=2)


@pytest.mark.slow
def test_ranks_of_fsdp_need_all_parts_of_a_copy(attempt, memory, references):
    """Lose the newest parts of one rank, then all parts of another one."""
    over = ("--backend", "fsdp")
    attempt(0, *over, hurt=KILLED)
    parts = sorted(memory.glob("*/checkpoints/*"))
    assert [part.name for part in parts] == ["step-00000009", "step-00000012"] * 3
    whole = elements(Path("run/checkpoints/step-00000008"), 8)
    assert sum(elements(part, 12) for part in parts[1::2]) == pytest.approx(whole, rel=0.05)
    shutil.rmtree(parts[1])
    attempt(1, *over, hurt=("copied=15@17:rank1", "kill@17:rank1"))
    assert faults.begins("run") == [0, 9]
    shutil.rmtree(sorted(memory.glob("*"))[2])
    assert done(attempt(2, *over)) == [0, 9, 16]  # from the disk
    faults.same("run", references(3, *over), twice=5 + 1)


def test_checkpoint_on_the_disk_replaces_copies_that_are_all_damaged(attempt, killed, references):
    for copy in killed:
        damage(copy)
    assert done(attempt(1)) == [0, 8]
    faults.same("run", references(3), twice=6)
    assert "has changed since it was written; the next best" in log()


@pytest.mark.slow
def test_newer_checkpoint_on_the_disk_is_preferred(attempt, memory):
    attempt(0, "--memory-checkpoint-every", "5", hurt=("copied=8@9:rank1", "kill@9:rank1"))
    for copy in memory.glob("*/checkpoints/step-00000008"):
        copy.rename(copy.with_name("step-00000005"))  # not of this step, so damaged
    assert done(attempt(1)) == [0, 8]


@pytest.mark.slow
def test_copy_of_a_host_that_a_later_attempt_did_without_is_not_used(attempt, killed, memory):
    """The attempt without it has begun at an earlier step, so the run had another course."""
    shutil.move(killed[1], "away")
    damage(killed[0])
    attempt(1, hurt=("kill@8:rank1",))
    shutil.move("away", killed[1])
    assert done(attempt(2)) == [0, 8, 8]


@pytest.mark.slow
def test_elastic_attempt_goes_on_from_memory_with_other_hosts(attempt, killed, references):
    assert done(attempt(1, "--elastic", layout=(1, 1))) == [0, 12]
    assert faults.consumed("run") == faults.consumed(references(3))


@pytest.mark.slow
def test_stop_of_an_attempt_from_memory_saves_on_the_disk(attempt, killed, memory, references):
    """The signal comes before its first step; the next start is that of a requeued job."""
    assert attempt(1, hurt=("usr2@opened:rank1",)).code == exit_codes.STOPPED
    assert not memory.exists()
    assert rundir.RunDirectory("run").steps()[-1] == 13
    faults.resume(3, *EVERY)
    faults.same("run", references(3), twice=2)


def without_room(argv):
    usage = SimpleNamespace(total=1 << 30, free=20_000)
    with mock.patch.object(memory_copies.shutil, "disk_usage", return_value=usage):
        survivor.main(argv)


def test_no_room_ends_the_copies_and_not_the_training(attempt, memory, references):
    assert done(attempt(0, "--epochs", "1", main=without_room)) == [0]
    faults.same("run", references(3, "--epochs", "1"), twice=0)
    assert not memory.exists()
    assert log().count("no more copies of the state are kept in memory: 0.1 MB more are") == 1


@pytest.mark.slow
def test_link_in_place_of_the_folder_ends_the_copies(attempt, memory, tmp_path):
    (tmp_path / "target").mkdir()
    memory.symlink_to(tmp_path / "target")
    try:
        assert done(attempt(0, "--epochs", "1")) == [0]
    finally:
        memory.unlink()
    assert not list((tmp_path / "target").iterdir())
    assert "is no folder of this user alone" in log()


@pytest.mark.slow
def test_option_without_further_attempts_is_said_to_have_no_effect():
    start = faults.start(1, *EVERY, "--epochs", "1")
    assert start.code == exit_codes.DONE
    assert "--memory-checkpoint-every has no effect here" in log()
