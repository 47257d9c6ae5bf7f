"""Submission of a job by sbatch."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster import slurm
from hpctrain.cluster.texts import listed
from hpctrain.errors import UsageError
from hpctrain.jobs import job_checks, job_environment, job_paths, script, units
from hpctrain.jobs.spec import JobSpec

__all__ = ["send", "size_notes", "text", "trial"]


def send(spec: JobSpec, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """Submit a job by sbatch from the current folder.

    Args:
        spec: job with the defaults of its profile and site.
        env: environment of this process.

    Returns:
        The job number, for an array that of the array; and lines to show to the user.

    Raises:
        UsageError: Slurm refuses a value of the job, or the job could not run.
        StartError: this host has no Slurm, or Slurm does not answer.
    """
    notes = [*job_checks.check(spec, env), *size_notes(spec, env)]
    without, host_notes = _without_bad_hosts(spec, env)
    _make_log_folder(spec, env)
    tree, code_notes = _freeze(spec)
    clean, left_out = job_environment.environ(spec, env)
    try:
        answer = _answer(text(without, tree), without, clean)
    except UsageError:
        if without is spec:
            raise
        # It may be that no other nodes fit the job.
        answer, host_notes = _answer(text(spec, tree), spec, clean), []
    if tree:
        from hpctrain.rundir import frozen_code

        frozen_code.note_job(frozen_code.STORE, answer.job, tree)
    notes += [*host_notes, *code_notes, *left_out, *answer.message.splitlines()]
    return answer.job, notes


def size_notes(spec: JobSpec, env: Mapping[str, str]) -> list[str]:
    """Return notes if no partition of a job is large enough; many sites let such a job wait.

    Args:
        spec: job with the defaults of its profile and site.
        env: environment of this process.
    """
    listed = slurm.partitions(env)
    notes = []
    for part in spec.parts:
        names = part.partition.split(",") if part.partition else []
        own = [one for one in listed if one.name in names or (not names and one.default)]
        nodes, cpus = part.nodes + spec.spares, part.tasks * (part.cpus_per_task or 1)
        memory = units.megabytes(part.memory)
        wide = [one for one in own if one.cpus >= cpus and one.memory >= memory]
        counts = {one.name: sum(o.nodes for o in wide if o.name == one.name) for one in own}
        if counts and max(counts.values()) < nodes:
            asked = f"{nodes} nodes" + f" of {cpus} CPUs" * (cpus > 1)
            asked += f" and {part.memory}" * bool(memory)
            sizes = "; ".join(f"{one.name} has {one.size}" for one in own)
            notes.append(f"the job may never start: it asks for {asked}, but {sizes}")
    return notes


def _without_bad_hosts(spec: JobSpec, env: Mapping[str, str]) -> tuple[JobSpec, list[str]]:
    """Return the job without the hosts that had faults lately, and notes for the user."""
    from hpctrain.rundir import host_ledger  # not for a job that is only shown

    avoided = host_ledger.avoided(Path())
    if not avoided or spec.exclude or spec.part or env.get("SBATCH_EXCLUDE"):
        return spec, []
    request = slurm.Request(nodelist=str(spec.extra.get("nodelist", "")))
    needed = spec.nodes + spec.spares
    try:
        hosts = slurm.excludable(avoided, needed, spec.partition, env, request)
    except (slurm.NoAnswerError, UsageError):  # a UsageError for a list that sbatch will refuse
        return spec, []
    if not hosts:
        return spec, []
    note = f"without {', '.join(hosts)}, which had faults lately; to use them again: "
    return replace(spec, exclude=",".join(hosts)), [note + host_ledger.clearing(hosts)]


def _freeze(spec: JobSpec) -> tuple[str, list[str]]:
    """Record the code of a job; return the name of the snapshot and notes for the user."""
    if spec.live:
        return "", []
    from hpctrain.rundir import frozen_code  # slow to import, for hashes and temporary files

    try:
        snapshot = frozen_code.freeze(Path(), frozen_code.STORE, sys.path)
    except (slurm.NoAnswerError, OSError) as error:
        return "", [f"the code is not frozen, so an edit changes the job: {error}"]
    notes = []
    if snapshot.left_out:
        size = frozen_code.LARGEST >> 20
        names = listed(snapshot.left_out)
        notes.append(f"not in the frozen code, as larger than {size} MB: {names}")
    return snapshot.tree, notes


def trial(spec: JobSpec, env: Mapping[str, str]) -> str:
    """Return the answer of `sbatch --test-only`, which submits nothing; empty without sbatch.

    Raises:
        UsageError, StartError: as in `send`.
    """
    if shutil.which("sbatch", path=env.get("PATH", os.defpath)) is None:
        return ""
    return _answer(text(spec), spec, job_environment.environ(spec, env)[0], "--test-only").message


def text(spec: JobSpec, tree: str = "") -> str:
    """Return the script of a job that is submitted here; see `script.render`.

    Its log is among the runs, as their folder is made here. Scripts for sbatch do without a folder:
    Slurm ends a job without a message if the folder of its log does not exist.
    """
    return script.render(replace(spec, output=job_paths.pattern(spec)), tree)


def _answer(script_text: str, spec: JobSpec, env: Mapping[str, str], *options: str) -> slurm.Answer:
    # Through standard input: a file could change before the job starts.
    try:
        answer = slurm.sbatch(script_text.encode(errors="surrogateescape"), env, options)
    except slurm.NoAnswerError as error:
        instead = "hpctrain run … (starts the ranks on this machine)"
        raise slurm.absent(str(error), instead) from None
    if answer.code or not (answer.job or options):
        from hpctrain.jobs import sbatch_errors  # only on an error, as it is slow

        raise sbatch_errors.refused(answer.message, spec, env)
    return answer


def _make_log_folder(spec: JobSpec, env: Mapping[str, str]) -> None:
    folder = job_paths.log_folder(spec, env)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "HT809.cannot-create-log-folder", pattern=job_paths.pattern(spec), error=error
        ) from None
