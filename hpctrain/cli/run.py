"""`hpctrain run`: start ranks on this machine, or with --elastic on several machines."""

import argparse
import os
import sys
from pathlib import Path

from hpctrain import launch
from hpctrain.errors import UsageError

__all__ = ["add"]

_ELASTIC = "hpctrain run --elastic --hosts node1:2,node2:2 SCRIPT"
_MANUAL = "hpctrain run --nodes 2 --node-rank 0 --main-address HOST --main-port 8888 SCRIPT"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.allow_abbrev = False  # options after the command belong to it
    parser.description = (
        "Start a Python script once for each rank, on this machine. Each output line "
        "begins with the number of its rank. Several nodes are simulated on this machine, unless "
        "--node-rank is given: then type the same command on each of several real hosts, with the "
        "--node-rank of the host."
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument(
        "--nproc-per-node",
        "--ntasks-per-node",
        default="auto",
        metavar="M",
        help="ranks of each node: a number, a list such as 2,1, or auto (default): one for each "
        "GPU, or one if there is no GPU",
    )
    parser.add_argument(
        "--as",
        dest="style",
        choices=list(launch.AS),
        help="launcher whose environment variables the ranks get (default: hpctrain)",
    )
    real = parser.add_argument_group("one of several real hosts")
    real.add_argument("--node-rank", type=int, metavar="I", help="number of this host, from 0")
    real.add_argument("--main-address", metavar="HOST", help="name or address of host 0")
    real.add_argument(
        "--main-port", type=int, metavar="PORT", help="free port on host 0, from 1 to 65535"
    )
    elastic = parser.add_argument_group("on hosts of which some may be lost")
    elastic.add_argument(
        "--elastic",
        action="store_true",
        help="start the ranks on all hosts, and again on the remaining hosts if one is lost; "
        "SCRIPT has to resume (--elastic --global-batch N among its own options)",
    )
    elastic.add_argument(
        "--hosts",
        metavar="HOST:N,…",
        help="hosts, and ranks on each, which horovodrun starts over ssh (default: hosts of the "
        "Slurm job, by srun)",
    )
    elastic.add_argument(
        "--min-nproc", type=int, metavar="N", help="smallest number of ranks to go on (default: 1)"
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m"
    )
    parser.add_argument("script", metavar="SCRIPT", help="Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of SCRIPT"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    if arguments.elastic:
        return _elastic(arguments)
    for name in ("hosts", "min_nproc"):
        if getattr(arguments, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError("HT804", f"{flag} without --elastic", "both", _ELASTIC)
    nodes = 1 if arguments.nodes is None else arguments.nodes
    if nodes < 1:
        raise UsageError("HT804", f"--nodes {nodes}", "a number from 1 on", "--nodes 1")
    host = _real_host(arguments)
    if not arguments.module:
        _check_script(arguments.script)
    gpus = launch.gpus_of(os.environ)
    counts = launch.layout(nodes, arguments.nproc_per_node, len(gpus), simulated=host is None)
    style = arguments.style or "hpctrain"
    return launch.start(_command(arguments), counts, os.environ, style, gpus, host)


def _command(arguments: argparse.Namespace) -> list[str]:
    module = ["-m"] if arguments.module else []
    return [sys.executable, *module, arguments.script, *arguments.arguments]


def _elastic(arguments: argparse.Namespace) -> int:
    """Start on the hosts of `--hosts` over ssh, else on the hosts of the Slurm job."""
    for name in ("nodes", "style", "node_rank", "main_address", "main_port"):
        if getattr(arguments, name) is not None:
            flag = "--as" if name == "style" else "--" + name.replace("_", "-")
            raise UsageError(
                "HT804", f"--elastic with {flag}", "--hosts, or a Slurm job's own", _ELASTIC
            )
    if not arguments.module:
        _check_script(arguments.script)
    hosts: launch.OverSsh | launch.InSlurm
    if arguments.hosts is not None:
        gpus = launch.gpus_of(os.environ)
        (slots,) = launch.layout(1, arguments.nproc_per_node, len(gpus))
        hosts = launch.OverSsh(launch.parse(arguments.hosts, slots))
    elif os.environ.get("SLURM_JOB_ID"):
        hosts = launch.InSlurm(os.environ)
    else:
        raise UsageError(
            "HT804", "--elastic without --hosts, outside of a Slurm job", "hosts", _ELASTIC
        )
    name = arguments.script.rpartition(".")[2] if arguments.module else arguments.script
    directory = launch.run_directory(arguments.arguments, name, os.environ)
    min_nproc = 1 if arguments.min_nproc is None else arguments.min_nproc
    if min_nproc < 1:
        raise UsageError("HT804", f"--min-nproc {min_nproc}", "a number from 1 on", "--min-nproc 1")
    return launch.start_elastic(hosts, _command(arguments), directory, os.environ, min_nproc)


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        found = f"{script} is no file but a folder" if script else "an empty name for the script"
    elif not path.exists():
        found = f"{script} is no file"
    elif not os.access(path, os.R_OK):
        found = f"{script} cannot be read by this user"
    else:
        return
    form = "-m hpctrain" if path.name == "hpctrain" else "SCRIPT"
    raise UsageError(
        "HT805", found, "a Python script", f"hpctrain run [options] {form} [its arguments]"
    )


def _real_host(arguments: argparse.Namespace) -> launch.RealHost | None:
    """Return this machine as one of several real hosts; None if it simulates all of them.

    Raises:
        UsageError: options are missing, or do not fit together.
    """
    options = {
        "--node-rank": arguments.node_rank,
        "--main-address": arguments.main_address,
        "--main-port": arguments.main_port,
    }
    if all(value is None for value in options.values()):
        return None
    missing = [
        name for name, value in {"--nodes": arguments.nodes, **options}.items() if value is None
    ]
    if missing:
        set_options = " and ".join(name for name, value in options.items() if value is not None)
        raise UsageError(
            "HT804",
            f"{set_options} without {' and '.join(missing)}",
            "all of them for one of several real hosts, or --nodes alone to simulate hosts here",
            _MANUAL,
        )
    if arguments.style is not None:
        raise UsageError(
            "HT804",
            f"--as {arguments.style} together with --node-rank",
            "one of them: --as simulates all hosts on this machine",
            _MANUAL,
        )
    if not 0 <= arguments.node_rank < arguments.nodes:
        raise UsageError(
            "HT804",
            f"--node-rank {arguments.node_rank} of --nodes {arguments.nodes}",
            f"a node rank from 0 to {arguments.nodes - 1}, another one on each host",
            _MANUAL,
        )
    if not arguments.main_address.strip():
        raise UsageError("HT804", "an empty --main-address", "name or address of host 0", _MANUAL)
    if not 1 <= arguments.main_port < 1 << 16:
        raise UsageError(
            "HT804", f"--main-port {arguments.main_port}", "a port from 1 to 65535", _MANUAL
        )
    return launch.RealHost(arguments.node_rank, arguments.main_address, arguments.main_port)
