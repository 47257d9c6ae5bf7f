"""The defaults of a cluster, from the shell, and their precedence."""

import argparse
import os

from hpctrain.cli import job_options
from hpctrain.jobs import site
from hpctrain.jobs.spec import JobSpec


def spec_of(*words):
    parser = argparse.ArgumentParser()
    job_options.add_job_options(parser)
    return site.completed(job_options.spec_from(parser.parse_args([*words])), os.environ)


def test_site_shell_file_and_option_precedence(tmp_path, monkeypatch):
    path = str(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text(
        'command = "python t.py"\nqos = "file"\nenvironment = {B = "2"}\n'
    )
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    monkeypatch.setenv("SBATCH_PARTITION", "shell")
    monkeypatch.setenv("SBATCH_QOS", "shell")
    spec = spec_of("--env", "C=3", path)
    assert (spec.account, spec.partition, spec.qos) == ("", "shell", "file")
    assert spec.environment == {"B": "2", "C": "3"}
    assert spec_of(path, "--qos", "option").qos == "option"


def test_job_spec_in_python_uses_the_shell():
    env = {"SBATCH_QOS": "shell", "SBATCH_ACCOUNT": "shell", "SBATCH_TIMELIMIT": "1"}
    spec = site.completed(JobSpec(command="x", account="own"), env)
    assert (spec.account, spec.qos, spec.partition, spec.time) == ("own", "shell", "", "")
    assert site.defaults(JobSpec(account="own"), env) == {"qos": "shell"}
