"""Wrong use: one clear error with a fix, exit code 2, and no traceback."""

import os
import runpy
import sys
import time
import types
from pathlib import Path

import launches
import pytest
import ranks
import torch

import hpctrain
from hpctrain import backends


def check_refused(done, *words):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert done.stderr.count("error:") == 1


TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}


WRONG = [
    (["--global-batch", "10", "--batch-size", "4"], {}, ["--global-batch 8", "--global-batch 12"]),
    (["--global-batch", "9999"], {}, ["1437 samples", "--global-batch 1437"]),
    ([], {"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, ["RANK=4", "WORLD_SIZE=4"]),
    (["--backend", "single"], TWO_RANKS, ["--backend single in a world of 2 ranks"]),
    (["--run-dir", "/proc/nowhere"], {}, ["/proc/nowhere", "--run-dir DIR"]),
]


def run_example(pipe, folder):
    """Run examples/mnist.py in this process, with one wrong use after another."""
    os.chdir(folder)
    for options, variables, _ in WRONG:
        sys.argv = [str(launches.EXAMPLE), "--max-steps", "1", *options]
        # A child of multiprocessing must set that it is a single process.
        env = variables or {"HPCTRAIN_LAUNCHER": "none"}
        os.environ.update(env)
        try:
            runpy.run_path(str(launches.EXAMPLE), run_name="__main__")
        except hpctrain.HpctrainError as error:
            pipe.send((error.exit_code, str(error)))
        for name in env:
            del os.environ[name]


def test_example_refuses_wrong_use_before_training(tmp_path):
    receiver, sender = ranks._CONTEXT.Pipe(duplex=False)
    process = ranks._CONTEXT.Process(target=run_example, args=(sender, tmp_path))
    process.start()
    sender.close()
    try:
        for options, _, words in WRONG:
            assert receiver.poll(120), f"{options} is not refused"
            code, message = receiver.recv()
            assert code == 2, message
            for word in words:
                assert word in message
        process.join(120)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()
        receiver.close()
    assert not list(tmp_path.iterdir())


def open_on_gpus(visible, uuids):
    """Open a session with a torch that reports GPUs, which need not exist."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: visible
    torch.cuda.set_device = lambda device: None
    rank = hpctrain.detect().rank
    torch.cuda.get_device_name = lambda _: "a GPU"
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(uuid=uuids[rank])
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    torch.cuda.is_bf16_supported = lambda **_: True
    hpctrain.Session(batch_size=1, start_timeout=20, precision="bf16")


@pytest.mark.parametrize(
    ("visible", "uuids", "words"),
    [
        (2, ["a", "b", "c"], ["rank 2 on", "2 visible GPUs"]),
        (1, ["a", "b", "a"], ["one GPU (a) is shared by ranks 0 and 2 on "]),
    ],
)
def test_two_ranks_on_one_gpu_are_refused_on_all_ranks(visible, uuids, words):
    for result in ranks.run(3, open_on_gpus, visible, uuids):
        assert isinstance(result, hpctrain.HpctrainError)
        assert result.exit_code == 2
        assert all(word in str(result) for word in words)


def open_with_short_timeout():
    hpctrain.Session(batch_size=1, start_timeout=5.5)


def test_rendezvous_timeout_names_the_missing_ranks_on_all_ranks():
    results = ranks.run(4, open_with_short_timeout, absent=(1, 3))
    for rank in (0, 2):
        assert isinstance(results[rank], hpctrain.HpctrainError)
        assert "ranks 1 and 3 of 4 did not connect within 6 s" in str(results[rank])
    assert results[0].exit_code == 1


def open_with_difference(difference):
    """Open a session in which rank 2 differs from the others."""
    rank = hpctrain.detect().rank
    if rank == 2 and difference == "torch":
        torch.__version__ = "99.0.0"
    sys.argv = ["other.py"] if rank == 2 and difference == "script" else ["train.py"]
    hpctrain.Session(batch_size=1, seed=int(rank == 2 and difference == "--seed"), start_timeout=20)


@pytest.mark.parametrize("difference", ["torch", "script", "--seed"])
def test_consistency_check_refuses_another_torch_script_or_option(difference):
    for result in ranks.run(3, open_with_difference, difference):
        assert isinstance(result, hpctrain.HpctrainError), result
        assert result.exit_code == 2
        assert difference in str(result)
        assert "at rank 2 on node1" in str(result)


def stop_before_backend():
    """Stop rank 2 between the rendezvous and the backend, until the others give it up."""

    def wait_for_errors(*arguments):
        while len(list(Path().glob("given-up-*"))) < 3:
            time.sleep(0.02)

    rank = hpctrain.detect().rank
    if rank == 2:
        backends.open_backend = wait_for_errors
    try:
        hpctrain.Session(batch_size=1, start_timeout=5)
    finally:
        Path(f"given-up-{rank}").touch()


@pytest.mark.slow
def test_rank_lost_between_rendezvous_and_backend_is_named_by_all_ranks():
    results = ranks.run(4, stop_before_backend)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], hpctrain.HpctrainError)
        assert "rank 2 on node1 took part in the rendezvous, but did not connect" in str(
            results[rank]
        )


UNCAUGHT = """
import hpctrain
from hpctrain import backends
hpctrain.Session(precision="fp12")
"""


@pytest.mark.e2e
def test_uncaught_error_exits_with_its_code_and_no_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(UNCAUGHT)
    check_refused(launches.start([sys.executable, script], tmp_path), "--precision fp12", "fp16")


@pytest.mark.slow
@pytest.mark.e2e
def test_error_after_torch_distributed_started_is_printed_once(tmp_path):
    """torch.distributed suppresses the output of an exception hook."""
    command = [launches.BIN / "hpctrain", "run", "--nproc-per-node", "3", launches.EXAMPLE]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years")
    done = launches.start([*command, "--run-dir", "run"], tmp_path)
    assert done.returncode == 2
    assert ": hpctrain: error: run has files but no run: thesis.tex" in done.stderr
    assert done.stderr.count(":   fix:      --run-dir DIR\n") == 1
    assert "Traceback" not in done.stderr


class ConstantImages(torch.utils.data.Dataset):
    def __init__(self, length, classes):
        self.length, self.classes = length, classes

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.ones(2), index % 2


def train_with_own_data(lengths, classes, folder):
    """Train with a different copy of the data on each rank."""
    rank = hpctrain.detect().rank
    with hpctrain.Session(batch_size=2, max_steps=2, start_timeout=30, run_dir=folder) as session:
        model = torch.nn.Linear(2, 2)
        model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        loader = session.loader(ConstantImages(lengths[rank], classes[rank]))
        with session.run() as run:
            for _ in run.epochs():
                for images, targets in run.batches(loader):
                    session.step(torch.nn.functional.cross_entropy(model(images), targets))
        return run.step


@pytest.mark.parametrize(
    ("lengths", "classes", "found"),
    [
        ((24, 24, 23), ["ab"] * 3, "a data set has 23 samples at rank 2 on node1, and 24 at"),
        ((24, 24, 24), ["ab", "ba", "ab"], "24 samples has other classes at rank 1"),
    ],
)
def test_consistency_check_refuses_hosts_with_different_data(lengths, classes, found):
    classes = [list(names) for names in classes]
    for result in ranks.run(3, train_with_own_data, lengths, classes, "refused"):
        assert isinstance(result, hpctrain.HpctrainError)
        assert found in result.found
        assert "find PATH" in result.fixes[0]
    ranks.values(ranks.run(3, train_with_own_data, (24, 24, 24), [["a", "b"]] * 3, "run"))


LEFT_OPEN = """
import hpctrain

def steps():
    with hpctrain.Session(batch_size=1, max_steps=9) as session:
        with session.run() as run:
            yield from run.steps(9)

training = steps()
next(training)
"""


@pytest.mark.e2e
def test_script_that_leaves_a_run_open_ends(tmp_path):
    """Let the interpreter close a run in a generator, where it starts no threads any more."""
    (tmp_path / "train.py").write_text(LEFT_OPEN)
    done = launches.start([sys.executable, "train.py"], tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
