"""`hpctrain.spawn`: a function on several ranks, from a script, a thread or a notebook."""

import io
import os
import signal
import sys
import threading
from pathlib import Path

import launches
import processes
import pytest
from processes import until

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch import spawn


def test_spawn_passes_arguments_and_returns_results_by_rank():
    more = 7

    def place(base, *, factor):
        from hpctrain.cluster.launchers import detect

        world = detect()
        return world.rank, world.world_size, world.launcher, base * factor + more

    results = spawn(place, 3, args=(5,), kwargs={"factor": 2})
    assert results == [(rank, 3, "hpctrain", 17) for rank in range(3)]


def test_spawn_uses_one_rank_for_each_visible_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert spawn(lambda: os.environ["HPCTRAIN_WORLD_SIZE"]) == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert spawn(lambda: os.environ["HPCTRAIN_WORLD_SIZE"]) == ["2", "2"]


def test_spawn_output_lines_have_the_rank(capfd):
    spawn(lambda: print("here"), 3)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0: here", "1: here", "2: here"]


class Cell(io.TextIOBase):
    """Standard output as in a notebook: text without a file descriptor."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        assert isinstance(text, str)
        self.text += text
        return len(text)


def test_spawn_in_a_notebook_prints_into_the_cell(monkeypatch):
    out, err = Cell(), Cell()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    spawn(lambda: (print("ä"), print("wrong", file=sys.stderr)), 2)
    assert sorted(out.text.splitlines()) == ["0: ä", "1: ä"]
    assert {"0: wrong", "1: wrong"} < set(err.text.splitlines())


def test_spawn_works_in_another_thread():
    pids = []
    thread = threading.Thread(target=lambda: pids.extend(spawn(os.getpid, 2)))
    thread.start()
    thread.join(60)
    assert len(set(pids)) == 2


def test_spawn_files_are_private_and_removed():
    def folder_and_mode():
        folder = os.path.dirname(os.environ["HPCTRAIN_EXIT_STATUS_FILE"])
        return folder, os.stat(folder).st_mode & 0o777

    ((folder, mode),) = spawn(folder_and_mode, 1)
    assert mode == 0o700
    assert not Path(folder).exists()


def test_spawn_names_the_first_failed_rank_with_its_traceback():
    def fail():
        if os.environ["HPCTRAIN_RANK"] == "1":
            raise ValueError("the cause")

    with pytest.raises(HpctrainError) as caught:
        spawn(fail, 3)
    assert (caught.value.exit_code, caught.value.code) == (1, "HT217")
    assert caught.value.found.startswith(
        "rank 1 of 3 failed first, with exit code 1. Its last lines:\n"
    )
    assert "Traceback (most recent call last)" in caught.value.found
    assert caught.value.found.endswith("ValueError: the cause")


def test_spawn_raises_usage_error_of_a_rank():
    def raise_usage_error():
        from hpctrain.errors import UsageError

        raise UsageError.of_text("HT113", "found", "expected", "the fix")

    with pytest.raises(UsageError, match="fix:      the fix") as caught:
        spawn(raise_usage_error, 2)
    assert caught.value.code == "HT217"


def test_spawn_exit_status_file_of_rank_0_gives_the_exit_code():
    def exit_with_status():
        from hpctrain.rundir.exit_status import write_exit_status

        if os.environ["HPCTRAIN_RANK"] == "0":
            write_exit_status(os.environ["HPCTRAIN_EXIT_STATUS_FILE"], 75, "stopped at step 7")
        raise SystemExit(0)

    with pytest.raises(HpctrainError, match="stopped at step 7") as caught:
        spawn(exit_with_status, 2)
    assert (caught.value.exit_code, caught.value.code) == (75, "HT217")


@pytest.mark.parametrize(
    ("arguments", "keywords", "code", "word"),
    [
        ((4, len), {}, "HT214", "spawn(4, …)"),
        ((len, 0), {}, "HT214", "nproc=0"),
        ((len, "all"), {}, "HT214", "nproc='all'"),
        ((len, 2.0), {}, "HT214", "nproc=2.0"),
        ((len, 10_000), {}, "HT213", "10000 ranks"),
        ((len, 2, "ab"), {}, "HT214", "args=(ARGUMENT,)"),
        ((len, 2), {"args": {"a": 1}}, "HT214", "with a dict"),
        (
            (len, 2, (threading.Lock(),)),
            {},
            "HT216",
            "len and its arguments cannot be sent to the ranks",
        ),
        ((threading.Lock, 2), {}, "HT217", "the result of the function on rank"),
    ],
)
def test_spawn_refuses_wrong_arguments(arguments, keywords, code, word):
    with pytest.raises(UsageError) as caught:
        spawn(*arguments, **keywords)
    assert word in str(caught.value)
    assert caught.value.code == code


def test_spawn_inside_a_rank_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UsageError, match=r"spawn\(\) in rank 1 of 4, which env started") as caught:
        spawn(len, 2)
    assert caught.value.code == "HT215"


SCRIPT = """
import dataclasses, os, sys
import beside
from hpctrain.launch import spawn

@dataclasses.dataclass
class Point:
    x: int

def train(scale):
    import pickle
    pickle.dumps(Point(1))  # as torch.save does it
    assert "torch" not in sys.modules
    return Point(scale * beside.VALUE), sys.argv[1:], os.getcwd()

for point, argv, cwd in spawn(train, 3, args=(2,)):
    assert isinstance(point, Point)
    print(point.x, argv, cwd == os.getcwd())
assert "torch" not in sys.modules
"""


def test_spawn_needs_no_main_guard_and_finds_modules_beside_the_script(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("VALUE = 21\n")
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    done = launches.start([launches.PYTHON, "code/train.py", "--lr", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["42 ['--lr', '1'] True"] * 3


def test_spawn_at_import_of_a_module_is_refused(tmp_path):
    (tmp_path / "forever.py").write_text(
        "from hpctrain.launch import spawn\ndef train(): pass\nspawn(train, 2)\n"
    )
    done = launches.start([launches.PYTHON, "-c", "import forever"], tmp_path)
    assert done.returncode == 2
    assert "which hpctrain started" in done.stderr
    assert '__name__ == "__main__"' in done.stderr


@pytest.mark.parametrize(("error", "code"), [("ValueError(1)", 1), ("SystemExit(2)", 2)])
def test_spawn_script_exits_with_the_code_and_no_traceback_of_its_own(error, code, tmp_path):
    (tmp_path / "train.py").write_text(
        f"from hpctrain.launch import spawn\ndef train(): raise {error}\nspawn(train, 2)\n"
    )
    done = launches.start([launches.PYTHON, "train.py"], tmp_path)
    assert done.returncode == code
    assert "hpctrain: error: rank " in done.stderr
    assert done.stderr.count("\nTraceback") == 0  # those of ranks have a prefix


INTERRUPTED = """
import os, pathlib, time
from hpctrain.launch import spawn

def train():
    try:
        print("ready", flush=True)
        for _ in range(6000):
            time.sleep(0.1)  # a signal just before a sleep does not end it
    except KeyboardInterrupt:
        pathlib.Path("saved-" + os.environ["HPCTRAIN_RANK"]).touch()

try:
    spawn(train, 2)
except KeyboardInterrupt:
    print("interrupted", len(list(pathlib.Path().glob("saved-*"))), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that starts a script, which is killed if it still runs at the end."""
    with processes.background() as begin:

        def start(text, **more):
            path = tmp_path / "train.py"
            path.write_text(text)
            return begin([launches.PYTHON, path], **more)

        yield start


def test_spawn_raises_ctrl_c_when_the_ranks_have_ended(script):
    process = script(INTERRUPTED)
    assert all("ready" in process.stdout.readline() for _ in range(2))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0].strip() == "interrupted 2"


def test_spawn_kill_9_leaves_no_rank_and_no_file(script, tmp_path):
    process = script(INTERRUPTED, TMPDIR=str(tmp_path))
    assert all("ready" in process.stdout.readline() for _ in range(2))
    (folder,) = tmp_path.glob("hpctrain-*")

    assert len(processes.having(folder)) == 2 + 1  # the ranks, and the process that ends them
    process.kill()
    process.wait(timeout=60)
    until(lambda: not folder.exists() and not processes.having(folder))
