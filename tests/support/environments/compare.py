"""In what a new capture differs from a file, as far as hpctrain reads it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from environments.starts import Start
from hpctrain.cluster import job
from hpctrain.cluster.launchers import LAUNCHERS
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError

# The same form in every capture, another value.
VOLATILE = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HPCTRAIN_MAIN_PORT",
    "HPCTRAIN_START",
    "HYDI_CONTROL_FD",
    "I_MPI_HYDRA_UUID",
    "MASTER_PORT",
    "OMPI_FILE_LOCATION",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_ess_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_orte_jobfam_session_dir",
    "OMPI_MCA_orte_local_daemon_uri",
    "OMPI_MCA_orte_precondition_transports",
    "PALS_APID",
    "PMIX_ID",
    "PMIX_NAMESPACE",
    "PMIX_SERVER_TMPDIR",
    "PMIX_SERVER_URI2",
    "PMIX_SERVER_URI21",
    "PMIX_SERVER_URI3",
    "PMIX_SERVER_URI4",
    "PMIX_SERVER_URI41",
    "PMI_FD",
    "PMI_JOBID",
    "PMI_SHARED_SECRET",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_ID",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_TASK_PID",
    "SUBMITIT_DEBUG_JOB_ID",
    "SUBMITIT_LOCAL_JOB_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
}


def differences(start: Start, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """One line for each difference of two documents of a start: the file's and a new one."""
    found = _unlike(ours, theirs, ("launcher", "how", "layout"))
    if ours["layout"] != theirs["layout"]:
        return found
    for rank, (old, new) in enumerate(zip(ours["ranks"], theirs["ranks"], strict=True)):
        world = World(**start.world(rank))
        asked = names_read(old["env"], world) | names_read(new["env"], world)
        found += [
            f"rank {rank}: {line}"
            for line in (
                *_unlike(old, new, ("world", "argv")),
                *_unlike(_titles(old), _titles(new), ("parents",)),
                *_unlike(_formed(old["env"]), _formed(new["env"]), sorted(asked)),
            )
        ]
    return found


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [
        f"{name}: {ours.get(name)} and now {theirs.get(name)}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _titles(rank: Mapping[str, Any]) -> dict[str, list[str]]:
    return {"parents": [form(title) for title in rank["parents"]]}


def _formed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: form(value) if name in VOLATILE else value for name, value in env.items()}


def form(value: str) -> str:
    """A value without what another start has otherwise: numbers, and words of hex digits."""
    return re.sub(r"\b[0-9a-f]{6,}(?:-[0-9a-f]+)*\b|\d+", "#", value)


def names_read(env: Mapping[str, str], world: World) -> set[str]:
    """The variables that any launcher, or the allocation, asks for in this environment."""
    recorder = Recorder(env)
    with contextlib.suppress(HpctrainError):
        job.detect(recorder)
    for launcher in LAUNCHERS:
        for ask in (
            launcher.matches,
            launcher.claims,
            launcher.key,
            lambda asked, one=launcher: one.main(asked, world),
        ):
            with contextlib.suppress(HpctrainError, LookupError, ValueError):
                ask(recorder)
        recorder.asked.update(*launcher.variables.values())
    return recorder.asked


class Recorder(dict[str, str]):
    """An environment that remembers the names that were asked for."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary's, remembered."""
        self.asked.add(name)
        return super().get(name, default)
