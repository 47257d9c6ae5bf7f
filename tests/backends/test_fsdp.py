"""FSDP: losses, weights, clipping and resume of divided models, against those of one process."""

import copy
import os
import shutil
from pathlib import Path

import battery
import pytest
import ranks
import torch
from checkpoints import load_newest, save
from torch import nn

import hpctrain
from hpctrain.backends.blocks import find_blocks
from hpctrain.checkpoint import data_files, export, weight_files
from hpctrain.compat.apex.lamb import LAMB
from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory

STEPS, SAMPLES, WORDS, WIDTH = 24, 48, 11, 10


class Block(nn.Module):
    """A block of a transformer, of sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


class Language(nn.Module):
    """A transformer with tied embeddings, and a part that is not trained."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(5, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens():
    generator = torch.Generator().manual_seed(4)
    data = torch.randint(0, WORDS, (SAMPLES, 6), generator=generator)
    return torch.utils.data.TensorDataset(data[:, :-1], data[:, 1:])


def train(
    backend, early=False, kind=torch.optim.AdamW, after=lambda session, model: None, **options
):
    """Train; return rows of metrics, norms, and the largest share of a weight on this rank."""
    options = {"global_batch": 12, "batch_size": 1, "precision": "fp64", "seed": 2} | options
    options = {"epochs": 6, "run_dir": "run", "log_every": 1, "clip_norm": 0.7} | options
    backend = backend if int(os.environ["HPCTRAIN_WORLD_SIZE"]) > 1 else "single"
    with hpctrain.Session(backend=backend, **options) as session:
        model = Language()
        if early:
            model, _ = session.prepare(model, kind(model.parameters(), 0.01))
        else:
            model = session.prepare(model)
            session.prepare(kind([p for p in model.parameters() if p.requires_grad], 0.01))
        loader = session.loader(tokens())
        with session.run() as run:
            for _ in run.epochs():
                for inputs, targets in run.batches(loader):
                    with session.autocast():
                        logits = model(inputs)
                        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                    session.step(loss)
                    run.log(loss=loss)
        parts = [session.backend.held(p)[0].numel() / p.numel() for p in model.parameters()]
        rows = run.directory.rows() if session.is_main else []
        return rows, max(parts), len(model.state_dict())


def start(size, path, *arguments, runner=ranks.run, layout=(), **options):
    """Start ranks in a folder; return the result of rank 0, or the error of a rank."""
    before = Path.cwd()
    Path(path).mkdir(exist_ok=True)
    os.chdir(path)
    try:
        return ranks.values(runner(size, trained, arguments, options, layout=layout))[0]
    finally:
        os.chdir(before)


def trained(arguments, options):
    data_files.LEAST_BYTES = 1  # so that each rank of ddp writes a part, too
    return train(*arguments, **options)


def state(path):
    return load_newest(RunDirectory(Path(path, "run")))[1]


def assert_close(found, expected, **tolerance):
    """Compare weights, and optimizer states by number of the parameter."""
    for name, value in expected["model"][0].items():
        torch.testing.assert_close(found["model"][0][name], value, **tolerance)
    for number, values in expected["optimizer"][0]["state"].items():
        for name, value in values.items():
            own = found["optimizer"][0]["state"][number][name]
            torch.testing.assert_close(own, value, **tolerance)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, {"early": True}),
        *(
            pytest.param(size, options, marks=pytest.mark.slow)
            for size, options in [
                (2, {}),
                (4, {}),
                (3, {"fsdp": {"reshard": False}}),
                (3, {"fsdp": {"blocks": "Block+MultiheadAttention"}}),
                (3, {"kind": torch.optim.SGD}),
                *((size, {"epochs": 50}) for size in (2, 3, 4)),  # 200 steps
                (4, {"fsdp": "hybrid", "layout": (2, 2)}),
            ]
        ),
    ],
)
def test_fsdp_has_the_losses_norms_and_weights_of_one_process(size, options):
    own = {name: value for name, value in options.items() if name[:4] not in ("fsdp", "layo")}
    expected, *_ = start(1, "one", "single", **own)
    rows, share, names = start(size, "many", "fsdp", **options)
    assert share <= 0.6  # 3 of 5 rows
    assert names == len(Language().state_dict())
    # Training enlarges rounding errors: in 200 steps to 6e-10 of losses and 2e-9 of norms, with ddp
    # as well.
    for name, most in (("loss", 1e-9), ("grad_norm", 1e-8)):
        one = pytest.approx([r[name] for r in expected], rel=1e-9, abs=most)
        assert [r[name] for r in rows] == one
    assert_close(state("many"), state("one"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp", 3), ("fsdp", 3)),
        *(
            pytest.param(before, after, marks=pytest.mark.slow)
            for before, after in [
                (("fsdp", 3), ("fsdp", 2)),
                (("fsdp", 2), ("fsdp", 4)),
                (("fsdp", 3), ("ddp", 3)),
                (("ddp", 3), ("fsdp", 3)),
                (("fsdp", 3), ("single", 1)),
                (("single", 1), ("fsdp", 3)),
            ]
        ),
    ],
)
def test_fsdp_resumes_from_and_for_each_backend_and_world(before, after):
    options = {"early": True}
    start(after[1], "whole", after[0], **options)
    start(before[1], "parts", before[0], **options, max_steps=10)
    elastic = before[1] != after[1]
    start(after[1], "parts", after[0], **options, resume=True, elastic=elastic)
    exact = {} if before != after else {"rtol": 0, "atol": 0}
    found, expected = state("parts"), state("whole")
    assert found["position"]["step"] == expected["position"]["step"] == STEPS
    assert_close(found, expected, **(exact or {"rtol": 1e-9, "atol": 1e-9}))


def evaluate(backend, count):
    """Return the mean loss over some samples, and the samples in the order of the data set."""
    with hpctrain.Session(backend=backend, precision="fp64", global_batch=12) as session:
        torch.manual_seed(5)
        model = session.prepare(Language())
        data = torch.utils.data.Subset(tokens(), range(count))
        total, seen = 0.0, []
        with torch.no_grad():
            for inputs, targets in session.loader(data, train=False, batch_size=3):
                loss = nn.functional.cross_entropy(
                    model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"
                )
                total += loss.item()
                seen.append(session.gather_for_metrics(inputs))
        return session.sum(total) / count, torch.cat(seen)


@pytest.mark.parametrize(
    "count", [28, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 10, 20))]
)
def test_evaluation_of_any_number_of_samples_is_exact(count):
    ((expected, order),) = ranks.values(ranks.run(1, evaluate, "single", count))
    for loss, seen in ranks.values(ranks.run(3, evaluate, "fsdp", count, timeout=60)):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert torch.equal(seen, order)


def counted(backend, options):
    """Train; return the rows of metrics, and how often the blocks were computed."""
    calls, forward = [], Block.forward
    Block.forward = lambda self, x: calls.append(self) or forward(self, x)
    return train(backend, **options)[0], len(calls)


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_activations_that_are_computed_again_change_no_number(backend):
    options = {"max_steps": 4, "precision": "fp32", "deterministic": True}
    expected, calls = ranks.values(ranks.run(2, counted, backend, options))[0]
    options |= {"activation_checkpointing": True, "run_dir": "again"}
    rows, again = ranks.values(ranks.run(2, counted, backend, options))[0]
    assert again == 2 * calls
    assert [r["loss"] for r in rows] == [r["loss"] for r in expected]
    assert [r["grad_norm"] for r in rows] == [r["grad_norm"] for r in expected]


def test_activation_checkpointing_of_a_model_without_blocks_is_refused():
    with (
        hpctrain.Session(activation_checkpointing=True) as session,
        pytest.raises(UsageError, match="no container of the Linear has several modules"),
    ):
        session.prepare(nn.Linear(2, 2))


def train_images(folder):
    """Train a net with batch norm in bf16; return the losses."""
    with hpctrain.Session(
        backend="fsdp", precision="bf16", batch_size=4, max_steps=8, log_every=1, run_dir=folder
    ) as session:
        losses, model = battery.train(session, 8)
        kinds = {session.backend.held(p)[0].dtype for p in model.parameters()}
        assert kinds == {torch.float32}
        return losses


def test_batch_norm_trains_in_bf16():
    losses = ranks.values(ranks.run(3, train_images, "run"))[0]
    assert len(losses) == 8
    assert max(losses) < 4


def test_blocks_are_what_the_model_repeats():
    model = Language()
    assert find_blocks(model, None) == list(model.blocks)
    assert find_blocks(model, "MultiheadAttention") == [one.attention for one in model.blocks]
    assert find_blocks(nn.Linear(3, 3), None) == []
    layers = nn.Sequential(nn.Sequential(Block(), Block()), nn.ReLU(), nn.ReLU(), Block())
    assert find_blocks(layers, None) == [*layers[0]]
    with pytest.raises(UsageError, match="has no Blok") as caught:
        find_blocks(model, "Blok")
    assert "Block" in caught.value.expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "fp16"}, "--backend fsdp with --precision fp16"),
        ({"check_replicas_every": 5}, "--check-replicas-every 5 with --backend fsdp"),
        ({"fsdp": "offload"}, "--fsdp offload on a CPU"),
        (
            {"fsdp": "hybrid", "layout": (2, 1)},
            "--fsdp hybrid with different numbers of ranks: 2 on node1, 1 on node2",
        ),
        ({"kind": LAMB}, "LAMB under --backend fsdp"),
        ({"kind": torch.optim.Adafactor}, "Adafactor under --backend fsdp"),
        ({"kind": torch.optim.LBFGS}, "LBFGS under --backend fsdp"),
        ({"kind": torch.optim.Rprop}, "Rprop under --backend fsdp"),
    ],
)
def test_what_fsdp_cannot_do_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        start(sum(options.get("layout", (2,))), "refused", "fsdp", **options)


def differentiate(how, backend):
    """Train three steps of a loss that needs a gradient first; return the weights."""
    with hpctrain.Session(backend=backend, precision="fp64", global_batch=6) as session:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1)]
        model = nn.Sequential(*layers).double()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        samples = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            x = samples[session.world.rank :: session.world.world_size].requires_grad_()
            output = model[:3](x) if how == "of a block" else model(x)
            create_graph = how != "of the input"
            (slopes,) = torch.autograd.grad(output.sum(), x, create_graph=create_graph)
            moved = (x + 0.1 * slopes).detach()
            loss = slopes.pow(2).mean() if create_graph else model(moved).pow(2).mean()
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return session.state_dict(model)


@pytest.mark.parametrize("how", ["of the model", "of a block"])
def test_gradient_penalty_is_refused(how):
    (first, *_) = ranks.run(2, differentiate, how, "fsdp")
    with pytest.raises(UsageError, match="create_graph=True of a model under --backend fsdp"):
        ranks.values([first])


def test_gradient_of_the_input_equals_one_process():
    (alone,) = ranks.values(ranks.run(1, differentiate, "of the input", "auto"))
    for weights in ranks.values(ranks.run(3, differentiate, "of the input", "fsdp")):
        for name, values in weights.items():
            torch.testing.assert_close(values, alone[name], rtol=1e-12, atol=1e-12)


class Rooted(nn.Module):
    """A model with weights of its own besides those of its block."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x).tanh()
        return x


def pass_without_backward(how, backend):
    """Train with a teacher, and with a second pass of the model that no loss uses."""
    with hpctrain.Session(backend=backend, precision="fp64", global_batch=6) as session:
        torch.manual_seed(0)
        model = Rooted().double()
        teacher = copy.deepcopy(model).requires_grad_(False)
        model, teacher, optimizer = session.prepare(
            model, teacher, torch.optim.SGD(model.parameters(), 0.5)
        )
        samples = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x = samples[session.world.rank :: session.world.world_size]
        for _ in range(4):
            with torch.no_grad():
                target = teacher(x)
            loss = (model(x) - target - 1).pow(2).mean()
            session.backward(loss)
            with torch.set_grad_enabled(how == "with gradients"):
                model(x)
            if how == "with gradients":
                optimizer.step()
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.3)
            if how == "without gradients":
                optimizer.step()
            optimizer.zero_grad()
        return {**session.state_dict(model), "teacher": session.state_dict(teacher)["scale"]}


@pytest.mark.parametrize("how", ["with gradients", "without gradients"])
def test_pass_without_a_backward_pass_leaves_no_old_weights(how):
    (alone,) = ranks.values(ranks.run(1, pass_without_backward, how, "auto"))
    for weights in ranks.values(ranks.run(3, pass_without_backward, how, "fsdp")):
        for name, values in weights.items():
            torch.testing.assert_close(values, alone[name], rtol=1e-12, atol=1e-12)


def train_from(folders, backend, meta, buffer=False):
    """Train two steps from the weights in a folder; return the losses, and the sizes read.

    Args:
        folders: folder for each rank, or one for all; None loads nothing.
        backend: name of the backend.
        meta: whether the model is made on the meta device.
        buffer: whether a buffer that no file has is there, too.
    """
    read = []

    class Recorded(weight_files.Weight):
        def __init__(self, shape, own):
            super().__init__(shape, lambda rows: own(rows) if rows is ... else record(own, rows))

    def record(own, rows):
        read.append((rows.start, rows.stop))
        return own(rows)

    weight_files.Weight = Recorded
    with hpctrain.Session(
        backend=backend, precision="fp64", max_steps=2, global_batch=12, seed=3,
        log_every=1, run_dir="run",
    ) as session:  # fmt: skip
        with torch.device("meta" if meta else "cpu"):
            model = Language()
            if buffer:
                model.register_buffer("scale", torch.ones(3), persistent=False)
        if meta:
            model.register_buffer("kept", torch.arange(3.0), persistent=False)
        model = session.prepare(model)
        folder = folders[session.world.rank] if isinstance(folders, list) else folders
        if meta and folder:
            with pytest.raises(
                UsageError, match=r"tensors without values: \d+, the first is words\.weight"
            ):
                model(torch.zeros(1, 5, dtype=torch.int64, device=session.device))
        if folder:
            session.load_weights(model, folder)
        if meta:
            assert model.kept.tolist() == [0, 1, 2]
        trained = [p for p in model.parameters() if p.requires_grad]
        session.prepare(torch.optim.AdamW(trained, 0.01))
        losses = []
        with session.run() as run:
            for _ in run.epochs():
                for inputs, targets in run.batches(session.loader(tokens())):
                    logits = model(inputs)
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                    session.step(loss)
                    losses.append(session.sum(loss.item()) / session.backend.world_size)
    return losses, read


@pytest.fixture
def weights(tmp_path):
    """Export a model to several small files; return the folder."""
    torch.manual_seed(8)
    run = RunDirectory(tmp_path / "source")
    save(run, 1, {"model": [Language().double().state_dict()]}, {})
    export(run, tmp_path / "weights", file_bytes=2000)
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 2
    return str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("backend", "meta"),
    [("fsdp", True), ("ddp", True), pytest.param("fsdp", False, marks=pytest.mark.slow)],
)
def test_model_without_memory_begins_with_the_weights_of_a_folder(weights, backend, meta):
    """Each rank of fsdp reads its rows alone."""
    ((expected, _),) = ranks.values(ranks.run(1, train_from, weights, "single", False))
    shutil.rmtree("run")
    for losses, read in ranks.values(ranks.run(3, train_from, weights, backend, meta)):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert max(stop - start for start, stop in [*read, (0, 0)]) <= 10  # of 30
        assert bool(read) == (backend == "fsdp")


def test_folder_that_one_rank_lacks_is_an_error_on_all_ranks(weights):
    results = ranks.run(3, train_from, [weights, weights, "absent"], "fsdp", True)
    assert {type(result) for result in results} == {UsageError}, results
    assert all("absent: No such file" in result.found for result in results)


@pytest.mark.parametrize(
    ("source", "buffer", "text"),
    [
        (None, False, "tensors without values: 32, the first is words.weight"),
        ("weights", True, "the buffer scale of the Language is on the meta device"),
    ],
)
def test_model_without_values_is_refused(weights, source, buffer, text):
    for result in ranks.run(2, train_from, source and weights, "fsdp", True, buffer):
        assert isinstance(result, UsageError)
        assert text in str(result)


def train_with_leftovers(backend, precision):
    """Take a step of four micro-batches in each of two epochs of five; return the moves."""
    torch.manual_seed(0)
    options = {"backend": backend, "precision": precision, "accumulate": 4, "batch_size": 1}
    with hpctrain.Session(**options, run_dir="run", epochs=2) as opened:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model, _ = opened.prepare(model, torch.optim.SGD(model[1].parameters(), 0.125))
        moves = []
        with opened.run() as run:
            for _ in run.epochs():
                for _ in run.batches(range(5)):
                    with opened.autocast():
                        loss = model(torch.ones(1, 4)).sum()  # each weight has the gradient 4
                    if opened.step(loss):
                        weight = opened.backend.whole(model[1].weight.detach())
                        moves.append(weight.flatten().float().tolist())
        return moves


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_that_are_left_out_are_in_no_later_step(precision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for moves in ranks.values(ranks.run(3, train_with_leftovers, "fsdp", precision)):
        assert moves == [[0.5] * 4, [0.0] * 4]
