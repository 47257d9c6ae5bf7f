"""Every environment in tests/cluster/env/ is read as what it is."""

import environments
import pytest

from hpctrain.cluster.launchers import detect, survey
from hpctrain.cluster.launchers.ancestors import LAUNCHING, LOCAL_RANK_ARGUMENT, Ancestor, Process
from hpctrain.errors import ContradictionError

DOCUMENTS = environments.all()
# Its variables are those of a task, but for SLURM_UMASK, which only tasks have; its parent tells.
TWIN = "batch-shell-submitted-by-its-twin"
# The variables of a job and of the step that submitted it, which contradict each other.
INNER = "batch-shell-submitted-by-a-step"
# They leave no local rank, so that a person has to say it.
WITHOUT_LOCAL_RANK = ("pmi", "prterun")
RANKS = [
    pytest.param(document, rank, id=f"{name}-{rank}")
    for name, document in DOCUMENTS.items()
    for rank in range(len(document["ranks"]))
]


def process(rank):
    """What /proc said of a process when it was captured."""
    for pid, title in enumerate(rank["parents"], 1000):
        words = title.split()
        for program in (words[0].rstrip(":"), *words[1:3]):
            if program in LAUNCHING:
                ancestor = Ancestor(pid, program, LAUNCHING[program], title)
                return Process(("python", "train.py", *rank.get("argv", ())), ancestor)
    return Process(("python", "train.py", *rank.get("argv", ())))


def variables(rank):
    """The environment, and the local rank where it is an argument."""
    env = dict(rank["env"])
    for argument in rank.get("argv", ()):
        name, _, value = argument.partition("=")
        if name in ("--local-rank", "--local_rank"):
            env[LOCAL_RANK_ARGUMENT] = value
    return env


def truth(document, rank):
    """The true place of a rank, all of it, as far as the layout knows."""
    layout, told = document["layout"], document["ranks"][rank]["world"]
    true = environments.place(layout, told["hosts"] or list(dict.fromkeys(layout)), rank)
    if document["launcher"] == "none":
        true |= {"world_size": 1}
    if told["local_rank"] is not None:
        true |= {"local_rank": told["local_rank"]}
    return true


def wrong(world, document, rank):
    """What a world says otherwise than the file, and what it does not say."""
    told = document["ranks"][rank]["world"]
    true = {**truth(document, rank), "launcher": document["launcher"]}
    said = {field: getattr(world, field) for field in true}
    if said["hosts"] is not None:
        said["hosts"] = list(said["hosts"])
    return {
        field: (value, true[field])
        for field, value in said.items()
        if value != true[field] and (value is not None or told.get(field) is not None)
    }


@pytest.mark.parametrize("name", DOCUMENTS)
def test_captured_environment_agrees_with_its_layout(name):
    document = DOCUMENTS[name]
    assert document["how"]
    assert document["captured"] or document["with"].startswith("written from documentation")
    assert bool(document["captured"]) == (name in environments.BY_START)
    assert len(document["ranks"]) == len(document["layout"])
    for index, rank in enumerate(document["ranks"]):
        true = truth(document, index)
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


@pytest.mark.parametrize("name", environments.BY_START)
def test_captured_environment_agrees_with_the_table(name):
    program, start = environments.BY_START[name]
    document = DOCUMENTS[name]
    assert document["launcher"] == start.launcher
    assert document["how"] == program.how(start)
    assert document["layout"] == list(start.layout)
    worlds = [rank["world"] for rank in document["ranks"]]
    assert worlds == [start.told_world(rank) for rank in range(len(start.layout))]


@pytest.mark.parametrize(("document", "rank"), RANKS)
def test_captured_environment_gives_the_right_world(document, rank):
    entry = document["ranks"][rank]
    env = entry["env"]
    if document["launcher"] in WITHOUT_LOCAL_RANK:
        refusal = f"{document['launcher']} left no .*local_rank"
        with pytest.raises(ContradictionError, match=refusal):
            survey(env, process(entry))
        true = truth(document, rank)
        env = {**env, **{name.upper(): str(true[name]) for name in ("world_size", "local_rank")}}
    assert wrong(survey(env, process(entry)).world, document, rank) == {}


@pytest.mark.parametrize(("document", "rank"), RANKS)
def test_captured_variables_alone_give_the_world_or_are_refused(document, rank):
    env = variables(document["ranks"][rank])
    if document is DOCUMENTS[TWIN]:
        # The limit that docs/launchers.md states: without its ancestors it is that step's task.
        assert detect(env).launcher == "slurm"
    elif document is DOCUMENTS[INNER] or document["launcher"] in WITHOUT_LOCAL_RANK:
        with pytest.raises(ContradictionError):
            detect(env)
    else:
        assert wrong(detect(env), document, rank) == {}
