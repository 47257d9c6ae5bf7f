"""Data that is not a map-style data set, each layout read by its own library as docs/data.md shows.

The table of that page is that of LAYOUTS.
"""

import importlib
import io
import json
import os
import signal
import tarfile
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import launches
import numpy
import pages
import pytest
import ranks
import torch
from battery import session
from torch import nn

from hpctrain.errors import UsageError

FILES, EACH, SIZE = 6, 8, 4
SAMPLES = FILES * EACH
STEPS = SAMPLES // (3 * SIZE)  # of an epoch on three ranks
DATA = Path("data")


def jpg(number):
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 9, 9)).save(data, "jpeg")
    return data.getvalue()


def npy(number):
    data = io.BytesIO()
    numpy.save(data, numpy.full(3, number, numpy.float32))
    return data.getvalue()


CONTENTS = {
    "jpg": jpg,
    "npy": npy,
    "cls": lambda number: str(number).encode(),
    "json": lambda number: json.dumps({"label": number}).encode(),
    "txt": lambda number: f"photo {number}".encode(),
}


def write_tars(*suffixes):
    """Write tar files named as those of timm/imagenet-1k-wds, with a `.cls` or not."""
    DATA.mkdir()
    for file in range(FILES):
        with tarfile.open(DATA / f"imagenet1k-train-{file:04d}.tar", "w") as tar:
            for number in range(file * EACH, (file + 1) * EACH):
                for suffix in suffixes:
                    content = CONTENTS[suffix](number)
                    member = tarfile.TarInfo(f"n01440764/{number:08d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def write_mds():
    from streaming import MDSWriter

    columns = {"x": "ndarray:float32:3", "id": "int"}
    with MDSWriter(out=str(DATA), columns=columns, size_limit=200) as writer:
        for number in range(SAMPLES):
            writer.write({"x": numpy.full(3, number, numpy.float32), "id": number})


def write_lines():
    DATA.mkdir()
    for file in range(FILES):
        numbers = range(file * EACH, (file + 1) * EACH)
        text = "\n".join(f"{number},1,2,3" for number in numbers)
        (DATA / f"train-{file}.csv").write_text(text)


def hugging_face():
    import datasets

    rows = {"x": [[float(number)] * 3 for number in range(SAMPLES)], "id": list(range(SAMPLES))}
    return datasets.Dataset.from_dict(rows)


def write_arrow():
    hugging_face().save_to_disk(str(DATA), num_shards=FILES)


def write_parquet():
    DATA.mkdir()
    for file in range(FILES):
        part = hugging_face().shard(FILES, file, contiguous=True)
        part.to_parquet(str(DATA / f"train-{file}.parquet"))


def columns(batch):
    return batch["x"], batch["id"].tolist()


def pair(batch):
    return batch[0], batch[1].tolist()


# write, ids: write the data; return inputs and numbers of a batch. block: words that the code block
# of the page has, and what replaces a text in it.
Layout = namedtuple("Layout", "library split workers resume write ids block")

TARS = ("webdataset", "hpctrain, by tar files", "0, 2", "replay")
LAYOUTS = {
    "tar: jpg + cls": Layout(
        *TARS, lambda: write_tars("jpg", "cls"), pair, ("webdataset", '"cls"', '"cls"')
    ),
    "tar: jpg + cls + json": Layout(
        *TARS,
        lambda: write_tars("jpg", "cls", "json"),
        lambda batch: (batch[0], batch[1]["label"].tolist()),
        ("webdataset", '"cls"', '"json"'),
    ),
    "tar: jpg + txt": Layout(
        *TARS,
        lambda: write_tars("jpg", "txt"),
        lambda batch: (batch[0], [int(text.split()[1]) for text in batch[1]]),
        ("webdataset", '"cls"', '"txt"'),
    ),
    "tar: npy": Layout(
        *TARS,
        lambda: write_tars("npy"),
        lambda batch: (batch[0], batch[0][:, 0].int().tolist()),
        ("webdataset", '"jpg", "cls"', '"npy"'),
    ),
    "MDS": Layout(
        "MosaicML Streaming",
        "the library, by RANK",
        "0, 2",
        "state",
        write_mds,
        columns,
        ("from streaming", "", ""),
    ),
    "any stream with a state": Layout(
        "torchdata", "the data set", "0, 2", "state", write_lines, pair, ("dataset = Lines", "", "")
    ),
    "arrow on disk": Layout(
        "datasets",
        "hpctrain, by the order",
        "0, 2",
        "order",
        write_arrow,
        columns,
        ("load_from_disk", "", ""),
    ),
    "stream of datasets": Layout(
        "datasets",
        "the library; hpctrain calls it",
        "0, 2",
        "state",
        write_parquet,
        columns,
        ("streaming=True", "", ""),
    ),
}
MODULES = {"webdataset": "webdataset", "MosaicML Streaming": "streaming", "datasets": "datasets"}
MODULES["torchdata"] = "torchdata"
HEAD = ("layout", "library", "split over ranks by", "workers", "resume by", "tested")


def table():
    lines = [HEAD, ["---"] * len(HEAD)]
    for name, one in LAYOUTS.items():
        lines.append((name, one.library, one.split, one.workers, one.resume, "3 ranks, kill -9"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_table_of_the_page_is_that_of_the_layouts_tested_here():
    page = (launches.TOP / "docs/data.md").read_text()
    assert table() in page, f"docs/data.md needs this table:\n{table()}"


def loader_of(name, opened, workers):
    """Return the loader that the code block of the page makes."""
    words, old, new = LAYOUTS[name].block
    blocks = [one.text for one in pages.blocks("docs/data.md", "python") if words in one.text]
    assert len(blocks) == 1, (words, blocks)
    names = {
        "args": SimpleNamespace(data=DATA),
        "session": SimpleNamespace(**{**vars(opened), "workers": workers}),
        "Lines": launches.example("streams").Lines,
    }
    exec(blocks[0].replace(old, new), names)
    return names["loader"]


def train(name, workers, path="run", kill=None, change=None, **options):
    """Return epoch, step and samples of each micro-batch of this rank."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ[variable] = os.environ[f"HPCTRAIN_{variable}"]  # as `hpctrain run` does
    options = {"batch_size": SIZE, "run_dir": path, "seed": 5, **options}
    with session(**options) as opened:
        model = nn.Linear(1, 1)
        model, _ = opened.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
        loader = (change or loader_of)(name, opened, workers)
        seen = []
        with opened.run() as run:
            for epoch in run.epochs(2):
                for batch in run.batches(loader):
                    inputs, numbers = LAYOUTS[name].ids(batch)
                    seen.append((epoch, run.step, numbers))
                    opened.step(model(inputs.reshape(-1)[:1].float()).mean())
                    if run.step == kill:
                        end_after_a_checkpoint(run.directory)
        return seen


def end_after_a_checkpoint(directory):
    """End this process by kill -9, once a checkpoint of the second epoch is complete."""
    deadline = time.monotonic() + 60
    while max(directory.steps(), default=0) <= STEPS:
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def start(name, workers, keywords):
    return train(name, workers, **keywords)


def write(name):
    LAYOUTS[name].write()


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging-face"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def need(name, lacking):
    library = LAYOUTS[name].library
    if importlib.util.find_spec(MODULES[library]) is None:
        lacking(MODULES[library], f"no module named {MODULES[library]}")


DEFAULT = {("tar: jpg + cls", 2), ("MDS", 0), ("stream of datasets", 0)}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(
            name,
            workers,
            marks=[
                *([] if (name, workers) in DEFAULT else [pytest.mark.slow]),
                # Two jobs of MosaicML Streaming that start together on one node can collide there.
                *([pytest.mark.xdist_group("streaming")] if name == "MDS" else []),
            ],
        )
        for name in LAYOUTS
        for workers in (0, 2)
    ],
)
def test_killed_and_resumed_stream_has_the_samples_of_an_undisturbed_run(name, workers, lacking):
    need(name, lacking)
    ranks.values(ranks.run(1, write, name))
    whole = ranks.values(ranks.run(3, start, name, workers, {"path": "whole"}))
    for epoch in (0, 1):
        used = [n for seen in whole for one, _, numbers in seen if one == epoch for n in numbers]
        assert sorted(used) == list(range(SAMPLES))
    options = {"path": "killed", "checkpoint_every": 1}
    killed = ranks.run(3, start, name, workers, {**options, "kill": STEPS + 3})
    assert all(isinstance(one, RuntimeError) for one in killed), killed
    resumed = ranks.values(ranks.run(3, start, name, workers, {**options, "resume": True}))
    for seen, rest in zip(whole, resumed, strict=True):
        assert 0 < len(rest) < STEPS  # in the second epoch, and not at its beginning
        assert rest == seen[-len(rest) :]
    log = Path("killed/logs/rank-0.log").read_text()
    assert log.count("cannot skip") == (LAYOUTS[name].resume == "replay")


def unseeded(name, opened, workers):
    loader = loader_of(name, opened, workers)
    return torch.utils.data.DataLoader(loader.dataset.shuffle(buffer_size=8), SIZE)


def train_unseeded():
    return train("stream of datasets", 0, change=unseeded)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_shuffle_of_datasets_without_a_common_seed_is_refused(lacking):
    need("stream of datasets", lacking)
    ranks.values(ranks.run(1, write, "stream of datasets"))
    for result in ranks.run(3, train_unseeded):
        assert isinstance(result, UsageError), result
        assert result.code == "HT611"
        assert "shuffle(seed=" in result.fixes[0]


def seeded(name, opened, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = loader_of(name, opened, workers).dataset.shuffle(seed=3, buffer_size=8)
    return StatefulDataLoader(dataset, SIZE)


def train_seeded(keywords):
    return train("stream of datasets", 0, change=seeded, **keywords)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_shuffle_buffer_of_datasets_is_replayed_as_its_state_lacks_the_buffer(lacking):
    need("stream of datasets", lacking)
    ranks.values(ranks.run(1, write, "stream of datasets"))
    whole = ranks.values(ranks.run(3, train_seeded, {"path": "whole"}))
    options = {"path": "killed", "checkpoint_every": 1}
    ranks.run(3, train_seeded, {**options, "kill": STEPS + 3})
    resumed = ranks.values(ranks.run(3, train_seeded, {**options, "resume": True}))
    for seen, rest in zip(whole, resumed, strict=True):
        assert 0 < len(rest) < STEPS
        assert rest == seen[-len(rest) :]
