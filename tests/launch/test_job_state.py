"""The state of a launch on the hosts of a job, without sockets, clocks and processes."""

import os

from job_world import World

from hpctrain.launch.job_state import JobState

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
