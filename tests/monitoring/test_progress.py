"""Progress of a run: log lines, and a bar on a terminal."""

import errno
import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from hpctrain.monitoring import progress
from hpctrain.monitoring.progress import Course, Lines, formatted_values, open_progress
from hpctrain.process import logging

ROW = {
    "step": 20,
    "epoch": 0,
    "time": 1.0,
    "loss": 2.30259,
    "lr": 0.1,
    "samples_per_second": 2790.6,
    "data_wait": 0.031,
    "gpu_memory": 12_345_678_901,
}


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def course(max_steps=None, epochs=3, length=50, step=0, epoch_step=0, epoch=0):
    course = Course(max_steps)
    course.begin(step, epoch, epoch_step, epochs, length)
    return course


def test_progress_number_format(clock):
    words = ["loss 2.3026", "lr 0.1", "2,791 samples/s", "data wait 3 %", "12.3 GB"]
    assert formatted_values(ROW, course()) == words


@pytest.mark.parametrize(
    ("course", "end"),
    [
        (course(), 150),
        (course(max_steps=70), 70),
        (course(max_steps=700), 150),
        (course(step=60, epoch=1, epoch_step=10), 150),
        (course(epochs=None), None),
        (course(length=None), None),
        (course(max_steps=70, length=None), 70),
    ],
)
def test_progress_total_from_epochs_and_max_steps(course, end):
    assert course.end == end


def test_progress_remaining_time(clock):
    run = course()
    assert run.seconds_left(10) is None
    clock[0] += 100
    assert run.seconds_left(30) == pytest.approx(120 * 5)
    clock[0] += 3600
    assert formatted_values({**ROW, "step": 30}, run)[-1] == "to the end 6:10:00"
    assert run.seconds_left(150) == 0
    assert course(epochs=None).seconds_left(30) is None


def test_progress_lines_come_once_a_second(clock, caplog):
    caplog.set_level("INFO", logger="hpctrain")
    lines = Lines(course())
    for _ in range(10):
        lines.row(ROW, True)
        clock[0] += 0.3
    lines.row({"step": 50, "epoch": 0, "time": 1.0, "top1": 0.75}, False)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("epoch 1/3  step 20/150  loss 2.3026  lr 0.1")
    assert texts[-1] == "epoch 1/3  step 50/150  top1 0.75"
    assert len(texts) == 4
    lines.row({"step": 150, "epoch": 3, "time": 2.0, "top1": 0.8}, False)  # behind the loop
    assert caplog.records[-1].getMessage() == "epoch 3/3  step 150/150  top1 0.8"


def test_long_evaluation_has_a_line_after_ten_seconds_and_each_half_minute(clock, caplog):
    caplog.set_level("INFO", logger="hpctrain")
    lines = Lines(course())
    for _ in range(2):
        for number in range(9):
            lines.evaluates(number, 9)
            clock[0] += 6
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["evaluation, batch 2 of 9", "evaluation, batch 7 of 9"] * 2


@pytest.mark.parametrize(("term", "terminal"), [("xterm", False), ("dumb", True)])
def test_progress_without_a_terminal_is_lines(monkeypatch, term, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    assert type(open_progress(course())) is Lines


def test_progress_without_rich_is_lines(monkeypatch, caplog):
    caplog.set_level("INFO", logger="hpctrain")
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert type(open_progress(course())) is Lines
    assert "pip install rich" in caplog.text


class Terminal(io.StringIO):
    """A terminal that the test can close."""

    closed = False

    def isatty(self):
        return True

    def write(self, text):
        if self.closed:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize(
    "draw",
    [
        lambda bar: bar.step(2),
        lambda bar: bar.evaluates(0, 5),
        lambda bar: bar.end_epoch(2),
        lambda bar: bar.close(),
    ],
    ids=["step", "evaluation", "epoch", "close"],
)
def test_progress_bar_on_a_lost_terminal(monkeypatch, caplog, draw):
    caplog.set_level("INFO", logger="hpctrain")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_FRAMES", 0.0)
    bar = open_progress(course())
    bar.step(1)
    assert sys.stderr is not terminal
    terminal.closed = True
    draw(bar)
    assert sys.stderr is terminal
    assert sys.stdout is terminal
    assert "the progress bar ends" in caplog.text
    for step in range(3, 6):  # the bar is not drawn again
        bar.step(step)
        bar.evaluates(0, 5)
        bar.end_epoch(step)
    bar.row(ROW, True)
    assert caplog.records[-1].getMessage().startswith("epoch 1/3  step 20/150  loss 2.3026")
    assert caplog.records[-1].screen
    bar.close()
    assert caplog.text.count("the progress bar ends") == 1


def test_progress_bar_has_loss_rate_and_speed_in_80_columns(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_FRAMES", 0.0)
    bar = open_progress(course(epochs=90, length=5004, epoch=11))
    bar.row({**ROW, "step": 1234, "samples_per_second": 12790.6}, True)
    bar.step(1234)
    bar.close()
    lines = lines_of(terminal.getvalue())
    (frame,) = {line for line in lines if "loss" in line}
    assert frame.startswith("epoch 12/90 ")
    assert "1,234/5,004 loss 2.3026  lr 0.1  12,791 samples/s" in frame
    assert max(map(len, lines)) <= 80


# Without torch, so that it starts quickly: an epoch of five steps, an evaluation, and an end.
SCRIPT = """
import os, sys
from hpctrain.monitoring import progress
from hpctrain.process import logging
progress._SECONDS_BETWEEN_FRAMES = 0.0
logging.setup_logging(0)
course = progress.Course(None)
bar = progress.open_progress(course)
assert type(bar) is progress.Bar
try:
    course.begin(0, 0, 0, 2, 5)
    for step in range(1, 6):
        bar.row({"step": step, "epoch": 0, "time": 1.0, "loss": step / 4, "data_wait": 0.5}, True)
        bar.step(step)
        if step == 3:
            logging.logger.warning("a word in between, and %s", "more " * 40)
            print("and one of the script's")
            if sys.argv[1] == "dies":
                os._exit(3)
            if sys.argv[1] == "interrupted":
                raise KeyboardInterrupt
    bar.end_epoch(5)
    bar.evaluates(0, 5)
    bar.row({"step": 5, "epoch": 0, "time": 1.0, "top1": 0.5}, False)
finally:
    bar.close()
    sys.stderr.write("after it\\n")
"""


def run_on_terminal(how):
    """Run the script on a terminal of 100 columns; return its text and exit code."""
    screen, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    env.pop("NO_COLOR", None)
    output = []

    def read():
        try:
            while data := os.read(screen, 4096):
                output.append(data)
        except OSError:  # the end of the terminal on Linux
            return

    process = subprocess.Popen([sys.executable, "-c", SCRIPT, how],
                               stdout=terminal, stderr=terminal,
                               stdin=terminal, env=env)  # fmt: skip
    os.close(terminal)
    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(60)
    reader.join(10)
    os.close(screen)
    return b"".join(output).decode(), code


def lines_of(text):
    """Return the lines of a text, without colours and cursor control."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain)]


def test_progress_bar_shows_epoch_below_log_lines():
    text, code = run_on_terminal("ends")
    assert code == 0
    lines = lines_of(text)
    frames = [line for line in lines if line.startswith("epoch 1/2 ") and "loss" in line]
    assert "1/5 loss 0.25  data wait 50 %" in frames[0]
    assert "5/5 loss 1.25  data wait 50 %" in frames[-1]
    assert any("evaluation, batch 1" in line for line in lines)
    # Log lines are complete, each on its own line; rows of training are only in the bar.
    assert "hpctrain: a word in between, and " + ("more " * 40).rstrip() in lines
    assert "and one of the script's" in lines
    assert "hpctrain: epoch 1/2  step 5/10  top1 0.5" in lines
    assert not any(line.startswith("hpctrain: epoch") and "loss" in line for line in lines)
    assert lines[-2:] == ["after it", ""]


@pytest.mark.parametrize(("how", "expected"), [("dies", 3), ("interrupted", 1)])
def test_progress_bar_leaves_a_usable_terminal_after_a_kill(how, expected):
    text, code = run_on_terminal(how)
    # The exit code of an uncaught exception under -c; in a shell 130, or a signal.
    assert code in (expected, 130, -2)
    assert "\x1b[?25l" not in text  # the cursor was never hidden
    assert "\x1b[?1049h" not in text  # and the alternate screen is not used
    if how == "interrupted":
        assert "after it" in lines_of(text)


def test_log_file_that_cannot_be_made_is_told_once_and_made_later(tmp_path, capsys):
    (tmp_path / "logs").touch()
    handler = logging.add_log_file(tmp_path / "logs" / "rank-0.log")
    try:
        logging.logger.warning("one")
        assert capsys.readouterr().err.count("rank-0.log cannot be written: ") == 1
        (tmp_path / "logs").unlink()
        logging.logger.warning("two")
    finally:
        logging.remove_log_file(handler)
    assert (tmp_path / "logs" / "rank-0.log").read_text().endswith("two\n")


def test_log_with_names_that_are_not_utf8(tmp_path, capsys):
    handler = logging.add_log_file(tmp_path / "rank-0.log")
    try:
        logging.logger.warning("%s cannot be read", os.fsdecode(b"a\xff.jpg"))
    finally:
        logging.remove_log_file(handler)
    assert (tmp_path / "rank-0.log").read_text().endswith("a\\udcff.jpg cannot be read\n")
    assert "cannot be written" not in capsys.readouterr().err
