"""Every environment in tests/cluster/env/ gives the World that its file describes."""

import environments
import pytest

from hpctrain.cluster.launchers import detect, survey
from hpctrain.cluster.launchers.ancestors import LAUNCHING, LOCAL_RANK_ARGUMENT, Ancestor, Process
from hpctrain.errors import ContradictionError

DOCUMENTS = environments.all()
# Has the variables of a task, except SLURM_UMASK, which only tasks have; its parent shows which.
TWIN = "batch-shell-submitted-by-its-twin"
# The variables of a job and of the step that submitted it, which contradict each other.
INNER = "batch-shell-submitted-by-a-step"
# They set no local rank, so a person has to set one.
WITHOUT_LOCAL_RANK = ("pmi", "prterun")
RANKS = [
    pytest.param(document, rank, id=f"{name}-{rank}")
    for name, document in DOCUMENTS.items()
    for rank in range(len(document["ranks"]))
]


def is_start(document, name):
    """Check whether a document is of this start, with any version of Slurm."""
    return any(document is DOCUMENTS[one] for one in DOCUMENTS if one.rpartition("/")[2] == name)


def process(rank, host=""):
    """Return the process as it was in /proc at the capture."""
    words = ("python", "train.py", *rank.get("argv", ()))
    for pid, title in enumerate(rank["parents"], 1000):
        parts = title.split()
        for program in (parts[0].rstrip(":"), *parts[1:3]):
            if program in LAUNCHING:
                return Process(words, Ancestor(pid, program, LAUNCHING[program], title), host=host)
    return Process(words, host=host)


def variables(rank):
    """Return the environment, and the local rank if it is an argument."""
    env = dict(rank["env"])
    for argument in rank.get("argv", ()):
        name, _, value = argument.partition("=")
        if name in ("--local-rank", "--local_rank"):
            env[LOCAL_RANK_ARGUMENT] = value
    return env


def true_world(document, rank):
    """Return all fields of a rank's World, as far as the layout determines them."""
    layout, from_variables = document["layout"], document["ranks"][rank]["world"]
    true = environments.place(layout, from_variables["hosts"] or list(dict.fromkeys(layout)), rank)
    if document["launcher"] == "none":
        true |= {"world_size": 1}
    if from_variables["local_rank"] is not None:
        true |= {"local_rank": from_variables["local_rank"]}
    return true


def wrong_fields(world, document, rank):
    """Return the fields that are wrong in a World, and those that it should have but lacks."""
    from_variables = document["ranks"][rank]["world"]
    true = {**true_world(document, rank), "launcher": document["launcher"]}
    fields = {field: getattr(world, field) for field in true}
    if fields["hosts"] is not None:
        fields["hosts"] = list(fields["hosts"])
    return {
        field: (value, true[field])
        for field, value in fields.items()
        if value != true[field] and (value is not None or from_variables.get(field) is not None)
    }


@pytest.mark.parametrize("name", DOCUMENTS)
def test_captured_environment_agrees_with_its_layout(name):
    document = DOCUMENTS[name]
    assert document["how"]
    assert document["captured"] or document["with"].startswith("written from documentation")
    assert bool(document["captured"]) == (name.rpartition("/")[2] in environments.BY_START)
    assert len(document["ranks"]) == len(document["layout"])
    for index, rank in enumerate(document["ranks"]):
        true = true_world(document, index)
        assert rank["world"].keys() == true.keys()
        assert rank["world"]["rank"] == index
        for field, value in rank["world"].items():
            assert value in (None, true[field]), field


@pytest.mark.parametrize("name", DOCUMENTS)
def test_captured_local_ranks_are_unique_on_each_host(name):
    hosts = {}
    for host, rank in zip(DOCUMENTS[name]["layout"], DOCUMENTS[name]["ranks"], strict=True):
        hosts.setdefault(host, []).append(rank["world"]["local_rank"])
    for found in hosts.values():
        assert found == [None] * len(found) or sorted(found) == list(range(len(found)))


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if DOCUMENTS[name]["captured"]])
def test_captured_environment_agrees_with_the_table(name):
    program, start = environments.BY_START[name.rpartition("/")[2]]
    document = DOCUMENTS[name]
    assert document["launcher"] == start.launcher
    assert document["how"] == program.how(start)
    assert document["layout"] == list(start.layout)
    worlds = [rank["world"] for rank in document["ranks"]]
    assert worlds == [start.known_world(rank) for rank in range(len(start.layout))]


@pytest.mark.parametrize(("document", "rank"), RANKS)
def test_captured_environment_gives_the_right_world(document, rank):
    entry = document["ranks"][rank]
    env = entry["env"]
    if document["launcher"] in WITHOUT_LOCAL_RANK:
        refusal = rf"no .*LOCAL_?RANK.* \(launcher: {document['launcher']}\)"
        with pytest.raises(ContradictionError, match=refusal):
            survey(env, process(entry))
        true = true_world(document, rank)
        env = {**env, **{name.upper(): str(true[name]) for name in ("world_size", "local_rank")}}
    assert wrong_fields(survey(env, process(entry)).world, document, rank) == {}


@pytest.mark.parametrize(("document", "rank"), RANKS)
def test_captured_variables_alone_give_the_world_or_are_refused(document, rank):
    env = variables(document["ranks"][rank])
    # Slurm 26.05 sets it in batch shells, so nothing of the outer step counts.
    inherits = env.get("SLURM_STEP_ID") != "-5"
    if is_start(document, TWIN) and inherits:
        # The limit in docs/launchers.md: without its ancestors it looks like that step's task.
        assert detect(env).launcher == "slurm"
    elif (is_start(document, INNER) and inherits) or document["launcher"] in WITHOUT_LOCAL_RANK:
        with pytest.raises(ContradictionError):
            detect(env)
    else:
        assert wrong_fields(detect(env), document, rank) == {}


@pytest.mark.parametrize(("document", "rank"), RANKS)
def test_captured_world_on_one_host_is_complete(document, rank):
    if document["launcher"] in WITHOUT_LOCAL_RANK:
        return
    world = survey(document["ranks"][rank]["env"], process(document["ranks"][rank])).world
    known = document["ranks"][rank]["world"]
    size = known["world_size"]
    if size == 1 or size == known["local_world_size"] or known["num_nodes"] == 1:
        assert (world.local_world_size, world.node_rank, world.num_nodes) == (size, 0, 1)


@pytest.mark.parametrize(("document", "rank"), RANKS)
def test_only_captured_ranks_on_a_login_host_are_refused_there(document, rank):
    if document["launcher"] in WITHOUT_LOCAL_RANK:
        return
    host = document["layout"][rank]
    entry = document["ranks"][rank]
    job = "SLURM_JOB_ID" in entry["env"]
    error = survey(entry["env"], process(entry, host)).waste
    # Of a job with several tasks, the refusal of idle tasks comes first.
    assert (error is not None and error.code == "HT118") == (
        job and host == "login" and document["launcher"] == "torchrun"
    )
