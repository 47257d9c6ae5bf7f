"""Learnt time-outs: a hang ends early if all ranks show it; slow work and suspended jobs do not."""

import os
import signal
import subprocess
from dataclasses import replace

import pytest
from processes import until

from hpctrain.monitoring.watchdog import evidence
from hpctrain.monitoring.watchdog.blame import Sighting, hung, judge
from hpctrain.monitoring.watchdog.evidence import Sample, conclusion
from hpctrain.monitoring.watchdog.limits import Limits
from hpctrain.process.phases import (
    BACKWARD,
    CLOSED,
    COMPUTING,
    EVALUATING,
    IDLE,
    LOADING,
    SAVING,
    UPDATING,
    WAITING,
)


def test_limit_is_ten_times_the_slowest_of_late():
    """Learn from a phase; the first times teach nothing, and a long wait is forgotten."""
    limits = Limits(1800.0, 60.0)
    assert limits.of(SAVING, 1) == (1800.0, None)
    for count in range(1, 6):
        limits.learn(SAVING, count, 170.0)  # they compile, or start workers
    assert limits.of(SAVING, 7) == (60.0, 0.0)
    limits.learn(SAVING, 6, 3.0)
    assert limits.of(SAVING, 7) == (60.0, 3.0)
    limits.learn(SAVING, 7, 12.0)
    assert limits.of(SAVING, 8) == (120.0, 12.0)
    assert limits.of(SAVING, 6) == (1800.0, None)  # on a rank that has seen it less often
    assert limits.of(EVALUATING, 1) == (1800.0, None)
    limits.learn(SAVING, 8, 200.0)
    assert limits.of(SAVING, 9) == (1800.0, None)
    for count in range(9, 1009):
        limits.learn(SAVING, count, 1.0)
    assert limits.of(SAVING, 1009) == (60.0, 1.0)


STACK = '  File "/a/train.py", line 12 in wait\n  File "/a/train.py", line 20 in <module>'
BEFORE = Sample(100.0, False, STACK, False, (5, 6), 3.0, 50.0, 40.0, True, 1000, 5000, False)
NOW = replace(BEFORE, time=110.0)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "idle"),
        ({"stack": STACK + "0"}, ""),
        ({"stack": ""}, ""),  # it did not respond
        ({"takes_long": True}, ""),
        ({"in_kernel": True}, ""),
        ({"process": 50.8, "main": 40.5}, "idle"),  # threads that poll
        ({"process": 52.0, "main": 42.0}, "busy"),
        ({"process": 60.0}, "busy"),  # a thread computes
        ({"process": 60.0, "waits": 2900}, "idle"),  # it holds the GIL
        ({"process": 60.0, "waits": 2900, "children": 5.0}, "busy"),
        ({"process": 60.0, "waits": 11000}, "busy"),  # the main thread polls
        ({"children": 13.0}, "busy"),
        ({"pids": (5, 7)}, "busy"),
        ({"transferred": 15_000_000}, "busy"),
        ({"transferred": 1_500_000}, "idle"),  # Horovod's thread,
    ],
)
def test_process_hangs_if_it_stays_where_it_is_and_computes_nothing(more, expected):
    """Compare two samples of a process."""
    assert conclusion(BEFORE, replace(NOW, **more)) == expected


def test_stopped_process_hangs():
    """Compare samples of a stopped process, of which there is no stack."""
    stopped = replace(BEFORE, stopped=True, stack="")
    assert conclusion(stopped, replace(stopped, time=110.0)) == "idle"
    assert conclusion(replace(BEFORE, stack=""), replace(stopped, time=110.0)) == ""


@pytest.mark.parametrize(
    ("frame", "takes_long"),
    [
        ('"/x/torch/_dynamo/convert_frame.py", line 1412 in _compile', True),
        ('"/x/torch/_inductor/compile_fx.py", line 900 in _compile_fx_inner', True),
        ('"/usr/lib/python3.11/pdb.py", line 262 in user_line', True),
        ('"/x/torch/_dynamo/eval_frame.py", line 1548 in _fn', False),  # a compiled model runs
        ('"/x/torch/_inductor/output_code.py", line 828 in __call__', False),
        ('"/x/torch/_inductor/compile_fx.py", line 1900 in run', False),
    ],
)
def test_compilation_and_debuggers_are_found_in_the_stacks(frame, takes_long):
    """Take a sample of this process with a stack of another thread, and one of its main thread."""
    dump = (
        f"Thread 0x1 (most recent call first):\n  File {frame}\n\nThread 0x2 (most …):\n{STACK}\n"
    )
    sample = evidence.take(os.getpid(), dump)
    assert (sample.takes_long, sample.stack) == (takes_long, STACK)
    assert sample.frame == "wait (train.py, line 12)"


def test_sample_counts_the_processor_time_of_child_processes():
    """Take samples of a process whose child computes."""
    command = ["sh", "-c", "while :; do :; done & wait"]
    with subprocess.Popen(command, process_group=0) as process:
        try:
            until(lambda: len(evidence.take(process.pid, "").pids) == 2)
            first = evidence.take(process.pid, "")
            until(lambda: evidence.take(process.pid, "").children > first.children)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def at(rank, phase, still="", silence=70.0, limit=60.0, step=3, state="S", frame="a"):
    return Sighting(
        rank, "node1", step, phase, silence, 100 + rank, state, "", limit, 2.0, still, frame
    )


IDLE_0, WAITS_1, WAITS_2 = at(0, COMPUTING, "idle"), at(1, BACKWARD), at(2, BACKWARD, "busy")


@pytest.mark.parametrize(
    ("sightings", "ranks"),
    [
        ([IDLE_0, WAITS_1, WAITS_2], (0,)),
        ([at(0, COMPUTING, "busy"), WAITS_1, WAITS_2], None),  # it computes
        ([at(0, COMPUTING), WAITS_1, WAITS_2], None),  # its stack changes
        ([at(0, COMPUTING, "idle", limit=1800.0), WAITS_1, WAITS_2], None),  # a first step
        ([at(0, COMPUTING, "idle", silence=50.0), WAITS_1, WAITS_2], None),
        ([IDLE_0, WAITS_1, at(2, BACKWARD, silence=3.0)], None),  # rank 2 makes progress
        ([IDLE_0, WAITS_1], None),  # nothing is known of rank 2
        # Ranks 1 and 2 may wait for what rank 0 does between two steps.
        ([at(0, IDLE), at(1, BACKWARD, "idle"), at(2, BACKWARD, "idle")], None),
        ([at(0, EVALUATING, "busy"), at(1, COMPUTING, "idle"), at(2, COMPUTING, "idle")], None),
        ([at(0, EVALUATING, "busy"), at(1, BACKWARD, "idle"), at(2, BACKWARD, "idle")], None),
        ([at(0, EVALUATING, "idle"), at(1, BACKWARD, "idle"), at(2, BACKWARD, "idle")], (0,)),
        # A collective of all ranks, in which NCCL and MPI use a processor each.
        ([at(rank, BACKWARD, "busy") for rank in range(3)], ()),
        ([at(0, BACKWARD, "busy"), at(1, BACKWARD, "busy"), at(2, BACKWARD)], None),
        ([at(rank, EVALUATING, "busy") for rank in range(3)], None),
        ([at(rank, LOADING, "busy") for rank in range(3)], None),
        ([at(rank, LOADING, "idle") for rank in range(3)], ()),
        ([at(0, BACKWARD, "busy"), at(1, UPDATING, "idle"), at(2, UPDATING, "idle")], None),
        ([at(0, COMPUTING, "idle", state="T"), WAITS_1, WAITS_2], (0,)),
        (
            [
                at(0, EVALUATING, "idle", state="T"),
                at(1, EVALUATING, limit=1800.0),
                at(2, EVALUATING, "busy", limit=1800.0),
            ],
            (0,),
        ),
        ([at(0, SAVING, "idle", state="T"), at(1, SAVING), at(2, LOADING, silence=3.0)], None),
        ([at(rank, COMPUTING, "idle", state="T") for rank in range(3)], None),  # suspended
        ([at(0, COMPUTING, state="t"), WAITS_1, WAITS_2], None),  # under a debugger
        ([at(0, COMPUTING, state=""), at(1, BACKWARD, "busy"), at(2, BACKWARD, "idle")], (0,)),
        ([at(0, CLOSED), at(1, WAITING, "idle"), at(2, WAITING, "idle")], (0,)),
        ([at(rank, CLOSED) for rank in range(3)], None),
    ],
)
def test_hang_is_found_early_only_if_all_ranks_show_it(sightings, ranks):
    """Decide whether the run hangs for longer than the learnt time-outs."""
    blame = hung(sightings, 3, ("node1",), 0.0)
    assert (blame and blame.ranks) == ranks
    if blame:
        assert (blame.limit, blame.slowest) == (60.0, 2.0)
        fixes = blame.error("").fixes
        assert "HPCTRAIN_LEAST_TIMEOUT" in fixes[-1]
        assert not [fix for fix in fixes if "--timeout" in fix]


def test_time_out_may_end_soon():
    """Decide a few seconds before the end of the time-out, to observe the ranks meanwhile."""
    sightings = [at(0, COMPUTING, "idle", silence=56.0), at(1, BACKWARD, silence=56.0)]
    assert hung(sightings, 2, ("node1",), 0.0) is None
    assert hung(sightings, 2, ("node1",), 5.0).ranks == (0,)


@pytest.mark.parametrize(
    ("frames", "ranks"),
    [
        (("wait", "run_backward", "run_backward"), (0,)),
        (("run_backward", "run_backward", "run_backward"), ()),
        (("wait", "hook", "run_backward"), ()),
        (("wait", "", "run_backward"), ()),
        (("wait", "run_backward"), ()),
        (("", "run_backward", "run_backward"), ()),  # no stack yet: it is not known
    ],
)
@pytest.mark.parametrize("phase", [BACKWARD, COMPUTING, EVALUATING, LOADING])
def test_rank_that_the_others_wait_for_in_the_same_phase_is_named(frames, ranks, phase):
    """Name the only rank that is in another function; for data no rank waits for another one."""
    sightings = [at(rank, phase, frame=frame) for rank, frame in enumerate(frames)]
    found = judge(sightings, len(frames), ("node1",)).ranks
    assert found == (() if phase == LOADING else ranks)


def test_rank_between_two_steps_is_behind_those_in_the_next_backward_pass():
    """Name a rank that evaluates, saves or agrees while the others are in their backward pass."""
    for phase in (EVALUATING, SAVING, WAITING):
        sightings = [at(0, BACKWARD), at(1, phase), at(2, UPDATING)]
        assert judge(sightings, 3, ("node1",)).ranks == (1,)
