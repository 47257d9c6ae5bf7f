"""The scripts of docs/loops.md, run as they are printed there: on 1, 2 and 3 ranks, and resumed."""

import json
import re
import runpy
import sys
from pathlib import Path

import launches
import pytest
import ranks
import torch
from checkpoints import load_newest
from safetensors import safe_open
from torch.optim.swa_utils import update_bn

from hpctrain.errors import UsageError
from hpctrain.rundir import RunDirectory

PAGE = (launches.TOP / "docs" / "loops.md").read_text()
FOUND = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SCRIPTS = dict(FOUND)
EXACT = ("--precision", "fp64", "--global-batch", "24", "--log-every", "1")
# Micro-batches of 4: each rank accumulates.
SPLIT = (*EXACT, "--batch-size", "4")
# Batch norm depends on the micro-batch.
WHOLE = {"swa": SPLIT}
# Epochs of a script, and the step at which it is cut, inside an epoch.
EPOCHS = {"plateau": 6, "swa": 5, "folds": 2}
CUTS = {"plateau": 27, "swa": 33}
STATISTICS = re.compile(r"running_(mean|var)|num_batches_tracked")


def train(name, directory, options):
    """Run a script; return the states of its generators, and its RESULT."""
    sys.argv = [f"{name}.py", "--run-dir", directory, *options]
    names = runpy.run_path(f"{name}.py", run_name="__main__")
    generators = {
        n: one.get_state() for n, one in names.items() if isinstance(one, torch.Generator)
    }
    return {**generators, "result": names.get("RESULT")}


def start(size, name, directory, *options, text=None):
    """Run a script on ranks; return what `train` returns on each."""
    Path(f"{name}.py").write_text(SCRIPTS[name] if text is None else text)
    return ranks.values(ranks.run(size, train, name, directory, options))


def cut_and_resume(name, first, then, *options):
    """Run a script into `many`, which is stopped inside an epoch and goes on."""
    options = (*SPLIT, "--epochs", str(EPOCHS.get(name, 3)), *options)
    start(first, name, "many", *options, "--max-steps", str(CUTS.get(name, 7)))
    elastic = () if first == then else ("--elastic",)
    return start(then, name, "many", *options, "--resume", *elastic)


def state_of(directory):
    return load_newest(RunDirectory(directory))[1]


def weights(directory):
    """Return the weights of the models of each run of a directory, without statistics of ranks."""
    found = {}
    for run in RunDirectory(directory).runs():
        step, state = load_newest(run)
        name = run.path.relative_to(directory)
        found[f"step of {name}"] = torch.tensor(step)
        for number, model in enumerate(state["model"]):
            for key, tensor in model.items():
                if not (number == 0 and STATISTICS.search(key)):
                    found[f"{key} of model {number} of {name}"] = tensor
    return found


def rows(directory):
    lines = Path(directory, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(directory, name):
    """Return the values of a name in the metrics of a run."""
    return [row[name] for row in rows(directory) if name in row]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def schedule():
    rates = curve("one", "lr")
    assert curve("many", "lr") == pytest.approx(rates, rel=1e-12)
    peak = 0.1 * 24 / 256
    warmup = [part * peak for part in (0.325, 0.55, 0.775, 1)]
    assert rates[:4] == pytest.approx(warmup)  # a row has the rate of the next step
    assert len(rates) == 30
    assert rates[-1] < 0.01 * peak


def plateau():
    found = {}
    for directory in ("one", "many"):
        steps = [row for row in rows(directory) if "val_loss" in row]
        found[directory] = {row["step"]: (row["val_loss"], row["rate"]) for row in steps}
    # The lines behind the batches ran where the epoch was cut, too; the schedule did not count.
    assert sorted(found["many"]) == sorted([*found["one"], CUTS["plateau"]])
    for step, row in found["one"].items():
        assert found["many"][step] == pytest.approx(row, rel=1e-9)
    rates = [rate for _, rate in found["one"].values()]
    assert rates[0] == 0.1
    assert rates[-1] < 0.001


def average():
    model, mean, teacher = state_of("many")["model"]
    assert mean["n_averaged"] == 30
    assert_close(torch.load("many/teacher.pt"), dict(teacher))
    # Both average over all steps; the average begins with the weights after the first one.
    assert not torch.equal(teacher["0.weight"], model["0.weight"])
    assert mean["module.0.weight"].dist(teacher["0.weight"]) > 1e-3
    done = launches.start(
        [sys.executable, "-m", "hpctrain", "export", "many", "all.safetensors"], Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    with safe_open("all.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"model0.0.weight", "model1.module.0.weight", "model2.0.weight"} <= names


def shadow():
    saved = torch.load("many/shadow.pt")
    assert_close(saved, torch.load("one/shadow.pt"))
    kept = state_of("many")["ranks"]
    assert len(kept) == 2  # a dict of each rank
    for rank in kept:
        assert_close(rank["values"]["shadow"], saved)


def swa():
    mean = state_of("many")["model"][1]
    assert mean["n_averaged"] == 3
    assert curve("many", "lr") == curve("one", "lr")
    # The statistics are those that torch's function computes from all samples in one process.
    plain = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    ).double()
    names = {name.partition("module.")[2]: one for name, one in mean.items() if "module." in name}
    plain.load_state_dict(names)
    points = torch.randn(240, 4, generator=torch.Generator().manual_seed(0)).double()
    update_bn(points.split(24), plain)
    assert_close(plain.state_dict(), names)


def folds():
    names = [f"fold-{k}-lr-{lr}" for k in range(3) for lr in (0.1, 0.01)]
    assert sorted(run.path.name for run in RunDirectory("many").runs()) == sorted(names)


def gan():
    for name in ("critic_loss", "generator_loss"):
        assert curve("many", name) == pytest.approx(curve("one", name), rel=1e-9)


def tokens():
    assert curve("many", "loss") == pytest.approx(curve("one", "loss"), rel=1e-9)


def tasks():
    for name in ("value_loss", "kind_loss"):
        assert curve("many", name) == pytest.approx(curve("one", name), rel=1e-9)
    assert state_of("many")["model"][0]["log_variances"].abs().min() > 1e-3


def lora():
    step, state = load_newest(RunDirectory("many"))
    manifest = json.loads((RunDirectory("many").checkpoint(step) / "manifest.json").read_text())
    assert manifest["frozen"]["parameters"] == ["0.linear.*", "2.linear.*"]
    assert sum(".linear." in name for name in state["model"][0]) == 4
    assert len(state["optimizer"][0]["state"]) == 4  # of the trained parameters alone
    adapter = torch.load("many/adapter.pt")
    assert adapter.keys() == {"0.down", "0.up", "2.down", "2.up"}
    assert_close(adapter, torch.load("one/adapter.pt"))


def noise():
    assert curve("many", "loss") == pytest.approx(curve("one", "loss"), rel=1e-9)


# What a reader relies on besides the weights.
CHECKS = [schedule, plateau, average, shadow, swa, folds, gan, tokens, tasks, noise, lora]


def test_each_script_of_the_page_has_a_check():
    assert [name for name, _ in FOUND] == [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_script_cut_on_3_ranks_and_resumed_on_2_has_the_weights_of_one_process(
    check, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name = check.__name__
    start(1, name, "one", *WHOLE.get(name, EXACT))
    cut_and_resume(name, 3, 2)
    assert_close(weights("many"), weights("one"))
    check()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), [("ddp", 3), ("fsdp", 2)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_script_resumes_on_as_many_ranks(check, backend, size, tmp_path, monkeypatch):
    if (check, backend) == (shadow, "fsdp"):
        pytest.skip("fsdp refuses the dict: a test of its own")
    monkeypatch.chdir(tmp_path)
    name = check.__name__
    start(1, name, "one", *WHOLE.get(name, EXACT))
    cut_and_resume(name, size, size, "--backend", backend)
    assert_close(weights("many"), weights("one"))
    if check is not shadow:
        check()


def test_statistics_from_the_full_loader_equal_those_of_the_shared_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = (
        "update_statistics(session, session.loader(train_set, train=False, batch_size=24), average)"
    )
    shorter = "update_bn(DataLoader(train_set, 24), average, session.device)"
    assert before in SCRIPTS["swa"]
    assert f"`{shorter}`" in PAGE
    text = "from torch.utils.data import DataLoader\n" + SCRIPTS["swa"].replace(before, shorter)
    # A plain loader does not convert the samples.
    text = text.replace("torch.randn(240, 4,", "torch.randn(240, 4, dtype=torch.float64,")
    text += "RESULT = average.module[1].running_var.tolist()\n"
    (one,) = start(1, "swa", "one", *SPLIT, text=text)
    for rank in start(3, "swa", "many", *SPLIT, text=text):
        assert rank["result"] == pytest.approx(one["result"], rel=1e-9)


def test_checkpoint_before_the_save_has_the_old_statistics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = (line for line in SCRIPTS["swa"].splitlines(True) if "run.save()" in line)
    start(1, "swa", "one", *SPLIT)
    start(1, "swa", "many", *SPLIT, text=SCRIPTS["swa"].replace(line, ""))
    saved, old = (state_of(directory)["model"][1] for directory in ("one", "many"))
    assert_close(old["module.0.weight"], saved["module.0.weight"])
    assert old["module.1.running_mean"].dist(saved["module.1.running_mean"]) > 1e-3


def test_dict_of_divided_weights_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="only a part") as caught:
        start(2, "shadow", "run", *SPLIT, "--backend", "fsdp")
    assert caught.value.code == "HT706"


def test_finished_folds_print_the_same_results_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = SCRIPTS["folds"].replace("for k, lr in", "RESULT = []\nfor k, lr in")
    text = text.replace(
        "        session.print(", "        RESULT.append(total)\n        session.print("
    )
    (first, *_), (again, *_) = (
        start(2, "folds", "run", *SPLIT, *more, text=text) for more in ((), ("--resume",))
    )
    assert len(first["result"]) == 6
    assert again["result"] == first["result"]


def test_generators_of_the_script_are_equal_or_differ_and_continue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = start(2, "noise", "one", *SPLIT)
    assert torch.equal(whole[0]["common"], whole[1]["common"])
    assert torch.equal(whole[0]["of_step"], whole[1]["of_step"])
    assert not torch.equal(whole[0]["own"], whole[1]["own"])
    resumed = cut_and_resume("noise", 2, 2)
    for rank, before in zip(resumed, whole, strict=True):
        for name in ("common", "own", "of_step"):
            assert torch.equal(rank[name], before[name]), name


def test_adapter_of_the_page_loads_into_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = 'session.load_weights(model, "adapter.pt", skip=["*.linear.*"])'
    assert f"`{call}`" in PAGE
    start(1, "lora", "one", *EXACT)
    Path("one/adapter.pt").rename("adapter.pt")
    run = "    with session.run() as run:"
    text = (
        SCRIPTS["lora"].replace(run, f"    {call}\n{run}").replace("run.epochs(3)", "run.epochs(0)")
    )
    start(2, "lora", "many", *SPLIT, text=text)
    assert_close(torch.load("many/adapter.pt"), torch.load("adapter.pt"))
