"""Rows of metrics in TensorBoard, Weights & Biases and MLflow; and trackers that fail."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.monitoring import profiler, trackers
from hpctrain.monitoring.trackers import About, Tracker, Tracking, find
from hpctrain.rundir import RunDirectory

ROWS = [
    {"step": 1, "epoch": 0, "time": 100.0, "loss": 2.5, "lr": 0.1},
    {"step": 2, "epoch": 0, "time": 101.0, "loss": 2.25, "lr": 0.1},
    {"step": 2, "epoch": 0, "time": 102.0, "top1": 0.5},
]
# The rows after a resume at the checkpoint of step 1.
AGAIN = [{"step": 2, "epoch": 0, "time": 201.0, "loss": 2.0, "lr": 0.1}]


def make_about(step=0):
    directory = RunDirectory("run")
    directory.path.mkdir(exist_ok=True)
    return About(
        "train", directory, {"lr": 0.1, "precision": "bf16", "weights": Path("a.pt")}, step
    )


def track(names, rows, step=0, status="done", timeout=1800.0):
    tracking = Tracking(find(names), make_about(step))
    for row in rows:
        tracking.row(row)
    tracking.close(status, timeout)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, []),
        ("tensorboard", ["tensorboard"]),
        ("wandb, mlflow,wandb", ["wandb", "mlflow"]),
    ],
)
def test_track_option_takes_a_comma_separated_list(text, names):
    assert list(find(text)) == names


@pytest.mark.parametrize(
    ("text", "near"), [("tensorbord", "tensorboard"), ("wandb,mlflo", "mlflow"), (",", "")]
)
def test_unknown_tracker_is_refused_with_a_suggestion(text, near):
    with pytest.raises(UsageError) as refused:
        find(text)
    assert refused.value.code == "HT652"
    assert refused.value.fixes == (f"--track {near or 'tensorboard'}",)


def test_tracker_package_missing_is_refused(monkeypatch):
    # Only a folder that W&B made.
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: Folder)
    with pytest.raises(UsageError, match="not installed") as refused:
        find("wandb")
    assert refused.value.code == "HT651"
    assert refused.value.fixes == ("pip install 'hpctrain[wandb]'",)


OURS = """
from hpctrain.monitoring.trackers import Tracker

class Ours(Tracker):
    def __init__(self, about):
        self.about = about
    def open(self):
        self.lines = []
    def log(self, step, seconds, values):
        self.lines.append(f"{step} {values['loss']}")
    def close(self, status):
        (self.about.directory.path / "ours.txt").write_text(" ".join([*self.lines, status]))
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with an entry point for trackers, as pip does."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)

    def install(entry, source=OURS, package="ours"):
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hpctrain.trackers]\n{entry}\n")
        (site / f"{package}.py").write_text(source)

    yield install
    for name in ("ours", "others"):
        sys.modules.pop(name, None)


def test_tracker_of_another_package(install):
    install("mine = ours:Ours")
    track("mine", ROWS[:2])
    assert Path("run/ours.txt").read_text() == "1 2.5 2 2.25 done"
    assert "mine" not in trackers.TRACKERS


@pytest.mark.parametrize(
    ("entry", "source", "asked", "problem"),
    [
        ("wandb = ours:Ours", OURS, "wandb", "the name wandb is taken"),
        ("mine = ours:Ours", "import no_such_package", "mine", "its import fails: ModuleNotFound"),
        ("mine = ours:Ours", "1 / 0", "mine", "its import fails: ZeroDivisionError"),
        ("mine = ours:Theirs", OURS, "mine", "its import fails: AttributeError"),
        (
            "mine = ours:Ours",
            "Ours = dict",
            "mine",
            "is not a subclass of hpctrain's Tracker",
        ),
    ],
    ids=["clash", "missing package", "error at import", "no such class", "another class"],
)
def test_tracker_of_another_package_that_cannot_be_used(install, entry, source, asked, problem):
    install(entry, source)
    with pytest.raises(UsageError, match=problem) as refused:
        find(asked)
    assert refused.value.code == "HT119"
    assert f"ours adds {entry} to hpctrain.trackers" in refused.value.found
    assert refused.value.fixes[-1] == "pip uninstall ours"


def test_tracker_of_two_packages_is_refused(install):
    install("mine = ours:Ours")
    install("mine = others:Ours", package="others")
    with pytest.raises(UsageError, match="the name mine is taken") as refused:
        find("mine")
    assert refused.value.code == "HT119"


def test_package_of_a_tracker_is_not_imported_for_another_one(install):
    install("mine = ours:Ours\nwandb = ours:Ours", "1 / 0")
    assert list(find("tensorboard")) == ["tensorboard"]
    with pytest.raises(UsageError, match=r"mlflow, mine and wandb,") as refused:
        find("min")
    assert refused.value.fixes == ("--track mine",)


class Folder:
    """A stand-in for the spec that importlib returns for a folder that is not a package."""

    origin = None


class FakeTracker(Tracker):
    """A tracker that fails or hangs where the test sets it."""

    package = "json"
    fails = hangs = ""
    wakes: threading.Event

    def __init__(self, about):
        self.rows, FakeTracker.last = [], self
        self.fail_or_hang("init")

    def fail_or_hang(self, place):
        if place == self.fails:
            raise OSError(f"no network at {place}\nand more")
        if place == self.hangs:
            self.wakes.wait(60)

    def open(self):
        self.fail_or_hang("open")

    def log(self, step, seconds, values):
        self.fail_or_hang("log")
        self.rows.append((step, seconds, dict(values)))

    def close(self, status):
        self.fail_or_hang("close")
        self.rows.append(status)

    def abandon(self):
        self.fail_or_hang("abandon")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "fake", FakeTracker)
    monkeypatch.setitem(trackers.TRACKERS, "other", FakeTracker)
    for name in ("fails", "hangs"):
        monkeypatch.setattr(FakeTracker, name, "")
    FakeTracker.wakes = threading.Event()
    yield FakeTracker
    FakeTracker.wakes.set()


def test_tracker_gets_each_row_and_the_status(fake):
    track("fake", ROWS, status="stopped")
    assert fake.last.rows == [
        (1, 100.0, {"epoch": 0, "loss": 2.5, "lr": 0.1}),
        (2, 101.0, {"epoch": 0, "loss": 2.25, "lr": 0.1}),
        (2, 102.0, {"epoch": 0, "top1": 0.5}),
        "stopped",
    ]
    assert "time" in ROWS[0]


@pytest.mark.parametrize("place", ["init", "open", "log", "close"])
def test_tracker_failure_is_logged_once_and_training_continues(fake, monkeypatch, caplog, place):
    monkeypatch.setattr(fake, "fails", place)
    track("fake", ROWS * 3)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("--track fake gets no rows from here on")
    assert message.endswith(f"no network at {place}")


@pytest.mark.parametrize("place", ["open", "log", "close"])
def test_hanging_trackers_share_one_short_timeout(fake, monkeypatch, caplog, place):
    monkeypatch.setattr(fake, "hangs", place)
    before = time.monotonic()
    track("fake,other", ROWS, timeout=2.0)
    # Half a second for both instead of thirty: the other ranks soon give up waiting for this one.
    assert time.monotonic() - before < 25
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("--track fake,other has not taken all rows within")


def test_hanging_tracker_that_cannot_be_abandoned_is_logged(fake, monkeypatch, caplog):
    monkeypatch.setattr(fake, "hangs", "log")
    monkeypatch.setattr(fake, "fails", "abandon")
    track("fake,other", ROWS, timeout=0.4)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("--track fake,other has not taken all rows within")
    assert messages[1:] == [
        f"--track {name} may block the exit of this process: no network at abandon"
        for name in ("fake", "other")
    ]


@pytest.mark.slow
def test_wandb_abandon_while_threads_come_and_go(monkeypatch):
    import wandb  # noqa: F401, which forks nothing before a run begins

    tracker = trackers.TRACKERS["wandb"](make_about())
    over = threading.Event()

    def start_and_end_threads():
        while not over.is_set():
            threads = [threading.Thread(target=time.sleep, args=(1e-3,)) for _ in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    busy = threading.Thread(target=start_and_end_threads)
    busy.start()
    try:
        for _ in range(500):
            monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
            tracker.abandon()
    finally:
        over.set()
        busy.join()


def test_slow_tracker_drops_rows_with_one_warning(fake, monkeypatch, caplog):
    monkeypatch.setattr(trackers.tracking, "_MOST_ROWS", 2)
    monkeypatch.setattr(fake, "hangs", "open")
    tracking = Tracking(find("fake"), make_about())
    for row in ROWS * 3:
        tracking.row(row)
    fake.wakes.set()
    tracking.close("done", 1800.0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("--track fake loses rows from here on, because 2 rows wait")
    assert [row[0] for row in fake.last.rows[:-1]] == [1, 2]
    assert fake.last.rows[-1] == "done"


def test_tensorboard_rows_after_resume():
    track("tensorboard", ROWS)
    track("tensorboard", AGAIN, step=1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5), (2, 2.0)]
    assert events.Scalars("loss")[0].wall_time == 100.0
    (first, *_) = events.Tensors("options/text_summary")
    assert b"| precision | bf16 |" in first.tensor_proto.string_val[0]


@pytest.mark.slow
def test_wandb_resumes_the_same_run(monkeypatch, tmp_path):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    folders = []
    for rows, step in ((ROWS, 0), (AGAIN, 1)):
        try:
            track("wandb", rows, step)
        finally:
            wandb.teardown()  # the offline files are written then
        name = json.loads(RunDirectory("run").tracked.read_text())["wandb"]
        (new,) = set(RunDirectory("run").path.glob("wandb/offline-run-*")) - set(folders)
        folders.append(new)
        written = (new / f"run-{name}.wandb").read_bytes()
        assert written.count(b"loss") >= len([row for row in rows if "loss" in row])
        assert b"bf16" in written
    assert b"top1" in (folders[0] / f"run-{name}.wandb").read_bytes()


@pytest.mark.slow
def test_mlflow_resumes_the_same_run(monkeypatch, tmp_path):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    track("mlflow", ROWS, status="stopped")
    name = json.loads(RunDirectory("run").tracked.read_text())["mlflow"]
    assert MlflowClient().get_run(name).info.status == "KILLED"
    track("mlflow", AGAIN, step=1)
    run = MlflowClient().get_run(name)
    assert run.info.status == "FINISHED"
    assert run.data.params["precision"] == "bf16"
    assert run.data.metrics["top1"] == 0.5
    history = MlflowClient().get_metric_history(name, "loss")
    assert sorted((m.step, m.value) for m in history) == [(1, 2.5), (2, 2.0), (2, 2.25)]
    assert len(MlflowClient().search_runs([run.info.experiment_id])) == 1


@pytest.mark.parametrize(
    "text", ["5", "5:5", "9:3", "a:b", ":3", "-1:3", "1:2:3", "", "1:" + "9" * 5000]
)
def test_profile_option_is_a_range_of_steps(text):
    assert profiler.steps("3:5") == range(3, 5)
    with pytest.raises(UsageError) as refused:
        profiler.steps(text)
    assert refused.value.code == "HT653"
    assert "--profile 20:25" in refused.value.fixes[0]


MUTE = """
import os, pathlib, socket, time
server = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
url = f"http://127.0.0.1:{server.getsockname()[1]}"
os.environ |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "WANDB_SILENT": "true"}
from hpctrain.rundir import RunDirectory
from hpctrain.monitoring.trackers import About, Tracking, find
pathlib.Path("run").mkdir()
tracking = Tracking(find("wandb"), About("mute", RunDirectory("run"), {}, 0))
tracking.row({"step": 1, "epoch": 0, "time": 0.0, "loss": 1.0})
while not [c for c in pathlib.Path("/proc/self/task").glob("*/children") if c.read_text()]:
    time.sleep(0.02)
tracking.close("done", 4.0)
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_wandb_server_that_never_answers_never_blocks_exit():
    command = [sys.executable, "-c", MUTE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--track wandb has not taken all rows" in done.stderr
    assert "Traceback" not in done.stderr
