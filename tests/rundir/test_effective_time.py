"""Effective training time: each second of a run counts once, for training or for one loss."""

import json
import os
import random

import pytest

from hpctrain import rundir
from hpctrain.cluster import env_vars
from hpctrain.errors import exit_codes
from hpctrain.rundir import effective_time
from hpctrain.rundir.effective_time import EffectiveTime, Recorder, account, measure, note_attempt

BEGIN = 1.7e9
REASONS = ["detect", "stop", "start", "rendezvous", "load", "redo", "queue"]
# A start from the launcher to its first step: 2 s, 1 s, 4 s.
FIRST = [("launched", 0), ("rendezvous", 2), ("connected", 3), ("restored", 6, 0), ("training", 7)]
# Ten steps of a second, a checkpoint after five of them, and a kill.
KILLED = [*FIRST, ("saved", 12, 5), ("last step", 17, 10), ("noticed", 20), ("ended", 20.5)]


def history(*marks):
    """Return marks of (event, seconds since the first one[, step])."""
    return [
        {"time": BEGIN + seconds, "event": event} | ({"step": more[0]} if more else {})
        for event, seconds, *more in marks
    ]


def start(at, step, again=True):
    """Return the marks of a later start that takes 2 s, 1 s, 4 s."""
    found = history(*((name, at + seconds, *more) for name, seconds, *more in FIRST))
    found[0]["again"], found[3]["step"] = again, step
    return found


def lost(marks):
    """Return the wall time, the effective time, and what was lost; check that all adds up."""
    found = account(marks)
    assert list(found.lost_seconds) == REASONS
    assert min(found.lost_seconds.values()) >= 0
    both = found.effective_seconds + sum(found.lost_seconds.values())
    assert both == pytest.approx(found.wall_seconds, abs=1e-5)
    most = {name: seconds for name, seconds in found.lost_seconds.items() if seconds}
    return found.wall_seconds, found.effective_seconds, most


def test_run_without_a_failure_loses_its_start():
    marks = history(*FIRST, ("saved", 12, 5), ("done", 27))
    assert lost(marks) == (27, 20, {"start": 2, "rendezvous": 1, "load": 4})


def test_steps_after_the_checkpoint_are_lost_when_they_are_taken_again():
    reasons = {"detect": 3, "stop": 0.5, "start": 2, "rendezvous": 1, "load": 4}
    assert lost(history(*KILLED)) == (20.5, 10, reasons)
    again = [*history(*KILLED), *start(21.5, 5), *history(("done", 38.5))]
    twice = {"detect": 3, "stop": 0.5, "start": 5, "rendezvous": 2, "load": 8, "redo": 5}
    assert lost(again) == (38.5, 5 + 10, twice)


@pytest.mark.parametrize(("step", "effective"), [(0, 0), (5, 5), (7, 10)])
def test_redo_begins_at_the_checkpoint_of_the_start(step, effective):
    """Without a checkpoint all steps are taken again. Of one without a mark it is not known."""
    assert lost([*history(*KILLED), *start(21, step)[:-1]])[1] == effective


def test_second_failure_before_a_newer_checkpoint_repeats_the_steps_of_both_starts():
    second = [*start(21, 5), *history(("last step", 30, 7), ("noticed", 30), ("ended", 30))]
    _, effective, reasons = lost([*history(*KILLED), *second, *start(30, 5)])
    assert (effective, reasons["redo"]) == (5, 5 + 2)


def test_time_between_a_stop_and_the_next_start_is_queue():
    stop = [*FIRST, ("saved", 17, 10), ("stopped", 18), ("ended", 19)]
    _, effective, reasons = lost([*history(*stop), *start(619, 10, again=False)])
    assert (effective, reasons["queue"], reasons["stop"]) == (11, 600, 1)
    assert "redo" not in reasons


def test_job_that_was_killed_with_all_its_processes_waits_in_the_queue():
    marks = [*history(*KILLED[:-2]), *start(617, 5, again=False)]
    reasons = lost(marks)[2]
    assert (reasons["queue"], reasons.get("detect"), reasons.get("stop")) == (600, None, None)


def test_time_after_a_run_was_done_does_not_count():
    marks = history(*FIRST, ("saved", 17, 10), ("done", 19), ("ended", 20), ("noticed", 20))
    wall, effective, reasons = lost([*marks, *start(10_000, 10, again=False)])
    assert (wall, effective) == (19 + 7, 12)
    assert reasons.keys() == {"start", "rendezvous", "load"}


def simulated(chance):
    """Return the marks of a random run, and what became of each second, counted step by step."""
    now, marks, steps = BEGIN, [], []  # steps: number and seconds of those that count
    truth = dict.fromkeys([*REASONS, "effective"], 0.0)

    def passes(reason):
        nonlocal now
        seconds = chance.randrange(40) / 8
        now, truth[reason] = now + seconds, truth[reason] + seconds
        return seconds

    def mark(event, **more):
        marks.append({"time": now, "event": event, **more})

    saved, again = [0], False
    for left in reversed(range(chance.randrange(1, 6))):
        mark("launched", again=again)
        passes("start")
        mark("rendezvous")
        passes("rendezvous")
        mark("connected")
        passes("load")
        first = chance.choice(saved[-2:])
        mark("restored", step=first)
        while steps and steps[-1][0] > first:
            seconds = steps.pop()[1]
            truth["redo"] += seconds
            truth["effective"] -= seconds
        saved = [step for step in saved if step <= first]
        passes("load")
        mark("training")
        for step in range(first + 1, first + chance.randrange(1, 9)):
            steps.append((step, passes("effective")))
            if chance.random() < 0.3:
                mark("saved", step=step)
                saved.append(step)
        if not left:
            mark("done")
            break
        mark("last step", step=9)
        passes("detect")
        mark("noticed")
        passes("stop")
        again = chance.random() < 0.6
        if chance.random() < 0.5:
            mark("ended")
            passes("start" if again else "queue")
        elif not again:  # an end without the launcher's mark
            truth["queue"] += marks[-1]["time"] and now - marks[-1]["time"]
            truth["stop"] -= now - marks[-1]["time"]
    return marks, truth


def test_random_histories_add_up_to_the_wall_time():
    chance = random.Random(1)
    for _ in range(300):
        marks, truth = simulated(chance)
        wall, effective, reasons = lost(marks)
        assert wall == marks[-1]["time"] - BEGIN
        assert {**dict.fromkeys(REASONS, 0.0), **reasons, "effective": effective} == truth


def test_clock_that_jumps_back_never_takes_time():
    chance = random.Random(2)
    for _ in range(300):
        marks, _ = simulated(chance)
        wall = lost(marks)[0]
        place, jump = chance.randrange(len(marks)), chance.randrange(1, 200)
        later = [{**mark, "time": mark["time"] - jump} for mark in marks[place:]]
        found = lost([*marks[:place], *later])[0]
        assert max(0, wall - jump) <= found <= wall or place == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"event": "done"},
        {"time": "now", "event": "done"},
        {"time": float("nan"), "event": "done"},
        {"time": 1e300, "event": "done"},
        {"time": 10**400, "event": "done"},
        {"time": BEGIN + 13, "event": ["done"]},
        {"time": BEGIN + 13, "event": "saved", "step": [5]},
        {"time": BEGIN + 13, "event": "of a later version"},
        {},
    ],
)
def test_mark_that_is_damaged_or_unknown_changes_nothing(damage):
    marks = history(*KILLED)
    assert lost([*marks[:-3], damage, *marks[-3:]]) == lost(marks)
    assert account([damage]) is None


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "_left", 0.0)  # this process has had no other run
    return rundir.RunDirectory(tmp_path)


def events(directory):
    return [line["event"] for line in directory.lines(directory.events)]


def write(directory, marks):
    directory.events.write_text("".join(json.dumps(mark) + "\n" for mark in marks))


def test_run_of_an_older_version_has_no_time(directory):
    assert measure(directory) is None
    directory.last_step.write_text('{"time": 1.0, "event": "last step", "step": 3}')
    assert measure(directory) is None
    note_attempt(directory, BEGIN, BEGIN + 1)
    assert not directory.events.exists()


def test_line_that_was_cut_by_a_kill_is_left_out(directory):
    write(directory, history(*FIRST))
    with directory.events.open("a") as file:
        file.write('{"time": 17000')
    assert measure(directory) == account(history(*FIRST))
    note_attempt(directory, BEGIN, BEGIN + 9)
    assert events(directory)[-2:] == ["noticed", "ended"]


def recorder(directory, env=None, again=False, step=0):
    return Recorder(directory, env or {}, (BEGIN + 2, BEGIN + 3), again, step)


def test_last_step_is_known_while_the_run_trains_and_after_a_kill(directory):
    write(directory, history(*FIRST))
    directory.last_step.write_text(json.dumps(*history(("last step", 14, 7))).ljust(80))
    assert measure(directory).effective_seconds == 7
    note_attempt(directory, BEGIN, BEGIN + 15)
    assert events(directory)[-3:] == ["last step", "noticed", "ended"]
    assert lost(directory.lines(directory.events))[2]["detect"] == 1
    assert not directory.last_step.exists()


def test_next_start_takes_up_the_last_step_of_a_start_that_was_killed(directory):
    first = recorder(directory)
    first.trained(0.0)
    first.step(123456, 10**8, 1e6)
    first.step(7, 10, 1.5)
    first.close()
    recorder(directory, again=True, step=5).close()
    start = ["launched", "rendezvous", "connected", "restored"]
    assert events(directory) == [*start, "training", "last step", *start]
    marks = directory.lines(directory.events)
    assert (marks[5]["step"], marks[9]["step"]) == (7, 5)
    assert [marks[0]["again"], marks[6]["again"]] == [False, True]


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (exit_codes.DONE, ["done"]),
        (exit_codes.STOPPED, ["stopped"]),
        (exit_codes.FAILED, ["last step", "noticed"]),
    ],
)
def test_end_of_a_start(directory, code, left):
    one = recorder(directory)
    one.step(3, None, None)
    one.leave(code, BEGIN + 9)
    one.close()
    assert events(directory)[4:] == left
    assert not directory.last_step.exists()


def test_start_of_a_job_counts_from_hpctrain_run_on(directory):
    recorder(directory, {env_vars.LAUNCHED: str(BEGIN - 3.5)}).close()
    assert directory.lines(directory.events)[0]["time"] == BEGIN - 3.5


def test_process_start_counts_only_once(directory, tmp_path, monkeypatch):
    """A second run of a process does not begin with the imports, or with the first run."""
    monkeypatch.setattr(effective_time, "_process_start", lambda: BEGIN)
    recorder(directory).close()
    other = rundir.RunDirectory(tmp_path / "other")
    other.path.mkdir()
    recorder(other).close()
    first, second = (one.lines(one.events)[0]["time"] for one in (directory, other))
    assert first == BEGIN
    assert second > BEGIN + 3600


def test_process_start_is_that_of_the_kernel():
    age = effective_time.system.age(os.getpid())
    assert 0 < age < 24 * 3600
    child = os.fork()
    if not child:
        os._exit(int(100 * effective_time.system.age(os.getpid())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 100  # not that of its parent


def test_attempt_that_failed_before_its_run_begins_when_hpctrain_run_did(directory):
    """Rank 0 has noted nothing of the first attempt of a requeued job."""
    stopped = history(*FIRST, ("saved", 17, 10), ("stopped", 17), ("ended", 18))
    write(directory, stopped)
    note_attempt(directory, BEGIN + 318, BEGIN + 325)
    marks = directory.lines(directory.events)
    assert [mark["event"] for mark in marks[len(stopped) :]] == ["launched", "noticed", "ended"]
    reasons = lost(marks)[2]
    assert (reasons["queue"], reasons["start"]) == (300, 2 + 7)
    note_attempt(directory, BEGIN + 318, None)  # the second attempt
    assert events(directory)[len(stopped) + 3 :] == ["ended"]


def test_text_has_the_share_and_the_losses_in_order():
    reasons = {**dict.fromkeys(REASONS, 0.0), "load": 4.21, "start": 20.5, "stop": 0.04}
    found = EffectiveTime(412.4, 387.65, reasons)
    text = "effective training time 0.94 of 412 s; lost: start 20.5 s, load 4.2 s"
    assert str(found) == text
    assert str(EffectiveTime(0.0, 0.0, {})) == "effective training time 0.00 of 0 s"
    fields = found.as_json()
    assert (fields["wall_seconds"], fields["effective_share"]) == (412.4, 0.94)
    assert fields["lost_seconds"]["load"] == 4.21
