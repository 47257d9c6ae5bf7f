"""The state of a launch on the hosts of a job, without sockets, clocks and processes."""

import os

import pytest
from job_world import World

from hpctrain.launch.end import End
from hpctrain.launch.job_state import (
    SECONDS_OF_PROGRESS,
    Facts,
    Finish,
    JobState,
    Reviewed,
    StartAgents,
)
from hpctrain.launch.plan import Plan

FIRST = int(os.environ.get("FIRST_SEED", "0"))


def check(seeds, state_class=JobState):
    """Run the schedules of some seeds; return how many launches ended with each exit code."""
    codes = {}
    for seed in seeds:
        world = World(seed, state_class)
        try:
            end = world.run()
        except AssertionError as error:
            lines = "\n".join(map(str, world.trace[-60:]))
            raise AssertionError(f"seed {seed}: {error}\n{lines}") from error
        codes[end.code] = codes.get(end.code, 0) + 1
    return codes


def test_no_schedule_of_faults_hangs_loses_a_result_or_blames_a_healthy_host():
    codes = check(range(FIRST, FIRST + 10_000))
    assert codes[0] > 5000
    assert {75, 76} < codes.keys()


def begun(plain=False, resumes=False):
    """Return the state of a launch on two hosts whose first attempt has begun."""
    plan, hosts = Plan(["train"], "/folder", plain=plain), ["node1", "node2"]
    state = JobState(plan, dict.fromkeys(hosts, 1), hosts, resumes=resumes)
    state.begin(0.0)
    for host in ("node1", "node2"):
        state.connected(host, Facts("10.0.0.1", ports=(1, 2)), 1.0)
    return state


def test_step_that_ends_late_does_not_stop_the_agents_of_the_next_one():
    """Slurm ends the agents of a cancelled step, and srun seconds later."""
    state = begun()
    for host in ("node1", "node2"):
        state.gone(host, 2.0)
    state.take()
    state.reviewed(Reviewed(progress=True, returned=["node1", "node2"]), 3.0)
    assert state.take()[-1] == StartAgents(["node1", "node2"], 1)
    state.step_ended(0, 137, 4.0)
    assert state.phase == "gather"
    for host in ("node1", "node2"):
        state.connected(host, Facts("10.0.0.1", ports=(3, 4)), 5.0)
    assert (state.phase, state.attempt) == ("run", 1)


def test_late_messages_of_an_old_attempt_change_nothing():
    """A connection keeps the order of its messages; this rule does not rely on it."""
    state = begun()
    for host in ("node1", "node2"):
        state.ended(host, 0, End(137, 1, opened=True), (3, 4), 2.0)
    state.reviewed(Reviewed(progress=True), 3.0)
    assert (state.phase, state.attempt) == ("run", 1)
    state.take()
    state.failing("node1", 0, 4.0)
    state.ended("node1", 0, End(1, 1), (5, 6), 4.0)
    assert state.take() == []
    assert state.deadline is None
    for host in ("node1", "node2"):
        state.ended(host, 1, End(0, 1, opened=True), (7, 8), 5.0)
    assert state.phase == "review"


def attempts(state, code, seconds=1.0, **found):
    """Return how many attempts end with this code, up to ten, and the exit code of the launch."""
    now = 1.0
    for number in range(10):
        now += seconds
        for host in ("node1", "node2"):
            state.ended(host, number, End(code, 2, rank=0), (3, 4), now)
        state.take()
        state.reviewed(Reviewed(**found), now)
        for action in state.take():
            if isinstance(action, Finish):
                return number + 1, action.code
    return 10, None


KILLED = 137


@pytest.mark.parametrize(
    ("options", "code", "found", "expected"),
    [
        # A signal before the session says nothing of the script.
        ({}, KILLED, {"opens": True}, (3, 76)),
        ({}, KILLED, {}, (1, KILLED)),  # a program without a session does not resume
        ({}, 1, {"opens": True}, (1, 1)),
        ({"resumes": True}, 1, {"opens": True}, (3, 76)),
        ({"resumes": True}, KILLED, {}, (3, 76)),
        ({"plain": True}, 1, {}, (3, 76)),
    ],
)
def test_failure_before_the_session_ends_the_launch_unless_another_attempt_may_help(
    options, code, found, expected
):
    assert attempts(begun(**options), code, **found) == expected


def test_long_attempt_of_a_program_without_a_session_counts_as_progress():
    assert attempts(begun(plain=True), 1, SECONDS_OF_PROGRESS) == (10, None)
    assert attempts(begun(), KILLED, SECONDS_OF_PROGRESS, opens=True) == (3, 76)
