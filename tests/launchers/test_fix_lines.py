"""What is typed after a refusal leads on, and no value is too long or too odd to be refused."""

import re

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.launchers import LAUNCHERS, Process, detect, readings, survey
from hpctrain.world import World

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def started(name, **changes):
    (launcher,) = (one for one in LAUNCHERS if one.name == name)
    world = World(1, 4, 1, 3, 0, 2, ("node1", "node2"), name)
    env = {**launcher.environ(world, (3, 1), 77), **changes}
    return {name: value for name, value in env.items() if value is not None}


def refusal(env, process=None):
    with pytest.raises(HpctrainError) as caught:
        survey(env, process or Process())
    return caught.value


@pytest.mark.parametrize("name", [one.name for one in LAUNCHERS if "local_rank" in one.variables])
def test_what_makes_a_half_environment_a_single_process_can_be_typed(name):
    (launcher,) = (one for one in LAUNCHERS if one.name == name)
    env = started(name, **dict.fromkeys(launcher.variables["local_rank"]))
    fix = refusal(env).fix
    unset = re.search(r"unset ((?:[A-Z][A-Z0-9_]+ ?)+)", fix)
    export = re.search(r"env HPCTRAIN_LAUNCHER=none", fix)
    assert unset or export
    if unset:
        env = {k: v for k, v in env.items() if k not in unset[1].split()}
    else:
        env = {**env, "HPCTRAIN_LAUNCHER": "none"}
    assert detect(env).world_size == 1


@pytest.mark.parametrize(
    "env", [{"SLURM_STEP_ID": "0"}, {"TORCHELASTIC_RUN_ID": "none"}, {"SUBMITIT_EXECUTOR": "local"}]
)
def test_a_mark_alone_is_named(env):
    (name,) = env
    assert name in refusal(env).found


def test_no_number_is_too_long_to_be_read():
    digits = "9" * 5000
    error = refusal(started("slurm", SLURM_STEP_TASKS_PER_NODE=digits))
    assert "SLURM_STEP_TASKS_PER_NODE" in error.found
    assert detect(started("slurm", SLURM_STEP_ID=digits)).launcher == "none"
    assert survey(started("slurm", SLURM_GPUS_ON_NODE=digits)).allocation.gpus is None


def test_tasks_on_more_nodes_than_there_can_be_are_refused():
    refusal(started("slurm", SLURM_STEP_TASKS_PER_NODE="1(x999999999999)"))


def test_tasks_per_node_in_another_form_come_with_something_to_type():
    assert refusal(started("slurm", SLURM_STEP_TASKS_PER_NODE="3*1")).fix


def test_a_size_that_cannot_be_is_refused():
    refusal({**BY_HAND, "WORLD_SIZE": "9" * 20})


def test_an_argument_is_not_unset():
    process = Process(("python", "train.py", "--local_rank=x"))
    error = refusal({"RANK": "1", "WORLD_SIZE": "2"}, process)
    assert "unset --" not in error.fix


def test_under_torchrun_the_argument_is_what_has_to_go():
    process = Process(("python", "train.py", "--local_rank", "0"))
    assert not refusal(started("torchrun"), process).fix.startswith("unset LOCAL_RANK")


def test_a_launcher_that_never_says_enough_is_no_remedy():
    assert "HPCTRAIN_LAUNCHER=pmi" not in refusal({**BY_HAND, "PMIX_RANK": "2"}).fix


def test_pmi_without_its_variables_says_so():
    assert not refusal({"HPCTRAIN_LAUNCHER": "pmi"}).found.startswith(",")


def test_hosts_that_do_not_fit_are_named_with_their_variable():
    assert "HPCTRAIN_HOSTS" in refusal(started("hpctrain", HPCTRAIN_HOSTS="node1")).found


def test_a_launcher_with_a_newline_is_shown_quoted():
    assert "\n" not in refusal({"HPCTRAIN_LAUNCHER": "slurm\n"}).found


def test_a_step_in_other_digits_is_no_step():
    assert not any(
        one.name == "slurm" and one.matches(started("slurm", SLURM_STEP_ID="٣"))
        for one in LAUNCHERS
    )


@pytest.mark.parametrize(
    "env",
    [
        started("slurm", SLURM_LOCALID="3"),
        started("hpctrain", HPCTRAIN_HOSTS="node1"),
    ],
)
def test_explain_shows_every_variable_that_an_error_names(env):
    shown = {one.variable for one in readings(env)}
    named = set(re.findall(r"([A-Z][A-Z0-9_]+)=", refusal(env).found))
    named |= {"HPCTRAIN_HOSTS"} & env.keys()
    assert named <= shown
