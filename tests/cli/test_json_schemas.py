"""The JSON of the commands is what the schemas in docs/schemas/ say, and nothing else."""

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import environments
import fake_slurm
import jsonschema
import pytest
import ranks as forked
from fake_slurm import job
from hypothesis import given
from hypothesis import strategies as st
from launcher_env import BATCH, ENV_LAUNCHER, HPCTRAIN, STEP, TORCHRUN, changed
from test_captured_environments import process
from test_doctor import roster
from test_doctor_ranks import examines, loses_torch, miscounts, output_of_rank_0

from hpctrain.cli import main
from hpctrain.cli.explain import as_json
from hpctrain.cluster.launchers import LAUNCHERS, Process, readings, survey
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.errors.codes import Code, codes
from hpctrain.tools.doctor import machine
from hpctrain.tools.doctor import ranks as of_ranks
from hpctrain.tools.doctor.report import Finding, Report, finding, merged

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (DOCS / "schemas").glob("*.json")}
# Objects whose names vary: values that a launcher may not have, and subjects of the doctor.
VARYING = ("sources", "checks")
CONTRADICTION = {"RANK": "1"}
# The shell of a batch job of four tasks, which would train alone, and a rank without an address.
WASTE = changed(BATCH, SLURM_PROCID=None, SLURM_LOCALID=None, SLURM_NODEID=None)
STRAY = changed(ENV_LAUNCHER, MASTER_PORT=None)
ARRAY_TASK = {**STEP, "SLURM_ARRAY_JOB_ID": "812", "SLURM_ARRAY_TASK_ID": "3"}
BY_KIND = {
    "alone": {},
    "step": STEP,
    "array task": ARRAY_TASK,
    "restarted": {**STEP, "SLURM_RESTART_COUNT": "2"},
    "torchrun in a step": {**STEP, **TORCHRUN},
    "manually": ENV_LAUNCHER,
    "hpctrain run": HPCTRAIN,
    "waste": WASTE,
    "stray": STRAY,
    "contradiction": CONTRADICTION,
    "unknown launcher": {**STEP, "HPCTRAIN_LAUNCHER": "pbs"},
    "wrong port": {**ENV_LAUNCHER, "MASTER_PORT": "70000"},
}
WARNED = ("torchrun in a step", "waste", "stray")
REFUSED = ("contradiction", "unknown launcher", "wrong port")


def hold(name, document):
    """Check an output against its schema and return it as JSON has it."""
    document = json.loads(document if isinstance(document, str) else json.dumps(document))
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(document)
    return document


def explained(env, of=None):
    """What `hpctrain explain --json` shows of an environment."""
    of = of or Process()
    try:
        start = survey(env, of)
    except HpctrainError:
        start = None
    return hold("explain", as_json(start, list(readings({**env, **of.facts()}))))


def parts(schema, name=""):
    """Yield a schema and all schemas in it, each with the word that it stands under.

    The branches of "if" are left out: they add to properties that are described above them.
    """
    if isinstance(schema, dict):
        yield name, schema
        for word, part in schema.items():
            if word not in ("if", "then", "else"):
                yield from parts(part, word)
    elif isinstance(schema, list):
        for part in schema:
            yield from parts(part, name)


def spoiled(document, path=()):
    """Yield copies with one more key, one less, or one value of another type, and its path."""
    others = [{"another": "type"}, True]
    if document is not None:  # null may stand for any of these
        others += ["another type", 7, 0.5, [0.5]]
    alike = (int, float) if type(document) is float else (type(document),)
    yield from ((path, other) for other in others if type(other) not in alike)
    if isinstance(document, dict):
        yield (*path, "+"), {**document, "more": {}}
        for name, value in document.items():
            if path[-1:] and path[-1] in VARYING:
                yield (*path, name), {**document, name: 7}
                continue
            yield (
                (*path, "-", name),
                {other: document[other] for other in document if other != name},
            )
            for deeper, bad in spoiled(value, (*path, name)):
                yield deeper, {**document, name: bad}
    elif isinstance(document, list):
        yield (*path, "+"), [*document, {"more": {}}]
        for place, value in enumerate(document):
            for deeper, bad in spoiled(value, (*path, place)):
                yield deeper, [*document[:place], bad, *document[place + 1 :]]


def refuses_all_changes(name, document):
    """Check that the schema accepts an output and none of its spoiled copies."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    validator.validate(document)
    places = [place for place, bad in spoiled(document) if validator.is_valid(bad)]
    assert not places, f"{name}.json accepts changes at {places}"


# the schemas


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_schema_is_strict_and_describes_every_property(name):
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for word, part in parts(schema):
        if "array" in part.get("type", ()):
            assert "items" in part
        if "object" not in part.get("type", ()):
            continue
        if word == "checks":
            assert part["additionalProperties"] == {"type": "string"}
            continue
        assert part["additionalProperties"] is False
        assert word in VARYING or part["required"] == list(part["properties"])
        assert all(one["description"].endswith(".") for one in part["properties"].values())


def test_every_json_schema_is_for_a_command_and_linked_from_its_page():
    assert SCHEMAS.keys() == {"explain", "explain-code", "doctor", "lint", "status"}
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    for name in SCHEMAS:
        assert f"](schemas/{name}.json)" in pages


def test_json_schemas_know_every_launcher_and_field():
    launchers = [one.name for one in LAUNCHERS]
    explain, doctor = SCHEMAS["explain"], SCHEMAS["doctor"]
    assert explain["$defs"]["launcher"]["examples"] == launchers
    facts = doctor["properties"]["machine"]["properties"]
    assert facts["launcher"]["examples"] == launchers
    fields = [name for name in World.__dataclass_fields__ if name != "launcher"]
    assert list(explain["properties"]["sources"]["properties"]) == fields
    assert explain["properties"]["ignored"]["items"]["properties"]["field"]["enum"] == fields


# explain


@pytest.mark.parametrize("kind", BY_KIND)
def test_explain_json_fits_its_schema(monkeypatch, capsys, kind):
    document = explained(BY_KIND[kind])
    assert bool(document["warnings"]) == (kind in WARNED)
    assert (document["launcher"] is None) == (kind in REFUSED)
    refuses_all_changes("explain", document)
    # And as the command prints it, here in a process that may be a stray one as well.
    for variable, value in BY_KIND[kind].items():
        monkeypatch.setenv(variable, value)
    assert main(["explain", "--json"]) == (2 if kind in REFUSED else 0)
    assert hold("explain", capsys.readouterr().out).keys() == document.keys()


@pytest.mark.parametrize("name", environments.names())
def test_explain_json_of_captured_environment_fits_its_schema(name):
    for rank in environments.load(name)["ranks"]:
        explained(rank["env"], process(rank))
        explained(rank["env"])


@given(
    st.dictionaries(
        st.sampled_from(sorted({*STEP, *TORCHRUN, *HPCTRAIN})),
        st.sampled_from(["0", "1", "2", "3", "-1", "", "x", "1(x2)", "node[1-2]", "9" * 30]),
    ),
    st.sampled_from([{}, STEP, TORCHRUN, HPCTRAIN]),
)
def test_explain_json_of_any_environment_fits_its_schema(changes, env):
    explained({**env, **changes})


def test_explain_json_of_null_and_known_values_are_not_mixed():
    known, unknown = explained(STEP), explained(CONTRADICTION)
    validator = jsonschema.Draft202012Validator(SCHEMAS["explain"])
    for name in ("rank", "world_size", "local_rank"):
        assert not validator.is_valid({**known, name: None})
    for name in known.keys() - {"ignored", "warnings", "hosts", "launcher", "main_port"}:
        assert not validator.is_valid({**unknown, name: known[name]})


@pytest.mark.parametrize("code", ["HT998", "HT999"])
def test_explain_code_json_fits_its_schema(monkeypatch, capsys, code):
    causes = ("one cause", "another") if code == "HT999" else ()
    monkeypatch.setitem(codes(), code, Code("What went wrong.", causes, {}))
    assert main(["explain", code.lower(), "--json"]) == 0
    document = hold("explain-code", capsys.readouterr().out)
    assert document["causes"] == list(causes)
    refuses_all_changes("explain-code", document)


def test_explain_code_json_of_every_code_fits_its_schema(capsys):
    for code in codes():
        assert main(["explain", code, "--json"]) == 0
        assert hold("explain-code", capsys.readouterr().out)["code"] == code


# lint


def linted(capsys, *names, code):
    """What `hpctrain lint --json` prints of scripts."""
    assert main(["lint", "--json", *names]) == code
    return hold("lint", capsys.readouterr().out)


def test_lint_json_of_findings_fits_its_schema(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("a.sh").write_text("#!/bin/bash\n#SBATCH --output=logs/%j\n#SBATCH --mem=64\n")
    Path("b.sh").write_text("#SBATCH --nodes=2\n")
    Path("empty.sh").write_text("")
    document = linted(capsys, "a.sh", "empty.sh", "b.sh", code=2)
    assert [(one["file"], one["line"], one["rule"]) for one in document] == [
        ("a.sh", 2, "log-folder-missing"),
        ("a.sh", 3, "memory-in-megabytes"),
        ("b.sh", 1, "no-shebang"),
    ]
    assert linted(capsys, "a.sh", "b.sh", code=1) == document
    refuses_all_changes("lint", document)


def test_lint_json_without_findings_is_an_empty_list(capsys, tmp_path):
    path = tmp_path / "a.sh"
    path.write_text("#!/bin/bash\n")
    assert linted(capsys, str(path), code=0) == []
    assert linted(capsys, str(tmp_path / "none.sh"), code=2) == []


def test_lint_json_of_every_script_of_the_tests_fits_its_schema(capsys, monkeypatch):
    folder = DOCS.parent / "tests/jobs/scripts"
    scripts = sorted((folder / "wrong").glob("*.sh"))
    # With the Python scripts that some of them start.
    monkeypatch.chdir(folder / "programs")
    found = linted(capsys, *map(str, scripts), code=1)
    assert {one["file"] for one in found} == {str(path) for path in scripts}


# status

REASONS = ("detect", "stop", "start", "rendezvous", "load", "redo", "queue")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Slurm with jobs of this user, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    return fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)


def make_run(name, **row):
    """Make a run directory below ./runs, with one row of metrics."""
    path = Path("runs", name)
    path.mkdir(parents=True)
    path.joinpath("run.json").write_text("{}")
    path.joinpath("metrics.jsonl").write_text(json.dumps(row) + "\n")
    return path


def status(capsys, *names):
    """What `hpctrain status --json` prints."""
    assert main(["status", "--json", *names]) == 0
    return hold("status", capsys.readouterr().out)


def test_status_json_of_jobs_fits_its_schema(slurm, capsys):
    run = make_run("train-70", step=40, epoch=2, loss=0.25, samples_per_second=512.5)
    marks = [{"time": 1.0, "event": "launched"}, {"time": 3.5, "event": "training"}]
    run.joinpath("events.jsonl").write_text("\n".join(map(json.dumps, marks)))
    run.joinpath("last-step.json").write_text('{"time": 11.0, "event": "last step"}')
    slurm.jobs(
        job("70", WorkDir=os.getcwd(), RestartCnt="1", TimeUsed="1-00:00:12"),
        job("71", State="PENDING", Reason="Resources", NodeList="", StartTime="N/A"),
        job(
            "72",
            State="FAILED",
            Reason="OutOfMemory",
            exit_code="256",
            TimeLeft="0:00",
            STDOUT=f"{os.getcwd()}/log",
        ),
        job("73", State="FAILED", Reason="BadConstraints", exit_code="1", NodeList=""),
        job("74_[0-3%2]", State="PENDING", NodeList="", TimeLeft="UNLIMITED", NumNodes="?"),
        job("75", NodeList="node[1", TimeUsed="INVALID"),
    )
    conclusion = "rank 2 on node3 failed first, with exit code 1: ValueError: x"
    Path("log").write_text(f"hpctrain: {conclusion}\n")
    document = status(capsys)
    running, pending, failed, refused, array, odd = document["jobs"]
    assert document["slurm_error"] is None
    assert running == {
        "job": "70",
        "state": "RUNNING",
        "exit_code": None,
        "name": "train",
        "nodes": 2,
        "hosts": ["node1", "node2"],
        "restarts": 1,
        "elapsed_seconds": 86412,
        "remaining_seconds": 47 * 60 + 48,
        "start_time": int(time.mktime(time.strptime("2026-11-21 10", "%Y-%m-%d %H"))),
        "submit_time": int(time.mktime(time.strptime("2026-11-21 09", "%Y-%m-%d %H"))),
        "dependency": None,
        "reason": None,
        "explanation": None,
        "failure": None,
        "log": str(Path.cwd() / "runs/train-70.log"),
        "run": {
            "path": str(run.absolute()),
            "status": "not ended",
            "step": 40,
            "epoch": 3,
            "loss": 0.25,
            "samples_per_second": 512.5,
            "reason": None,
            "effective_training_time": {
                "wall_seconds": 10.0,
                "effective_seconds": 7.5,
                "effective_share": 0.75,
                "lost_seconds": {**dict.fromkeys(REASONS, 0.0), "start": 2.5},
            },
        },
        "used": None,
    }
    assert (pending["state"], pending["hosts"], pending["elapsed_seconds"]) == ("PENDING", [], None)
    assert (pending["start_time"], pending["reason"]) == (None, "Resources")
    assert "(Resources)" in pending["explanation"]
    assert (failed["exit_code"], failed["remaining_seconds"]) == (1, None)
    assert failed["failure"] == conclusion
    assert (pending["failure"], refused["failure"], array["log"]) == (None, None, None)
    assert (refused["exit_code"], refused["reason"]) == (None, "BadConstraints")
    assert (array["job"], array["remaining_seconds"], array["nodes"]) == ("74_[0-3%2]", None, None)
    assert (odd["hosts"], odd["elapsed_seconds"]) == (None, None)
    refuses_all_changes("status", document)


def test_status_json_of_accounting_and_of_runs_without_slurm_fits_its_schema(slurm, capsys):
    path = make_run("train-69", step=3, loss=math.nan)
    Path("runs", "other").mkdir()
    slurm.command("sacct", "69|FAILED|3:0")
    (ended,) = status(capsys, "train-69")["jobs"]
    assert (ended["job"], ended["state"], ended["exit_code"]) == ("69", "FAILED", 3)
    assert (ended["name"], ended["run"]["step"], ended["run"]["loss"]) == (None, 3, None)
    slurm.jobs(None)
    document = status(capsys)
    assert "Unable to contact" in document["slurm_error"]
    other, train = document["jobs"]
    assert (other["job"], other["run"]["status"]) == (None, "no run yet")
    assert (train["job"], train["state"]) == ("69", None)
    assert train["run"]["path"] == str(path.absolute())
    refuses_all_changes("status", document)
    validator = jsonschema.Draft202012Validator(SCHEMAS["status"])
    for name in ended.keys() - {"job", "state", "run"}:
        known = {**train, name: {"hosts": [], "nodes": 1}.get(name, 7)}
        assert not validator.is_valid({**document, "jobs": [known]})


def test_status_json_of_what_a_job_used_fits_its_schema(slurm, capsys):
    run = make_run("train-70", step=40)
    line = {"steps": 10, "hosts": ["node1"], "step_times": {"100": 10}, "data": [0.01]}
    line |= {"memory": [1e9], "gpu_memory": [2e9], "cores": [1.5], "gpu_use": [0.5]}
    run.joinpath("timings.jsonl").write_text(json.dumps(line))
    slurm.jobs(job("70", State="COMPLETED", WorkDir=os.getcwd()))
    slurm.command("sacct", "512000K\n")
    document = status(capsys, "--used", "70")
    (used,) = [one["used"] for one in document["jobs"]]
    assert None not in [*used.values(), *used["ranks"].values(), *used["enough"].values()]
    refuses_all_changes("status", document)


def test_status_json_of_nothing_is_one_document(slurm, capsys):
    assert status(capsys) == {"slurm_error": None, "jobs": []}
    slurm.jobs(None)
    document = status(capsys)
    assert document["jobs"] == []
    assert document["slurm_error"]
    refuses_all_changes("status", document)


# doctor


def report(capsys, entries, wrong=None):
    """What the doctor prints of ranks that were not all started here."""
    facts = {"host": "node1", "system": "Linux", "launcher": "slurm", "python": "3.11.7"}
    size = len(entries.entries)
    whole = Report(facts, World(0, size, 0, launcher="slurm"), True)
    # The findings of all ranks, as the rendezvous brings them.
    brought = json.loads(
        json.dumps([[asdict(finding("horovod.fails", reason="it crashes"))]] * size)
    )
    refused = Finding.of(
        "GPU", UsageError.of_text("HT113", "one GPU", "two GPUs", "start one rank")
    )
    whole.machines([*merged(brought), refused], of_ranks.rows(entries))
    if wrong is not None:
        whole.sums("nccl", wrong)
        whole.add(of_ranks.shared_findings(entries, [rank == 0 for rank in range(size)]))
    whole.end()
    return hold("doctor", capsys.readouterr().out)


def test_doctor_json_of_ranks_that_differ_fits_its_schema(capsys):
    gpu = {"gpu": "GPU-1b2c", "gpu_name": "H100", "marker": "t", "run": "/runs"}
    entries = roster(gpu, gpu, {**gpu, "gpu": None, "gpu_name": None}, hosts=["a", "a", "b"])
    document = report(capsys, entries, [2])
    assert {one["subject"]: one["code"] for one in document["findings"]} == {
        "horovod": None, "GPU": "HT113", "all-reduce": None, "shared directory": None,
    }  # fmt: skip
    assert [row["gpu"] for row in document["ranks"]] == ["GPU-1b2c", "GPU-1b2c", None]
    assert [row["device"] for row in document["ranks"]] == ["H100", "H100", "cpu"]
    refuses_all_changes("doctor", document)


def test_doctor_json_without_a_sum_fits_its_schema(capsys):
    document = report(capsys, roster({}, {"kind": "none"}, {}))
    assert document["all_reduce"] is None
    refuses_all_changes("doctor", document)


def test_doctor_json_of_this_machine_fits_its_schema(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "check_horovod", lambda: "0.28.1")
    code = main(["doctor", "--json", "--run-dir", str(tmp_path)])
    document = hold("doctor", capsys.readouterr().out)
    assert code == int(any(one["level"] == "problem" for one in document["findings"]))
    assert (document["machine"]["launcher"], len(document["ranks"])) == ("none", 1)
    refuses_all_changes("doctor", document)


@pytest.mark.ranks
@pytest.mark.parametrize("fault", [miscounts, loses_torch])
def test_doctor_json_of_three_ranks_fits_its_schema(fault):
    code, line = output_of_rank_0(forked.run(3, examines, None, fault, layout=(1, 1, 1)))
    document = hold("doctor", line)
    assert code == 1
    assert len(document["ranks"]) == 3
    assert bool(document["all_reduce"]) == (fault is miscounts)
    refuses_all_changes("doctor", document)
