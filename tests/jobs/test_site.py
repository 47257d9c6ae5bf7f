"""The settings for all jobs: site.sh, profiles, and their precedence."""

import argparse
import subprocess

import fake_slurm
import pytest

from hpctrain import cli
from hpctrain.cli import job_options
from hpctrain.cluster import slurm
from hpctrain.errors import UsageError
from hpctrain.jobs import site
from hpctrain.jobs.spec import JobSpec


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Return a function that writes user settings; its `env` makes them apply."""
    env = {"HOME": str(tmp_path)}

    def write(site_sh="", config=""):
        folder = tmp_path / ".config" / "hpctrain"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "site.sh").write_text(site_sh)
        (folder / "config.toml").write_text(config)

    write.env = env
    return write


def spec_of(env, *words):
    parser = argparse.ArgumentParser()
    job_options.add_job_options(parser)
    return job_options.gather(parser.parse_args([*words]), env)


JZ = """
[cluster.jz]
account = "profile"
qos = "profile"
modules = ["a"]
environment = {A = "1"}
"""


def test_site_profile_shell_file_and_option_precedence(settings, tmp_path):
    everywhere = "\n".join(f"export SBATCH_{name}=site" for name in ("ACCOUNT", "PARTITION", "QOS"))
    settings(everywhere, JZ)
    (tmp_path / "job.toml").write_text(
        'command = "python t.py"\ncluster = "jz"\nqos = "file"\nenvironment = {B = "2"}\n'
    )
    env = {**settings.env, "SBATCH_PARTITION": "shell"}
    found = spec_of(env, "--env", "C=3", str(tmp_path / "job.toml"))
    spec = found.spec
    assert (spec.account, spec.partition, spec.qos) == ("profile", "shell", "file")
    assert spec.modules == ("a",)
    assert spec.environment == {"A": "1", "B": "2", "C": "3"}
    assert found.sources["partition"] == "the shell's SBATCH_*"
    assert spec_of(env, str(tmp_path / "job.toml"), "--qos", "option").spec.qos == "option"
    assert spec_of(settings.env, "--", "x").spec.account == "site"
    # A saved JOB.toml has the values of the job, and not those of the site.
    assert (
        found.without_profile.account,
        found.without_profile.qos,
        found.without_profile.cluster,
    ) == ("", "file", "jz")


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
def test_site_sh_only_plain_assignments_count(settings, line, value):
    settings(line + "\n")
    assert spec_of(settings.env, "--", "x").spec.account == value


def test_cluster_profile_reports_all_mistakes(settings):
    settings(config='[cluster.jz]\ngpu = 4\nnodes = "many"\ntime = "soon"\n')
    with pytest.raises(UsageError) as caught:
        spec_of(settings.env, "--cluster", "jz", "--", "x")
    assert "[cluster.jz] of " in caught.value.found
    for part in ("3 values", "'gpu'", "nodes = 'many'", "time = 'soon'"):
        assert part in caught.value.found


def test_cluster_profile_unknown_lists_known(settings):
    settings(config="[cluster.jz]\n[cluster.lumi]\n")
    with pytest.raises(UsageError, match="jz, lumi"):
        spec_of(settings.env, "--cluster", "ja", "--", "x")
    with pytest.raises(UsageError, match="a table of that name"):
        spec_of({"HOME": "/nowhere"}, "--cluster", "jz", "--", "x")


def test_option_replaces_conflicting_profile_field(settings):
    settings(config='[cluster.jz]\nvenv = ".venv"\n')
    spec = spec_of(settings.env, "--cluster", "jz", "--conda", "torch", "--", "x").spec
    assert (spec.venv, spec.conda) == ("", "torch")


def test_job_spec_in_python_uses_site_and_profile(settings):
    settings("SBATCH_QOS=site\n", JZ)
    spec = site.completed(JobSpec(command="x", cluster="jz", account="own"), settings.env)
    assert (spec.account, spec.qos, spec.modules) == ("own", "profile", ("a",))


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = fake_slurm.FakeSlurm(tmp_path).installed(monkeypatch)
    made.command("sinfo", "main*|infinite|4|up|(null)\nv100|2:00:00|8|up|gpu:v100:4")
    return made


def test_site_write_lists_partitions_and_never_overwrites(fake, tmp_path, capsys):
    path = site.script(fake.env)
    assert cli.main(["site"]) == 0
    assert not path.exists()
    assert cli.main(["site", "--write"]) == 0
    text = path.read_text()
    assert "\n# export SBATCH_PARTITION=main # up to infinite: 4 nodes with no GPU\n" in text
    assert "\n# export SBATCH_PARTITION=v100 # up to 2:00:00: 8 nodes with gpu:v100:4\n" in text
    assert "\n# SBATCH_ACCOUNT=PROJECT\n" in text
    path.write_text("SBATCH_ACCOUNT=physics\n")
    assert cli.main(["site", "--write"]) == 2
    assert path.read_text() == "SBATCH_ACCOUNT=physics\n"
    assert "is not overwritten" in capsys.readouterr().err


def test_site_write_lists_accounts(fake):
    fake.command("sacctmgr", "b", more='case "$*" in *assoc*) printf "a\\nb\\n"; exit;; esac')
    assert cli.main(["site", "--write"]) == 0
    text = site.script(fake.env).read_text()
    assert "bashrc" not in text  # in .bashrc it would override every script
    assert "\nexport SBATCH_ACCOUNT=b\n# export SBATCH_ACCOUNT=a\n" in text
    assert spec_of(fake.env, "--", "x").spec.account == "b"


def test_site_sh_text_from_slurm_is_quoted(fake, tmp_path, monkeypatch, capfdbinary):
    canary = tmp_path / "canary"
    line = f"x\ntouch {canary} #"
    monkeypatch.setenv("HPCTRAIN_SITE", str(tmp_path / f"{line}.sh"))
    monkeypatch.setattr(
        "hpctrain.cluster.slurm.partitions",
        lambda env: [slurm.Partition(line, True, line, line, line, True)],
    )
    monkeypatch.setattr("hpctrain.cluster.slurm.accounts", lambda user, env: [line, line])
    assert cli.main(["site"]) == 0
    done = subprocess.run(
        ["bash"], input=capfdbinary.readouterr().out + b'\necho "$SBATCH_ACCOUNT"',
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.decode() == f"{line}\n"
    assert not canary.exists()


def test_site_without_slurm_is_an_error(fake, capsys):
    fake.command("sinfo", error="sinfo: error: Unable to contact slurm controller", code=1)
    assert cli.main(["site", "--write"]) == 1
    assert "Unable to contact" in capsys.readouterr().err
    assert not site.script(fake.env).exists()
