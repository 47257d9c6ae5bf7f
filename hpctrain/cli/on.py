"""`hpctrain on`: run a command of hpctrain on the login host of a cluster, over ssh."""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpctrain.cli.terminal import INTERRUPTED, note, put
from hpctrain.cluster.commands import NoAnswerError
from hpctrain.errors import HpctrainError, StartError, UsageError, exit_codes
from hpctrain.jobs import over_ssh

__all__ = ["add"]

_SECONDS_FOR_ALL = 2.0
_WITH_A_TERMINAL = ("top",)
_HERE = ("pull",)
_COMMANDS = ("submit", "status", "logs", "top", "cancel", "requeue", "lint", "diff", "doctor")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.usage = (
        "hpctrain on CLUSTER COMMAND ...\n"
        "       hpctrain on CLUSTER pull RUN\n"
        "       hpctrain on --all status ..."
    )
    parser.description = (
        f"Runs a command ({', '.join(_COMMANDS)}) in the project's folder on the login host of a "
        "cluster. CLUSTER is a name in ~/.config/hpctrain/clusters.toml, or a host for ssh. "
        "submit first sends what has changed in the project here; pull copies a run here, without "
        "its checkpoints. --all asks all clusters of the file, and waits two seconds for each."
    )
    parser.add_argument("--all", action="store_true", help="ask all clusters of the file")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    words = arguments.words
    if arguments.all:
        return _ask_all(words or ["status"])
    if len(words) < 2 or words[1] not in (*_COMMANDS, *_HERE):
        raise UsageError(
            "HT804",
            f"hpctrain on {' '.join(words)}",
            f"a cluster, and one of {', '.join((*_COMMANDS, *_HERE))}",
            "hpctrain on login.example.org status",
        )
    cluster = over_ssh.find(words[0], os.environ)
    command = words[1:]
    if command[0] == "pull":
        return _pull(cluster, command[1:])
    if command[0] == "submit":
        try:
            count = over_ssh.send_code(cluster, os.environ)
        except NoAnswerError as error:
            raise StartError("HT826", f"the code cannot be sent: {error}", "git") from None
        note(f"{cluster.name}: {count} changed file{'s' * (count != 1)} sent to {cluster.folder}")
    terminal = command[0] in _WITH_A_TERMINAL or "-f" in command or "--follow" in command
    terminal = terminal and sys.stdin.isatty()
    try:
        return over_ssh.run_there(cluster, command, os.environ, terminal=terminal).returncode
    except KeyboardInterrupt:
        return INTERRUPTED


def _pull(cluster: over_ssh.Cluster, names: list[str]) -> int:
    if len(names) != 1:
        raise UsageError("HT804", f"pull {' '.join(names)}", "one run, or the number of its job")
    words = ["status", "--json", names[0]]
    done = over_ssh.run_there(cluster, words, os.environ, capture=True)
    sys.stderr.write(done.stderr.decode(errors="replace"))
    if done.returncode:
        return done.returncode
    found = [job["run"]["path"] for job in json.loads(done.stdout)["jobs"] if job["run"]]
    for path in found:
        over_ssh.pull(cluster, path, Path("runs"), os.environ)
        sys.stdout.write(f"{Path('runs', Path(path).name)}\n")
    if not found:
        raise UsageError("HT818", f"{names[0]} has no run on {cluster.name}", "a job with a run")
    return exit_codes.DONE


def _ask_all(words: list[str]) -> int:
    """Run a command on all clusters at once; a cluster that does not answer is told."""
    if words[0] != "status":
        raise UsageError("HT804", f"hpctrain on --all {words[0]}", "status")
    clusters = over_ssh.clusters(os.environ)
    if not clusters:
        raise UsageError(
            "HT829",
            "there are no clusters in ~/.config/hpctrain/clusters.toml",
            "a table for each cluster",
            'the lines [alps] and host = "login.example.org"',
        )

    def ask(cluster: over_ssh.Cluster) -> tuple[str, str]:
        try:
            done = over_ssh.run_there(
                cluster, words, os.environ, capture=True, seconds=_SECONDS_FOR_ALL
            )
        except HpctrainError as error:
            return "", f"{error.found}\n"
        return done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    with ThreadPoolExecutor(len(clusters)) as pool:
        for cluster, (output, errors) in zip(clusters, pool.map(ask, clusters), strict=True):
            put(f"{cluster.name} ({cluster.host})\n{output}")
            sys.stdout.flush()
            sys.stderr.write(errors)
    return exit_codes.DONE
