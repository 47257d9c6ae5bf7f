"""examples/finetune.py and examples/vit.py against the same by hand, and after a kill."""

import importlib
import json
import os
import signal
import sys
import time

import launches
import pytest
import ranks
import torch
from battery import orders
from checkpoints import load_newest
from torchvision import models

from hpctrain import Session, data
from hpctrain.rundir import RunDirectory

SAMPLES, BATCH, EPOCHS = 48, 12, 2
STEP = SAMPLES // BATCH  # steps of an epoch
OPTIONS = {"finetune": ("--unfreeze-epoch", "1"), "vit": ("--ema", "0.9")}
EXAMPLES = ["finetune", "vit"]


def small(*_):
    """Return a small part of the digits, in place of `hpctrain.data.digits`."""
    parts = [data.digits()[0] for _ in range(2)]
    for part in parts:
        part.images, part.targets = part.images[:SAMPLES], part.targets[:SAMPLES]
    return parts


def train(name, run, *options, precision="fp64"):
    """Run an example on this rank."""
    example = launches.example(name)
    example.digits = small
    sizes = ("--global-batch", str(BATCH), "--epochs", str(EPOCHS))
    sys.argv = [name, "--run-dir", run, "--precision", precision, *sizes, *OPTIONS[name], *options]
    example.main()


def weights(run):
    """Return the weights and their averages in the newest checkpoint of a run."""
    _, state = load_newest(RunDirectory(run))
    return {name: value for model in state["model"] for name, value in model.items()}


@pytest.fixture(autouse=True)
def needed(request, lacking, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if request.node.callspec.params["name"] == "vit" and not importlib.util.find_spec("timm"):
        lacking("timm", "no module named timm")


@pytest.fixture(scope="module")
def by_hand():
    """Return a function that returns the weights by hand, computed once."""
    known = {}

    def get(name):
        if name not in known:
            order = orders(SAMPLES, BATCH, EPOCHS)
            known[name] = importlib.import_module(f"by_hand.{name}").train(small()[0], order)
        return known[name]

    return get


# In fp64: in fp32 Adam turns the rounding of small gradients into steps of full size. Neither model
# has a batch norm with statistics of the micro-batch, which depend on the world.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit", 3),
        pytest.param("finetune", 3, marks=pytest.mark.slow),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name in EXAMPLES for n in (1, 2)),
    ],
)
def test_example_has_the_weights_of_the_same_by_hand(name, size, by_hand):
    ranks.values(ranks.run(size, train, name, "run"))
    found, expected = weights("run"), by_hand(name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10, msg=key)


def train_and_die(name, *options):
    """Kill this rank in the seventh step, after the checkpoint of the sixth is there."""
    step, done = Session.step, 0

    def fatal(self, *arguments):
        nonlocal done
        done += 1
        if done == STEP + 3:
            while not RunDirectory("run").checkpoint(STEP + 2).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    Session.step = fatal
    train(name, "run", *options, precision="fp32")


def resume_and_train_anew(name, *options):
    train(name, "run", "--resume", *options, precision="fp32")
    train(name, "undisturbed", *options, precision="fp32")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_killed_example_has_the_bits_of_an_undisturbed_one(name):
    options = ("--deterministic", "--checkpoint-every", "2")
    killed = ranks.run(3, train_and_die, name, *options)
    assert all(isinstance(result, RuntimeError) for result in killed), killed
    ranks.values(ranks.run(3, resume_and_train_anew, name, *options))
    starts = (RunDirectory("run").path / "starts.jsonl").read_text().splitlines()
    assert [json.loads(start)["step"] for start in starts] == [0, STEP + 2]
    found, expected = weights("run"), weights("undisturbed")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ["finetune"])
def test_example_begins_with_the_weights_of_a_file_except_the_head(name):
    torch.manual_seed(9)
    source = models.resnet18(num_classes=7)
    torch.save({"model": source.state_dict()}, "resnet18.pt")
    ranks.values(ranks.run(2, train, name, "run", "--weights", "resnet18.pt", "--max-steps", "1"))
    found = weights("run")  # of which the first epoch trains the head alone
    assert found["fc.weight"].shape[0] == 10
    backbone = {n: v for n, v in source.state_dict().items() if not n.startswith("fc.")}
    assert all(torch.equal(found[n], v.to(found[n].dtype)) for n, v in backbone.items())
