"""What has changed between the job of a run and the previous job of its name: options and code."""

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.cluster import slurm
from hpctrain.cluster.texts import printable, shortened
from hpctrain.jobs.job_facts import label_of, last_start
from hpctrain.rundir import frozen_code

__all__ = ["since_previous"]

_LONGEST = 300  # characters of the line
_DIGITS = 10  # of a commit that are shown


def since_previous(run: Path) -> str:
    """Return in one line how the command and the code of a run differ from the previous ones.

    Compare the newest launches of both as recorded in their directories; git is not called, as a
    folder of another user could make it run a program. Empty if nothing differs, if there is no
    earlier run of that name in the same folder, or if a run records no launch.

    Args:
        run: run directory, NAME-LABEL; a task of an array is compared with the same task.
    """
    label = label_of(run)
    before = _previous(run, label)
    old, new = last_start(before) if before else {}, last_start(run)
    if before is None or not old or not new:
        return ""
    changes = [*_options(_words(old), _words(new)), *_code(before, run, old, new)]
    text = f"since job {label_of(before)}: {', '.join(changes)}"
    return shortened(printable(text), _LONGEST) if changes else ""


def _previous(run: Path, label: str) -> Path | None:
    """Return the directory of the newest earlier job with the same name and array task."""
    if not label or not run.name.endswith(f"-{label}"):
        return None
    name, (number, _, task) = run.name.removesuffix(label), label.partition("_")
    found: dict[int, Path] = {}
    for path in run.parent.glob(f"{glob.escape(name)}*"):
        other, _, other_task = path.name.removeprefix(name).partition("_")
        if slurm.is_label(other) and other_task == task:
            found[int(other)] = path
    earlier = [one for one in found if one < int(number)]
    return found[max(earlier)] if earlier else None


def _words(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a command with their values; without a name, the words before them."""
    name, found, command = "", dict[str, str](), start.get("command")
    for word in map(str, command[1:] if isinstance(command, list) else ()):
        if word.startswith("-") and not word[1:2].isdigit():
            name, _, value = word.partition("=")
            found[name] = value
        else:
            found[name] = f"{found.get(name, '')} {word}".strip()
    return found


def _options(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in {**old, **new}:
        if name not in old:
            yield f"{name} {new[name]}".strip() + " added"
        elif name not in new:
            yield f"{name} {old[name]}".strip() + " removed"
        elif old[name] != new[name]:
            yield f"{name} {old[name]} -> {new[name]}".strip()


def _code(before: Path, run: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    commits = [str(start.get("commit") or "none") for start in (old, new)]
    store = run.parent / frozen_code.STORE.name
    trees = [
        frozen_code.tree_of_job(store, label_of(path).partition("_")[0]) for path in (before, run)
    ]
    if commits[0] != commits[1]:
        short = [one[:_DIGITS] + "-dirty" * one.endswith("-dirty") for one in commits]
        yield f"commit {short[0]} -> {short[1]}"
    elif None not in trees and trees[0] != trees[1]:
        yield "files that are not committed"
