"""hpctrain on CLUSTER: over a real sshd on this machine, to homes and folders of their own."""

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fake_slurm
import pytest
from fake_slurm import job
from processes import until
from terminals import Terminal

from hpctrain import cli
from hpctrain.errors import StartError, UsageError
from hpctrain.jobs import over_ssh

SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/pid
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
CONFIG = """
Host login
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
Host refused
    HostName 127.0.0.1
    Port {port}
    User nobody
    IdentityFile {folder}/other
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
Host down
    HostName 127.0.0.1
    Port {closed}
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def sshd(tmp_path_factory, lacking):
    """Return a folder with an sshd that runs, keys, and a config for ssh."""
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if program is None or os.geteuid():
        lacking("ssh", "no sshd, or not root")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    port = free_port()
    values = {"folder": folder, "port": port, "user": getpass.getuser(), "closed": free_port()}
    (folder / "sshd_config").write_text(SSHD.format(**values))
    (folder / "config").write_text(CONFIG.format(**values))
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "sshd_config")])
    try:
        until(lambda: listens(port))
        yield folder
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def there(sshd, tmp_path, monkeypatch):
    """Return the home on the cluster; its commands of Slurm are fakes.

    A wrapper of ssh adds the config of the tests, and sets the home on the other side.
    """
    home = tmp_path / "home-there"
    home.mkdir()
    here = tmp_path / "home-here"
    programs = tmp_path / "programs"
    programs.mkdir()
    here.mkdir()
    wrapper = programs / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {sshd}/config "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / ".config"))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield home
        for kept in Path(short).glob("*/*"):
            command = ["ssh", f"-oControlPath={kept}", "-O", "exit", "login"]
            subprocess.run(command, capture_output=True, check=False)


@pytest.fixture
def fake(there):
    made = fake_slurm.FakeSlurm(there)
    made.command("sbatch", "70")
    return made


@pytest.fixture
def alps(there, fake):
    """Write clusters.toml with one cluster; return a function that adds others."""
    file = Path(os.environ["XDG_CONFIG_HOME"], "hpctrain", "clusters.toml")
    file.parent.mkdir(parents=True)

    def add(name, host="login", python=sys.executable, **more):
        setup = f"export HOME={shlex.quote(str(there))} PATH={fake.folder}:/usr/bin:/bin"
        entry = {"host": host, "python": python, "folder": "~/project", "setup": setup, **more}
        with file.open("a") as output:
            output.write(f"[{name}]\n")
            output.writelines(f"{key} = '''{value}'''\n" for key, value in entry.items())

    add("alps")
    return add


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return the folder of a project here."""
    folder = tmp_path / "project"
    folder.joinpath("package").mkdir(parents=True)
    folder.joinpath("train.py").write_text("print(1)\n")
    folder.joinpath("package/two words.py").write_text("two = 2\n")
    folder.joinpath(".gitignore").write_text("data\n")
    folder.joinpath("data").write_text("not sent")
    monkeypatch.chdir(folder)
    subprocess.run(["git", "init", "-q"], check=True)
    return folder


def on(capfd, *words, code=0):
    assert cli.main(["on", *words]) == code
    return capfd.readouterr()


def test_commands_of_a_cluster_over_one_connection(alps, fake, there, project, capfd):
    fake.jobs(job("70", UserID=str(os.getuid()), WorkDir=str(there / "project")))
    log = there / "project/runs/train-70.log"
    log.parent.mkdir(parents=True)
    log.write_text("0: one\n1: two\n")
    first = on(capfd, "alps", "status")
    assert first.out.splitlines()[1].split()[:3] == ["70", "train", "running"]
    assert on(capfd, "alps", "logs", "70", "--rank", "1").out == "two\n"
    fake.command("scancel")
    assert "70 (train) is cancelled" in on(capfd, "alps", "cancel", "train").out
    (kept,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("*/*")
    assert kept.is_socket()
    begin = time.monotonic()
    on(capfd, "alps", "status")
    assert time.monotonic() - begin < 10
    (client,) = there.glob(".cache/hpctrain/client-*")
    assert (client / "hpctrain/cli/status.py").is_file()
    assert on(capfd, "alps", "status", "none", code=2).err.count("neither a job nor a run") == 1


def test_submit_sends_what_has_changed(alps, fake, there, project, capfd):
    copy = there / "project"
    words = ("alps", "submit", "--live", "--time", "5m", "--", "python3", "train.py")
    shown = on(capfd, *words)
    assert shown.out == "70\n"
    assert "alps: 3 changed files sent to ~/project" in shown.err
    assert (copy / "package/two words.py").read_text() == "two = 2\n"
    assert not (copy / "data").exists()
    (copy / "own data").write_text("stays")
    (project / "train.py").write_text("print(2)\n")
    (project / "package/two words.py").unlink()
    assert "alps: 2 changed files sent" in on(capfd, *words).err
    assert (copy / "train.py").read_text() == "print(2)\n"
    assert not (copy / "package/two words.py").exists()
    assert (copy / "own data").read_text() == "stays"
    assert "alps: 0 changed files sent" in on(capfd, *words).err
    shutil.rmtree(copy)
    assert "alps: 2 changed files sent" in on(capfd, *words).err


def test_submit_from_a_folder_of_the_project_is_refused(alps, there, project, monkeypatch, capfd):
    monkeypatch.chdir(project / "package")
    shown = on(capfd, "alps", "submit", "--", "python3", "train.py", code=2)
    assert f"{project}/package is a folder in the project {project}" in shown.err
    assert not (there / "project").exists()


def test_folder_of_a_cluster_is_made_by_the_first_submit(alps, fake, there, project, capfd):
    fake.jobs(job("70", UserID=str(os.getuid()), WorkDir="/nowhere"))
    assert "70" in on(capfd, "alps", "status").out
    assert not (there / "project").exists()
    alps("wrong", folder="/proc/nothing")
    with pytest.raises(StartError, match="its folder /proc/nothing cannot be made"):
        over_ssh.send_code(over_ssh.find("wrong", os.environ), os.environ)


@pytest.mark.e2e
def test_top_of_a_cluster_in_a_terminal(alps, fake, there, capfd):
    fake.jobs(job("70", UserID=str(os.getuid()), WorkDir="/nowhere"))
    with Terminal("on", "alps", "top") as terminal:
        terminal.shows("running")
        terminal.press(b"c")
        terminal.shows("cancel 70? y or n")
        terminal.press(b"n")
        terminal.press(b"q")
        assert terminal.process.wait(30) == 0
        assert terminal.is_as_before()


def test_pull_copies_a_run_without_its_checkpoints(alps, fake, there, project, capfd):
    run = there / "project/runs/train-70"
    run.joinpath("checkpoints/step-00000001").mkdir(parents=True)
    run.joinpath("run.json").write_text("{}")
    run.joinpath("metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    assert on(capfd, "alps", "pull", "train-70").out == "runs/train-70\n"
    assert (project / "runs/train-70/metrics.jsonl").is_file()
    assert not (project / "runs/train-70/checkpoints").exists()
    on(capfd, "alps", "pull", "none", code=2)
    (project / "runs/train-70/run.json").unlink()
    (project / "runs/train-70/run.json/mine").mkdir(parents=True)
    assert "cannot be written to runs" in on(capfd, "alps", "pull", "train-70", code=1).err


def test_status_of_all_clusters_tells_which_do_not_answer(alps, fake, there, capfd):
    fake.jobs(job("70", UserID=str(os.getuid()), WorkDir="/nowhere"))
    on(capfd, "alps", "status")  # sends hpctrain there
    alps("slow", setup=f"export HOME={there}; sleep 60")
    alps("gone", host="down")
    alps("locked", host="refused")
    begin = time.monotonic()
    shown = on(capfd, "--all", "status")
    assert time.monotonic() - begin < 20
    assert "alps (login)\nJOB  NAME   STATE" in shown.out
    assert "slow (login): it cannot be reached: no answer in time" in shown.err
    assert "gone (down): it cannot be reached: ssh: connect to host" in shown.err
    assert "locked (refused): it cannot be reached: " in shown.err
    assert "Permission denied" in shown.err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"python": "/usr/bin/false"}, "/usr/bin/false on login is missing, or older than 3.11"),
        ({"python": "no-such-python"}, "no-such-python on login is missing"),
        ({"host": "down"}, "it cannot be reached"),
    ],
)
def test_login_host_that_cannot_be_used_is_told(alps, capfd, changed, words):
    alps("wrong", **changed)
    with pytest.raises(StartError, match=words):
        over_ssh.run_there(over_ssh.find("wrong", os.environ), ["status"], os.environ, capture=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[alps]\n", r"\[alps\] has no host"),
        ("[alps]\nhost = 'login'\nuser = 'x'\n", "unexpected keyword argument 'user'"),
        ("alps = 1\n", "cannot be used"),
        ("[alps", "cannot be used"),
    ],
)
def test_wrong_file_of_clusters_is_refused(tmp_path, text, words):
    folder = tmp_path / "hpctrain"
    folder.mkdir()
    folder.joinpath("clusters.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        over_ssh.find("alps", {"XDG_CONFIG_HOME": str(tmp_path)})


def test_names_that_are_no_host_and_commands_that_do_not_go_there(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("-oProxyCommand=x", "a b", "$(x)", ""):
        with pytest.raises(UsageError, match="is no host"):
            over_ssh.find(name, os.environ)
    assert "hpctrain on alps run" in on(capfd, "alps", "run", code=2).err
    assert "there are no clusters" in on(capfd, "--all", "status", code=2).err
    assert over_ssh.find("me@login.example.org", os.environ).host == "me@login.example.org"
