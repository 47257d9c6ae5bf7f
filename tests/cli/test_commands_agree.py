"""`status`, `top`, `logs` and `report` read the same record of a run."""

import json

import pytest

from hpctrain import cli, rundir
from hpctrain.errors import exit_codes
from hpctrain.jobs import job_status, job_watching
from hpctrain.monitoring.report import facts
from hpctrain.monitoring.report.runs import RecordedRun


@pytest.fixture
def run(tmp_path):
    directory = rundir.RunDirectory(tmp_path / "runs" / "train-1")
    directory.path.mkdir(parents=True)
    directory.identity.write_text("{}")
    row = {"step": 7, "epoch": 0, "loss": 0.5, "samples_per_second": 10.0}
    directory.metrics.write_text(json.dumps(row) + "\n")
    return directory


@pytest.mark.parametrize("code", [None, *exit_codes.STATUS])
def test_status_top_and_report_say_the_same_of_a_run(run, capsys, code):
    if code is not None:
        run.record_end(code, "because", step=7)
    reported = facts.summary(RecordedRun(str(run.path), ""))
    cli.main(["status", "--json", str(run.path)])
    (entry,) = json.loads(capsys.readouterr().out)["jobs"]
    (status,) = job_status.without_slurm([str(run.path)])
    row = dict(zip(job_watching.HEADS, job_watching.row_of(status), strict=True))  # top's, too
    shown = entry["run"]
    assert (shown["status"], shown["reason"], shown["step"]) == (
        reported["status"],
        reported["reason"],
        reported["step"],
    )
    assert (row["STATE"], row["STEP"]) == (reported["status"], str(reported["step"]))
