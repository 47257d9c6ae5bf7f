"""The defaults of a cluster, from site.sh and the shell, and their precedence."""

import argparse

import pytest

from hpctrain.cli import job_options
from hpctrain.errors import UsageError
from hpctrain.jobs import site
from hpctrain.jobs.spec import JobSpec

EVERYWHERE = "\n".join(f"export SBATCH_{name}=site" for name in ("ACCOUNT", "PARTITION", "QOS"))


@pytest.fixture
def site_sh(tmp_path, monkeypatch):
    """Return a function that writes the user's site.sh."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def write(text):
        path = tmp_path / ".config" / "hpctrain" / "site.sh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def spec_of(*words):
    parser = argparse.ArgumentParser()
    job_options.add_job_options(parser)
    return job_options.spec_from(parser.parse_args([*words]))


def test_site_shell_file_and_option_precedence(site_sh, tmp_path, monkeypatch):
    site_sh(EVERYWHERE)
    path = str(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text(
        'command = "python t.py"\nqos = "file"\nenvironment = {B = "2"}\n'
    )
    monkeypatch.setenv("SBATCH_PARTITION", "shell")
    monkeypatch.setenv("SBATCH_QOS", "shell")
    spec = spec_of("--env", "C=3", path)
    assert (spec.account, spec.partition, spec.qos) == ("site", "shell", "file")
    assert spec.environment == {"B": "2", "C": "3"}
    assert spec_of(path, "--qos", "option").qos == "option"


def test_job_spec_in_python_uses_site(tmp_path):
    (tmp_path / "other.sh").write_text(EVERYWHERE)
    env = {"HPCTRAIN_SITE": str(tmp_path / "other.sh"), "SBATCH_QOS": "shell"}
    spec = site.completed(JobSpec(command="x", account="own"), env)
    assert (spec.account, spec.qos, spec.partition) == ("own", "shell", "site")
    sources = {name: source for name, (_, source) in site.defaults(JobSpec(), env).items()}
    assert sources == {
        "account": env["HPCTRAIN_SITE"], "partition": env["HPCTRAIN_SITE"], "qos": "$SBATCH_QOS"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("SBATCH_ACCOUNT=a", "a"),
        ("export SBATCH_ACCOUNT='a b'  # a note", "a b"),
        ('  SBATCH_ACCOUNT="a$"', ""),
        ("SBATCH_ACCOUNT=$(id)", ""),
        ("SBATCH_ACCOUNT=a; rm x", ""),
        ("# SBATCH_ACCOUNT=a", ""),
        ("SBATCH_ACCOUNT=a\nSBATCH_ACCOUNT=b", "b"),
        ("if x; then SBATCH_ACCOUNT=a; fi", ""),
        ("SBATCH_TIMELIMIT=1", ""),
        ("", ""),
    ],
)
def test_site_sh_only_plain_assignments_count(site_sh, line, value):
    site_sh(line + "\n")
    assert spec_of("--", "x").account == value


def test_site_sh_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read") as caught:
        site.completed(JobSpec(), {"HPCTRAIN_SITE": str(tmp_path)})
    assert caught.value.code == "HT802"
