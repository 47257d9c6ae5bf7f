"""`hpctrain explain`: show the launcher's values, or the meaning of an error's code."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.cluster import system
from hpctrain.cluster.launchers import Process, Reading, Start, readings, survey
from hpctrain.cluster.texts import nearest, printable
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError, UsageError

__all__ = ["add", "as_json"]

_SECONDS_TO_MEET = 30.0
# Columns of the table of ranks, with their keys in the entries.
_OF_A_RANK = {"LOCAL RANK": "local_rank", "CORES": "cores", "GPUS": "gpus", "PID": "pid"}
_FIELDS = [field.name for field in dataclasses.fields(World) if field.name != "launcher"]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser.description = (
        "Shows what the launcher of this process has set, each value with its "
        "variable, and the variables that are not used. Put it in place of your script: "
        "srun hpctrain explain shows rank 0, and a table of all ranks. "
        "With the code of an error, it shows meaning, causes and fix."
    )
    parser.add_argument("code", nargs="?", metavar="CODE", help="code of an error, such as HT101")
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument(
        "--strict", action="store_true", help="treat a warning as an error, with exit code 2"
    )
    parser.set_defaults(command=_main)


def _main(arguments: argparse.Namespace) -> int:
    if arguments.code is not None:
        return _explain_code(arguments.code, arguments.json)
    process = Process.current()
    variables = list(readings({**os.environ, **process.facts()}))
    start = failure = None
    try:
        start = survey(os.environ, process)
    except HpctrainError as error:
        failure = error
    if arguments.json:
        text = json.dumps(as_json(start, variables)) + "\n"
    else:
        text = _of_all(start, variables) if start else _table("found", variables)
    sys.stdout.write(text)
    if failure:
        raise failure
    return 2 if arguments.strict and _warnings(start) else 0


def _explain_code(argument: str, as_json: bool) -> int:
    """Print the entry of an error's code.

    Raises:
        UsageError: there is no such code.
    """
    from hpctrain.errors.codes import codes

    name = argument.upper()
    entries = codes()
    if name not in entries:
        first, last, meant = min(entries), max(entries), nearest(name, entries)
        fix = f"hpctrain explain {meant}" if meant else ""
        raise UsageError("HT804.unknown-code", argument=argument, first=first, last=last, fix=fix)
    code = entries[name]
    if as_json:
        entry = {"meaning": code.meaning, "causes": code.causes, "fixes": code.fixes}
        text = json.dumps({"code": name, **entry})
    else:
        causes = [f"  cause:    {cause}" for cause in code.causes]
        fixes = [f"  {'or: ' if n else 'fix:'}      {fix}" for n, fix in enumerate(code.fixes)]
        text = "\n".join([f"{name}: {code.meaning}", *causes, *fixes])
    sys.stdout.write(text + "\n")
    return 0


def as_json(start: Start | None, variables: Sequence[Reading]) -> dict[str, Any]:
    """Return the output of `--json`; unknown values are None.

    Args:
        start: start of this process; None if the environment contradicts itself.
        variables: all variables that contain a value of the world.
    """
    world, job = (start.world, start.allocation) if start else (None, None)
    point = start.rendezvous_point if start else None
    return {
        **{field.name: getattr(world, field.name, None) for field in dataclasses.fields(World)},
        "main_address": point.address if point else None,
        "main_port": point.port if point else None,
        "job_id": job.label if job else None,
        "restart_count": job.restart_count if job else None,
        "sources": {f: c.source for f, c in start.claims.items()} if start else {},
        "ignored": [
            dataclasses.asdict(reading) for reading in variables if reading.reason or not start
        ],
        "warnings": [
            {"code": error.code, "found": error.found, "fixes": list(error.fixes)}
            for error in _warnings(start)
        ],
    }


def _warnings(start: Start | None) -> list[UsageError]:
    """Return the errors that a session would raise as it opens, and what it would warn of."""
    from hpctrain.cluster import visible_gpus

    if start is None:
        return []
    found, world = [error for error in (start.stray, start.waste) if error], start.world
    if not found and world.local_world_size is not None:
        # A variable may also be set where there is no GPU.
        seen = len(_gpus(os.environ)) if visible_gpus.here() else 0
        nodes = {start.rendezvous_point.host: (world.local_world_size, seen)}
        idle = visible_gpus.idle(world.launcher, start.allocation, nodes)
        found += [idle] if idle else []
    return found


def _gpus(env: Mapping[str, str]) -> Sequence[str]:
    """Return the GPUs that this process may use, without asking torch."""
    from hpctrain.cluster import visible_gpus

    gpus = visible_gpus.visible(env)
    return gpus.names if gpus else visible_gpus.here()


def _of_all(start: Start, variables: Sequence[Reading]) -> str:
    """Return the output without `--json`: at rank 0 with a table of all ranks, at others nothing.

    If the ranks do not find each other, each shows its own values.
    """
    own = _text(start, variables)
    if start.world.world_size == 1 or start.stray:
        return own
    # What one process does not need.
    from hpctrain.cli.terminal import note
    from hpctrain.jobs.job_watching import aligned
    from hpctrain.rendezvous import Answer, Roster, meet

    rows: list[Sequence[str]] = []

    def compare(roster: Roster) -> Answer:
        for rank, host in enumerate(roster.host_of_rank):
            own = [roster.entries[rank][name] for name in _OF_A_RANK.values()]
            rows.append([str(rank), printable(roster.hosts[host]), str(host), *map(printable, own)])
        return Answer()

    point = start.rendezvous_point
    # Not the ports of a training that may run beside it; the launcher's store needs torch.
    point = dataclasses.replace(point, key=f"{point.key}/explain", store=None)
    try:
        met = meet(
            start.world,
            point,
            _of_this_rank(start.world, os.environ),
            _SECONDS_TO_MEET,
            note,
            check=compare,
            option="",
        )
    except HpctrainError as error:
        return f"{own}warning: {error}\n" if start.world.rank == 0 else own
    if met.listener is not None:
        met.listener.close()
    if start.world.rank:
        return ""
    return f"{own}ranks:\n{aligned([('RANK', 'HOST', 'NODE', *_OF_A_RANK), *rows])}"


def _of_this_rank(world: World, env: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of this rank in the table, by the values of `_OF_A_RANK`."""
    return {
        "local_rank": str(world.local_rank),
        "cores": str(len(system.cores())),
        "gpus": ",".join(_gpus(env)),
        "pid": str(os.getpid()),
    }


def _text(start: Start, variables: Sequence[Reading]) -> str:
    """Return the output without `--json`."""
    world = start.world
    lines = [f"launcher          {world.launcher}    ({start.launcher.reason})"]
    for field in _FIELDS:
        value = getattr(world, field)
        if field == "hosts" and value:
            value = ",".join(value)
        source = "set by the rendezvous" if value is None else "follows from the other values"
        source = start.claims[field].source if field in start.claims else source
        lines.append(f"{field:<17} {'?' if value is None else printable(value)}    {source}")
    if world.world_size > 1:
        lines.append(f"rendezvous        {printable(_rendezvous_address(start))}")
    if start.allocation is not None:
        job = start.allocation
        label = printable(job.label)
        lines.append(f"job               {job.scheduler} {label}, restart {job.restart_count}")
    for error in _warnings(start):
        lines += [f"warning: {error}"]
    ignored = [reading for reading in variables if reading.reason]
    return "\n".join(lines) + "\n" + _table("ignored", ignored)


def _rendezvous_address(start: Start) -> str:
    """Return the place where the ranks search for rank 0."""
    point = start.rendezvous_point
    if start.world.on_one_host:
        return "this host"
    if point.address and point.sure:
        return point.address
    hosts = dict.fromkeys((*([point.address] if point.address else []), *point.others))
    if hosts:
        return "one of " + ", ".join(hosts)
    return (
        f"address from {point.store.kind}"
        if point.store
        else "address from a file in the run directory"
    )


def _table(title: str, readings: Sequence[Reading]) -> str:
    if not readings:
        return ""
    rows = [f"{reading.variable}={printable(reading.value)}" for reading in readings]
    width = max(map(len, rows))
    lines = [
        f"  {row:<{width}}  {reading.field} ({reading.launcher})"
        + (f": {reading.reason}" if reading.reason else "")
        for row, reading in zip(rows, readings, strict=True)
    ]
    return "\n".join([f"{title}:", *lines]) + "\n"
