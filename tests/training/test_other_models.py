"""Models of timm and Hugging Face: the numbers of a plain loop, exact resume, and export."""

import importlib.util
from types import SimpleNamespace

import pytest
import ranks
import torch
from battery import orders, session
from checkpoints import load_newest
from safetensors.torch import load_file, load_model
from torch.utils.data import Dataset, default_collate

from hpctrain.checkpoint import export
from hpctrain.rundir import RunDirectory

SAMPLES, BATCH, EPOCHS, SEED = 12, 6, 3, 3
STEPS, CUT = 6, 3


class Samples(Dataset):
    """Samples of a list; a dict stays one."""

    random = False

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def vit():
    """Return a ViT of timm that recomputes its blocks, its samples and its loss."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10, depth=2
    )
    model.set_grad_checkpointing()
    draw = torch.Generator().manual_seed(1)
    samples = [(torch.randn(3, 32, 32, generator=draw), n % 10) for n in range(SAMPLES)]
    return SimpleNamespace(
        model=model,
        samples=samples,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        double=lambda batch: [batch[0].double(), batch[1]],
    )


def bert():
    """Return a BERT of transformers with tied weights that recomputes its layers, and the rest."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    model.activation_checkpointing_enable()
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(0, 50, (SAMPLES, 8), generator=draw)
    samples = [{"input_ids": row, "labels": row} for row in words]
    return SimpleNamespace(
        model=model,
        samples=samples,
        loss=lambda model, batch: model(**batch).loss,
        double=lambda batch: batch,
    )


MODELS = {"timm": vit, "transformers": bert}


def train(name, path, **options):
    """Train a model on this rank."""
    options = {"global_batch": BATCH, "max_steps": STEPS, "deterministic": True, **options}
    with session(run_dir=path, seed=SEED, **options) as opened:
        case = MODELS[name]()
        optimizer = torch.optim.SGD(case.model.parameters(), 0.1, momentum=0.9)
        model, optimizer = opened.prepare(case.model.train(), optimizer)
        loader = opened.loader(Samples(case.samples))
        with opened.run() as run:
            for _ in run.epochs():
                for batch in run.batches(loader):
                    with opened.autocast():
                        loss = case.loss(model, batch)
                    opened.step(loss)
                    run.log(loss=loss)


def train_and_resume(name):
    train(name, "fp64", precision="fp64")
    train(name, "whole")
    train(name, "cut", max_steps=CUT)
    train(name, "cut", resume=True)


def train_by_hand(name):
    """Return the weights of a plain loop in one process, in fp64."""
    torch.manual_seed(SEED)
    case = MODELS[name]()
    model = case.model.double().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for indices in [step for epoch in orders(SAMPLES, BATCH, EPOCHS, SEED) for step in epoch]:
        batch = default_collate([case.samples[index] for index in indices])
        optimizer.zero_grad()
        case.loss(model, case.double(batch)).backward()
        optimizer.step()
    return model.state_dict()


def weights(path):
    return load_newest(RunDirectory(path))[1]["model"][0]


@pytest.mark.parametrize(
    ("run", "size"),
    [
        pytest.param("auto", 1, marks=pytest.mark.slow),
        ("auto", 3),
        pytest.param("horovod", 3, marks=pytest.mark.slow),
    ],
    indirect=["run"],
)
@pytest.mark.parametrize("name", ["timm", pytest.param("transformers", marks=pytest.mark.slow)])
def test_models_of_other_libraries(run, size, name, tmp_path, monkeypatch, lacking):
    if importlib.util.find_spec(name) is None:
        lacking(name, f"no module named {name}")
    monkeypatch.chdir(tmp_path)
    ranks.values(run(size, train_and_resume, name))

    expected, found = train_by_hand(name), weights("fp64")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)

    whole, resumed = weights("whole"), weights("cut")
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())

    export(RunDirectory("whole"), tmp_path / "out.safetensors")
    for load in (load_model, load_plainly):
        model = MODELS[name]().model
        load(model, "out.safetensors")
        assert all(torch.equal(model.state_dict()[key], value) for key, value in whole.items())


def load_plainly(model, file):
    """Load a file as scripts do; only second names of tied weights may be missing."""
    found = load_file(file)
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    state = model.state_dict()
    filled = {state[name].data_ptr() for name in found}
    assert all(state[name].data_ptr() in filled for name in missing)
