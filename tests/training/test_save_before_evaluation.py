"""A long evaluation behind the batches of an epoch: the epoch is saved before it."""

import json
import sys
from pathlib import Path

import launches
import pytest

# Rank 0 dies in the evaluation of an epoch as soon as the epoch is saved, or if it never is.
SCRIPT = """
import os, sys, time, torch, hpctrain
from hpctrain.training import agreement

if "LONG" in os.environ:
    agreement._LONG_PAUSE = float(os.environ["LONG"])
dies = int(os.environ.get("DIES", -1))
args = hpctrain.options().parse_args()

class History:
    def __init__(self):
        self.values = []
    def state_dict(self):
        return {"values": list(self.values)}
    def load_state_dict(self, state):
        self.values = list(state["values"])

with hpctrain.Session(
    args, epochs=3, deterministic=True, global_batch=6, batch_size=6 // 3, checkpoint_minutes=60
) as session:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    loader = session.loader(data)
    evaluation = session.loader(data, train=False)
    history, trained = History(), 0
    with session.run(state={"history": history}) as run:
        for epoch in run.epochs():
            for x in run.batches(loader):
                session.step((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
                trained += 1
            scheduler.step()
            if epoch == dies and session.is_main:
                saved = run.directory.path / f"checkpoints/step-{run.step:08}/manifest.json"
                end = time.monotonic() + float(os.environ.get("WAIT", 60))
                while not saved.exists() and time.monotonic() < end:
                    time.sleep(0.01)
                os._exit(9)
            if "LONG" in os.environ:
                time.sleep(2 * agreement._LONG_PAUSE)
            total = sum(session.sum(model(x).sum()) for x in evaluation)
            history.values.append(total)
            run.log(total=total)
    weights = model[0].weight.tolist()
    session.print("RESULT", [trained, scheduler.get_last_lr(), history.values, weights])
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that trains on a number of ranks, and returns what the script printed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def begin(ranks, *words, **more):
        launcher = [launches.BIN / "hpctrain", "run", "--nproc-per-node", str(ranks)]
        command = [*map(str, launcher), str(script)] if ranks > 1 else [sys.executable, str(script)]
        done = launches.start([*command, *words], tmp_path, **more)
        results = [line.partition("RESULT ")[2] for line in done.stdout.splitlines()]
        return done, next((json.loads(each) for each in results if each), None)

    return begin


@pytest.mark.parametrize("ranks", [1, 3])
def test_first_evaluation_that_is_killed_does_not_cost_its_epoch(start, ranks):
    done, expected = start(ranks, "--run-dir", "undisturbed")
    assert done.returncode == 0, done.stderr
    done, _ = start(ranks, "--run-dir", "run", DIES="0")
    assert done.returncode
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000004"]
    done, resumed = start(ranks, "--run-dir", "run", "--resume")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 4, in epoch 1" in done.stderr
    assert resumed[0] == expected[0] - 4 * expected[0] // 12
    assert resumed[1:] == expected[1:]
    for run in ("undisturbed", "run"):
        rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "total" in row] == [4, 8, 12]


@pytest.mark.parametrize("long", [True, False])
def test_later_epoch_is_saved_before_its_evaluation_if_one_took_long(start, long):
    start(1, "--run-dir", "run", DIES="1", **({"LONG": "0.1"} if long else {"WAIT": "1"}))
    steps = {path.name for path in Path("run/checkpoints").iterdir()}
    assert ("step-00000008" in steps) == long
