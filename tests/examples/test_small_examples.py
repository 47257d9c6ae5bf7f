"""Examples compared with the same training in plain torch, and resumed after a kill."""

import contextlib
import importlib.util
import io
import os
import signal
import sys
from pathlib import Path

import faults
import launches
import pytest
import ranks
import torch
from by_hand import gan, language_model, simclr, streams
from checkpoints import load_newest

import hpctrain
from hpctrain.data import digits
from hpctrain.rundir import RunDirectory
from hpctrain.training.training_run import Run

SEED = 5
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 30
# Small steps, of which some are in a second epoch: 1,437 digits are 5 steps of 240.
OPTIONS = {
    "language_model": (
        *("--data", "text.txt", "--context", "8", "--warmup", "3", "--eval-every", "3"),
        *("--global-batch", "24", "--batch-size", "4", "--max-steps", "8", "--log-every", "1"),
    ),
    "gan": ("--global-batch", "240", "--max-steps", "7", "--log-every", "1"),
    "simclr": ("--global-batch", "120", "--max-steps", "13", "--log-every", "1"),
    "streams": ("--global-batch", "96", "--epochs", "2", "--log-every", "1"),
}
NAMES = sorted(OPTIONS)
KILLED_AT = 6


def train(name, kill, *options):
    """Run an example as one rank; return what it prints behind the summary.

    Args:
        name: name of the example.
        kill: step after which the rank ends by kill -9; None for an undisturbed run.
        options: options besides OPTIONS.
    """
    Path("text.txt").write_text(TEXT)
    sys.argv = [name, *OPTIONS[name], "--seed", str(SEED), "--run-dir", "run", *options]
    log = Run.log

    def log_and_die(run, **values):
        log(run, **values)
        if run.step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    Run.log = log_and_die
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        launches.example(name).main()
    return output.getvalue().rpartition("/run\n")[2]


def saved_weights():
    """Return the weights of all models in the newest checkpoint, as one tensor."""
    _, state = load_newest(RunDirectory("run"))
    return flat(*(model.values() for model in state["model"]))


def flat(*weights):
    return torch.cat([one.detach().reshape(-1) for some in weights for one in some])


def batches_of(name, size, steps):
    """Return the batches of the first steps, from a session of one process."""
    images, _ = digits()
    dataset = launches.example(name).TwoViews(images) if name == "simclr" else images
    more = {"global_batch": size, "max_steps": steps, "run_dir": "order", "seed": SEED}
    with hpctrain.Session(precision="fp64", **more) as session:
        loader = session.loader(dataset)
        with session.run() as run:
            return [batch for _ in run.epochs() for batch in run.batches(loader)]


def language_model_by_hand(size):
    del size
    example = launches.example("language_model")
    characters = sorted(set(TEXT))
    tokens = torch.tensor([characters.index(one) for one in TEXT])[: len(TEXT) * 9 // 10]
    torch.manual_seed(SEED)
    model = example.GPT(len(characters), context=8).double()
    steps, highest, least = 8, 1e-2, 1e-3
    language_model.train(model, tokens, 8, 24, SEED, steps, 3, highest, least)
    return flat(model.parameters())


def gan_by_hand(size):
    del size
    (batches,) = ranks.values(ranks.run(1, batches_of, "gan", 240, 7))
    example = launches.example("gan")
    torch.manual_seed(SEED)
    generator = example.generator_of(8, 8).double()
    discriminator = example.discriminator_of(8, 8).double()
    gan.train(
        generator, discriminator, [images for images, _ in batches], example.LATENT, 1e-3, SEED
    )
    return flat(generator.parameters(), discriminator.parameters())


def simclr_by_hand(size):
    del size
    (batches,) = ranks.values(ranks.run(1, batches_of, "simclr", 120, 13))
    torch.manual_seed(SEED)
    model = launches.example("simclr").Model(8, 8).double()
    simclr.train(model, batches, 1e-3)
    return flat(model.parameters())


def streams_by_hand(size):
    torch.manual_seed(SEED)
    model = launches.example("streams").model_of().double()
    files = sorted(Path("data/lines").glob("train-*.csv"))
    streams.train(model, files, size, 96, 2, SEED, 1e-3)
    return flat(model.parameters())


BY_HAND = {name: globals()[f"{name}_by_hand"] for name in NAMES}


WORLDS = {"3": (3, "auto"), "1": (1, "auto"), "2": (2, "auto")}
WORLDS |= {"2-horovod": (2, "horovod"), "3-horovod": (3, "horovod")}


@pytest.mark.parametrize(
    ("name", "size", "backend"),
    [
        pytest.param(
            name,
            *world,
            id=f"{name}-{key}",
            marks=() if key == "3" and name != "simclr" else pytest.mark.slow,
        )
        for name in NAMES
        for key, world in WORLDS.items()
    ],
)
def test_example_has_the_weights_of_the_same_by_hand(name, size, backend, lacking):
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")
    options = ("--precision", "fp64", "--backend", backend)
    ranks.values(ranks.run(size, train, name, None, *options))
    torch.testing.assert_close(saved_weights(), BY_HAND[name](size), rtol=1e-8, atol=1e-10)


def killed_and_resumed(name, tmp_path, monkeypatch, torchdata=True):
    """Compare all that a killed and resumed run leaves with that of an undisturbed one, bit by bit.

    Returns:
        Log of rank 0 of the resumed run.
    """
    found = {}
    for run, kills in {"whole": (None,), "resumed": (KILLED_AT, None)}.items():
        (tmp_path / run).mkdir()
        monkeypatch.chdir(tmp_path / run)
        for kill in kills:
            more = ("--deterministic", "--checkpoint-every", "2", "--resume")
            results = ranks.run(
                3, train if torchdata else train_without_torchdata, name, kill, *more
            )
            assert kill is None or all(isinstance(one, RuntimeError) for one in results)
        printed = ranks.values(results)
        _, state = load_newest(RunDirectory("run"))
        images = [path.read_bytes() for path in sorted(Path("run").glob("*.pgm"))]
        found[run] = [printed, images, faults.rows("run"), state]
    assert 0 < faults.started_at("run")[-1] < KILLED_AT
    unlike = sorted(faults.differences(found["whole"], found["resumed"], "run"))
    assert not unlike, unlike[:5]
    return Path("run/logs/rank-0.log").read_text()


@pytest.mark.parametrize(
    "name",
    ["language_model", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gan", "simclr"))],
)
def test_example_killed_and_resumed_has_the_bits_of_an_undisturbed_run(name, tmp_path, monkeypatch):
    killed_and_resumed(name, tmp_path, monkeypatch)


def test_streaming_example_resumes_by_the_state_of_its_loader(tmp_path, monkeypatch, lacking):
    if importlib.util.find_spec("torchdata") is None:
        lacking("torchdata", "no module named torchdata")
    log = killed_and_resumed("streams", tmp_path, monkeypatch)
    assert "fetched and dropped" not in log


def train_without_torchdata(*arguments):
    sys.modules["torchdata"] = None
    return train(*arguments)


@pytest.mark.slow
def test_streaming_example_without_torchdata_resumes_by_the_state_of_its_data_set(
    tmp_path, monkeypatch
):
    log = killed_and_resumed("streams", tmp_path, monkeypatch, torchdata=False)
    assert "batches are fetched and dropped" not in log
